"""The machine that a plan is for: this one, or one that is described. No torch: nothing is opened, no context made."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatrain.optim.threads import LEFT_FREE, SMALL, optimizer_threads, usable_cores
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit, read_host_memory, read_page_lock
from megatrain.plan.job import Limits
from megatrain.plan.process import libraries_bytes
from megatrain.plan.rates import Rates, assumed_rates
from megatrain.recipe import Recipe
from megatrain.train.examination import Examination, find_examination
from megatrain.train.gpus import GpuFacts, read_gpu
from megatrain.train.ways import Ways
from megatrain.units import format_size

ASSUMED_CORES = 16
"""Of a machine whose memory is described and whose cores are not: this one's would say nothing about it."""

UNNAMED = "--vram"
"""Of a GPU that is described by its memory alone."""


@dataclass(frozen=True)
class Described:
    """A machine that is not this one, as far as it is described: bytes, bytes per second, cores.

    gpu: as plan/rates.py names it; its memory is then described too, for that table has none.
    """

    vram: int | None = None
    host: int | None = None
    link: int | None = None
    cores: int | None = None
    gpu: str | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether memory is that of another machine."""
        return self.vram is not None or self.host is not None

    @property
    def counted_cores(self) -> int | None:
        """None: those of this machine count."""
        return ASSUMED_CORES if self.cores is None and self.host is not None else self.cores


@dataclass(frozen=True)
class Machine:
    """What planning asks of it."""

    on_cuda: bool
    ways: Ways
    limits: Limits
    rates: Rates
    disk_free_bytes: int | None  # on the volume of output.dir; None: another machine's, which nobody knows
    elsewhere: bool
    assumed: tuple[str, ...]  # for people


def find_machine(recipe: Recipe, described: Described) -> Machine:
    """This machine, with what was described in place of what it has."""
    here = _gpu_here(recipe)
    on_cuda = recipe.memory.device != "cpu" and (described.vram is not None or here is not None)
    device = _device(described, here=here) if on_cuda else None
    host = _host(described)
    capability = None if described.vram is not None or here is None else here.capability
    ways = Ways.of(recipe, on_cuda=on_cuda, capability=capability)
    stated = recipe.memory.threads
    threads = _threads(described, stated=stated if isinstance(stated, int) else None)
    measured_with = here.name if on_cuda and here and described.gpu is None else None
    examined = None if described.counted_cores else find_examination(measured_with)
    limits = Limits(
        host=host,
        device=device,
        threads=threads,
        libraries_bytes=libraries_bytes(on_cuda=on_cuda, compiled=ways.compiled, process_bytes=host.process_bytes),
        page_lock=read_page_lock() if on_cuda and not described.elsewhere else None,
    )
    gpu = None if device is None else device.name
    return Machine(
        on_cuda=on_cuda,
        ways=ways,
        limits=limits,
        rates=_rates(described, gpu=gpu, threads=threads, examined=examined),
        disk_free_bytes=None if described.elsewhere else disk_free(Path(recipe.output.dir)),
        elsewhere=described.elsewhere,
        assumed=(
            *_assumed(described, gpu=gpu, on_cuda=on_cuda, ways=ways),
            _cores(described, threads=threads),
        ),
    )


def disk_free(folder: Path) -> int:
    """Bytes free on the volume where `folder` is or will be."""
    path = folder.expanduser().absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(there).free


def _gpu_here(recipe: Recipe) -> GpuFacts | None:
    wanted = recipe.memory.device
    if wanted == "cpu":
        return None
    _, _, number = wanted.partition(":")
    return read_gpu(int(number or 0))


def _device(described: Described, *, here: GpuFacts | None) -> DeviceMemory:
    if described.vram is not None:
        ours = here.name if here is not None and here.total_bytes >= described.vram else UNNAMED
        return DeviceMemory(described.vram, described.vram, described.gpu or ours)
    assert here is not None
    return DeviceMemory(here.total_bytes, here.free_bytes, here.name)


def _host(described: Described) -> HostMemory:
    if described.host is None:
        return read_host_memory()
    limit = Limit(described.host, "--host")
    return HostMemory(limit=limit, available=limit, process_bytes=0, may_grow=False)


def _threads(described: Described, *, stated: int | None) -> int:
    cores = described.counted_cores
    if cores is None or stated is not None:
        return optimizer_threads(stated)
    return cores - LEFT_FREE if cores > SMALL else cores


def _rates(described: Described, *, gpu: str | None, threads: int, examined: Examination | None) -> Rates:
    assumed = assumed_rates(gpu, cores=threads, link_bytes=described.link)
    if examined is None:
        return assumed
    if described.link is not None:  # what is stated stands
        return Examination(**{**vars(examined), "link_in_bytes_per_s": None}).improve(assumed)
    return examined.improve(assumed)


def _assumed(described: Described, *, gpu: str | None, on_cuda: bool, ways: Ways) -> tuple[str, ...]:
    said = []
    if described.vram is not None:
        which = "; --gpu says which GPU, and so how fast" if gpu == UNNAMED else ""
        said.append(
            f"{described.gpu or 'a GPU'} on which this process may take {format_size(described.vram)} (--vram, a "
            f"ceiling as memory.vram is; of a whole card, auto takes 90 %){which}"
        )
    elif not on_cuda:
        said.append(f"the CPU of {platform.node() or 'this machine'} computes: no GPU is used (--vram plans for one)")
    if on_cuda:
        layers = "compiled layers" if ways.compiled else "layers as they are"
        taken = (
            "bf16 weights and our variable-length attention" if ways.modern else "fp32 weights and PyTorch's attention"
        )
        said.append(f"{taken} where the recipe leaves them open, {layers}")
    if described.host is not None:
        said.append(f"{format_size(described.host)} of host memory (--host), some of it left to the system")
    if described.elsewhere:
        said.append("another machine, whose disk is not known: nothing is said of what is free where output.dir is")
    return tuple(said)


def _cores(described: Described, *, threads: int) -> str:
    used = f"{threads} of them update weights"
    if described.cores is not None:
        return f"{described.cores} cores (--cores), {used}"
    if described.counted_cores is not None:
        return f"{ASSUMED_CORES} cores, {used}: --host is another machine's memory, and --cores says how many it has"
    return f"the {usable_cores()} cores that this process may use here, {used} (--cores plans for others)"
