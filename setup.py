"""Adds what pyproject.toml cannot say: the C++ kernel is compiled into the package, for any Python 3 of this platform.

Without a compiler the package is complete all the same; AdamW then runs in plain torch and says that it is slower.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNEL = Path("megatrain", "optim", "kernel")


def kernel_build() -> ModuleType:
    """build.py of the kernel, by path: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("kernel_build", ROOT / "src" / KERNEL / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernel(build_py):
    """Compiles into the build folder, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        builder = kernel_build()
        try:
            builder.build(ROOT / "src" / KERNEL if self.editable_mode else Path(self.build_lib, KERNEL))
        except builder.BuildFailed as failure:
            print(f"warning: AdamW will run in plain torch, which is slower: {failure}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The kernel needs no particular Python, but a particular platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    """Has compiled code, though no extension module of Python's."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernel, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
