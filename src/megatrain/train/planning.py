"""Everything about a run up to the first byte of weights: device, config, model structure, limits, plan."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from megatrain.errors import DeviceError
from megatrain.model.attention import VARLEN
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.kernel.on_device import NAME, SOURCE, DeviceKernel
from megatrain.optim.threads import optimizer_threads
from megatrain.plan.cutting import attempt
from megatrain.plan.hardware import DeviceMemory, read_host_memory, read_page_lock
from megatrain.plan.job import CONTEXT_BYTES, MOMENT_BYTES, Job, Limits, Settings
from megatrain.plan.memory import MemoryPlan, decide
from megatrain.plan.process import libraries_bytes
from megatrain.recipe import Recipe
from megatrain.stream.device import CpuDevice, Device
from megatrain.stream.device_cuda import (
    CudaDevice,
    cuda_available,
    device_capability,
    device_name,
    open_cuda,
    vram_free_bytes,
)
from megatrain.stream.device_cuda_kernel import CudaKernel
from megatrain.train.gpus import read_gpu
from megatrain.train.ways import Ways, words_for_old


@dataclass(frozen=True)
class Planned:
    """What is known before the first byte of weights."""

    recipe: Recipe
    device: Device
    on_cuda: bool
    device_name: str  # for people
    config: PretrainedConfig
    model: StreamedModel
    plan: MemoryPlan
    job: Job  # what the plan answers: changed, it can be planned again
    device_kernel: DeviceKernel | None = None  # None: no unit may be resident


def plan_run(recipe: Recipe, *, config: PretrainedConfig, resumed: MemoryPlan | None = None) -> Planned:
    """Open the device, read the model's structure, decide the plan (a resumed run is cut as it was, where that fits).

    Raises ModelError for a model that cannot run exactly, DeviceError, DoesNotFit.
    """
    device, name, memory = _open_device(recipe)
    on_cuda = memory is not None
    ways = _ways(recipe, device=device, name=name, on_cuda=on_cuda)
    model = StreamedModel.build(
        ModelSpec(
            config=config,
            attention=VARLEN if ways.ours else recipe.model.attention,
            precision=torch.bfloat16 if ways.bf16 else torch.float32,
            training=True,
            compile=ways.compiled,
            trust_remote_code=recipe.model.trust_remote_code,
        ),
        rng=device.rng,
    )
    if recipe.data.packing:
        model.check_packing()
    kernel = _device_kernel(device)
    host = read_host_memory()
    threads = recipe.memory.threads
    job = Job(
        model.sizes,
        memory=Settings.of(recipe.memory),
        batch_size=recipe.train.batch_size,
        seq_len=recipe.data.max_seq_len,
        packed=recipe.data.packing,
        limits=Limits(
            host=host,
            device=memory,
            threads=optimizer_threads(threads if isinstance(threads, int) else None),
            context_bytes=device.context_bytes if isinstance(device, CudaDevice) else CONTEXT_BYTES,
            libraries_bytes=libraries_bytes(
                on_cuda=on_cuda, compiled=model.spec.compile, process_bytes=host.process_bytes
            ),
            page_lock=read_page_lock() if on_cuda else None,
        ),
        stem_shared=model.anatomy.stem_shared,
        dense_masks=model.attention != VARLEN,
        moment_bytes=MOMENT_BYTES[recipe.optimizer.state],
        can_reside=kernel is not None,
        compiled=model.spec.compile,
        resumed=resumed,
    )
    if resumed is not None and not attempt(job).fits:
        job = replace(job, resumed=None)
    return Planned(recipe, device, on_cuda, name, config, model, decide(job), job, kernel)


def _open_device(recipe: Recipe) -> tuple[Device, str, DeviceMemory | None]:
    wanted = recipe.memory.device
    if wanted == "cpu" or (wanted == "auto" and not cuda_available()):
        threads = torch.get_num_threads()
        return CpuDevice(), f"CPU, {threads} thread{'s' if threads > 1 else ''}", None
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the context is made
        torch.use_deterministic_algorithms(True)
    _, _, number = wanted.partition(":")
    before = read_gpu(int(number or 0))  # the driver's count, before this process holds anything
    cuda = open_cuda(int(number or 0))
    vram = recipe.memory.vram
    device = CudaDevice(
        cuda,
        ceiling_bytes=vram if isinstance(vram, int) else None,
        free_before_bytes=None if before is None else before.free_bytes,
    )
    free, taken = vram_free_bytes(cuda)
    name = device_name(cuda)
    return device, name, DeviceMemory(total_bytes=free + taken, free_bytes=free + device.context_bytes, name=name)


def _device_kernel(device: Device) -> DeviceKernel | None:
    """AdamW for units that live on the device; without it (no NVRTC) none does, and the rest works as ever."""
    if not isinstance(device, CudaDevice):
        return None
    try:
        return DeviceKernel(CudaKernel(SOURCE.read_text(), name=NAME, device=device.torch_device))
    except DeviceError as error:
        warnings.warn(f"spare VRAM is left unused: {error}", stacklevel=2)
        return None


def _ways(recipe: Recipe, *, device: Device, name: str, on_cuda: bool) -> Ways:
    capability = device_capability(device.torch_device) if isinstance(device, CudaDevice) else None
    if (words := words_for_old(name=name, capability=capability)) is not None:
        warnings.warn(words, stacklevel=2)
    return Ways.of(recipe, on_cuda=on_cuda, capability=capability)
