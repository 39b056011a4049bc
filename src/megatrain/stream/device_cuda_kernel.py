"""A CUDA kernel of our own, compiled when a run starts: NVRTC, which PyTorch brings along, and the driver.

Both have plain C interfaces that last over releases: no CUDA toolkit is needed, and no build at installation.
"""

from __future__ import annotations

import ctypes

import torch

from megatrain.errors import DeviceError

_SUCCESS = 0


class CudaKernel:
    """A compiled kernel that takes one struct by value. Called, it is enqueued on the device's current stream."""

    def __init__(self, source: str, *, name: str, device: torch.device) -> None:
        """Compile the function `name` for the device, whose context exists. Raises DeviceError."""
        self._device = device
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            image = _compile(source, name=name, device=device)
        except OSError as error:
            raise DeviceError(f"the kernel {name} cannot be compiled: {error}") from error
        self._image = image  # the driver reads it lazily
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        found = self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        self._check(found, "cuModuleGetFunction")

    def __call__(self, argument: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """The struct is copied before this returns."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        one, stream = ctypes.c_uint(1), ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        grid, block = ctypes.c_uint(blocks), ctypes.c_uint(threads)
        code = self._driver.cuLaunchKernel(
            self._function, grid, one, one, block, one, one, ctypes.c_uint(0), stream, arguments, None
        )
        self._check(code, "cuLaunchKernel")

    @staticmethod
    def _check(code: int, what: str) -> None:
        if code != _SUCCESS:
            raise DeviceError(f"{what} failed with CUDA error {code}")


def _compile(source: str, *, name: str, device: torch.device) -> bytes:
    """The kernel as machine code of the device. Raises OSError without NVRTC, DeviceError with its log."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if code != _SUCCESS:
        raise DeviceError(f"NVRTC does not take the kernel {name}: error {code}")
    try:
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17", b"--fmad=false"]
        code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code != _SUCCESS:
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise DeviceError(f"NVRTC does not compile the kernel {name}: {log.decode(errors='replace')[:2000]}")
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> ctypes.CDLL:
    """The library of PyTorch's own CUDA release, which is loaded already or lies on its search path."""
    release = str(torch.version.cuda).partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{release}")
    except OSError:
        return ctypes.CDLL("libnvrtc.so")


def _bytes(size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    block = ctypes.create_string_buffer(size.value)
    read(program, block)
    return block.raw
