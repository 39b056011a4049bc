"""The only place that constructs the rooms.

`plan_run` does everything up to the first byte of weights: device, config, model structure, limits, plan.
`build_run` then takes the memory, fills it, and connects store, executor and optimizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatrain.data.loader import Loader
from megatrain.data.prepare import Prepared
from megatrain.errors import DeviceError
from megatrain.host.initial import init_random
from megatrain.host.store import HostStore
from megatrain.host.weights import fetch, load_pretrained
from megatrain.model.attention import VARLEN
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import load_kernel
from megatrain.optim.kernel.on_device import NAME, SOURCE, DeviceKernel
from megatrain.optim.threads import optimizer_threads
from megatrain.optim.worker import OptimizerWorker
from megatrain.plan.cutting import attempt
from megatrain.plan.hardware import DeviceMemory, read_host_memory, read_page_lock
from megatrain.plan.job import CONTEXT_BYTES, MOMENT_BYTES, Job, Limits, Settings
from megatrain.plan.memory import MemoryPlan, decide
from megatrain.plan.process import libraries_bytes
from megatrain.recipe import Recipe
from megatrain.stream.device import CpuDevice, Device
from megatrain.stream.device_cuda import CudaDevice, cuda_available, device_name, open_cuda, vram_free_bytes
from megatrain.stream.device_cuda_kernel import CudaKernel
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry
from megatrain.train.evaluation import evaluation_groups
from megatrain.train.gate import UnitGate
from megatrain.train.gpus import read_gpu
from megatrain.train.model_config import model_path
from megatrain.train.run import Run
from megatrain.train.signals import PolledUpdates, StopFlag
from megatrain.train.yardstick import yardstick

PAD_MULTIPLE_CUDA = 64
"""Padded rows come in few lengths, so that compiled layers and the allocator see few shapes."""


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


def moments_of(recipe: Recipe) -> torch.dtype:
    """What the optimizer's moments are stored in."""
    return torch.bfloat16 if recipe.optimizer.state == "bf16" else torch.float32


def plan_run(recipe: Recipe, *, config: PretrainedConfig, resumed: MemoryPlan | None = None) -> Planned:
    """Open the device, read the model's structure, decide the plan (a resumed run is cut as it was, where that fits).

    Raises ModelError for a model that cannot run exactly, DeviceError, DoesNotFit.
    """
    device, name, memory = _open_device(recipe)
    on_cuda = memory is not None
    model = StreamedModel.build(
        ModelSpec(
            config=config,
            attention=_attention(recipe, on_cuda=on_cuda),
            precision=_precision(recipe, on_cuda=on_cuda),
            training=True,
            compile=on_cuda and recipe.memory.compile == "auto",
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


@dataclass(frozen=True)
class Rooms:
    """What holds the state and moves it."""

    store: HostStore
    worker: OptimizerWorker
    executor: StreamingExecutor


def build_rooms(
    planned: Planned,
    *,
    fill: Callable[[HostStore], None],
    before_unit: Callable[[int], None] = lambda unit: None,
    after_unit: Callable[[int], None] = lambda unit: None,
    stop: StopFlag | None = None,
) -> Rooms:
    """Take the memory that the plan counted, fill it, connect store, optimizer and executor.

    before_unit, after_unit: called by the optimizer's thread around each update. stop: a step that is still running
    long after it was raised is given up between two layers. Raises DoesNotFit.
    """
    chosen, model = planned.plan, planned.model
    rows = ("activations", "attention outputs", "embedding rows")
    store = HostStore.allocate(
        model.anatomy,
        pin=planned.on_cuda,
        threads=chosen.threads,
        extra_pinned_bytes=sum(chosen.host.get(purpose, 0) for purpose in rows),
        moments=moments_of(planned.recipe),
    )
    fill(store)
    optimizer = _optimizer(planned, store=store)
    worker = OptimizerWorker(
        optimizer,
        store=store,
        before_unit=before_unit,
        after_unit=after_unit,
    )
    executor = build_executor(planned, store=store, worker=worker, stop=stop)
    return Rooms(store, worker, executor)


def build_executor(
    planned: Planned, *, store: HostStore, worker: OptimizerWorker, stop: StopFlag | None = None
) -> StreamingExecutor:
    """The executor of the plan on a store that is there. What an earlier one took of the store's arena is given back.

    Raises DoesNotFit.
    """
    chosen = planned.plan
    store.arena.rewind()
    return StreamingExecutor(
        planned.model,
        store=store,
        device=planned.device,
        geometry=Geometry(
            micro_batches=chosen.micro_batches,
            slots=chosen.slots,
            grad_buffers=chosen.grad_buffers,
            load_buffers=chosen.load_buffers,
            head_chunk=chosen.head_chunk,
            input_bytes=chosen.input_bytes,
            resident=chosen.resident,
            kept=chosen.kept,
            head_slices=chosen.head_slices,
            embedding_rows=chosen.embedding_rows,
            attention_bytes=chosen.attention_bytes,
            attention_buffers=chosen.attention_buffers,
            expert_groups=chosen.expert_groups,
        ),
        updates=worker if stop is None else PolledUpdates(worker, stop=stop),
    )


def build_run(
    planned: Planned,
    *,
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int, int], None] | None = None,
    load_weights: bool = True,
    stop: StopFlag | None = None,
) -> Run:
    """Allocate, load (or initialise) and connect. `load_weights` False: a checkpoint is read into it next.

    progress: called with bytes read and bytes in all. Raises ModelError, DoesNotFit.
    """
    recipe, chosen = planned.recipe, planned.plan

    def fill(store: HostStore) -> None:
        if load_weights:
            _fill(store, planned, progress=progress)

    gate = UnitGate()
    rooms = build_rooms(planned, fill=fill, before_unit=gate.before, after_unit=gate.after, stop=stop)
    pad_multiple = PAD_MULTIPLE_CUDA if planned.on_cuda else 1
    return Run(
        recipe=recipe,
        model=planned.model,
        store=rooms.store,
        device=planned.device,
        device_name=planned.device_name,
        executor=rooms.executor,
        worker=rooms.worker,
        gate=gate,
        loader=Loader.of(prepared.train, recipe=recipe, pad_multiple=pad_multiple),
        eval_batches=evaluation_groups(prepared, recipe=recipe, plan=chosen, pad_multiple=pad_multiple),
        tokenizer=tokenizer,
        plan=chosen,
        yardstick=yardstick(
            planned.model.sizes,
            plan=chosen,
            device_name=planned.device_name,
            moment_bytes=planned.job.moment_bytes,
        ),
    )


def _fill(store: HostStore, planned: Planned, *, progress: Callable[[int, int], None] | None) -> None:
    recipe = planned.recipe
    if recipe.model.init == "random":
        init_random(store, meta_model=planned.model.meta_model, seed=recipe.train.seed)
        return
    source = fetch(model_path(recipe), revision=recipe.model.revision)
    load_pretrained(store, source=source, meta_model=planned.model.meta_model, progress=progress)


def _optimizer(planned: Planned, *, store: HostStore) -> AdamW:
    named = planned.model.meta_model.named_parameters()
    marked = (n for n, p in named if getattr(p, "_no_weight_decay", False))
    options = planned.recipe.optimizer
    return AdamW(
        store,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        decay_all=options.decay_all,
        never_decay=frozenset(marked),
        kernel=load_kernel(threads=planned.plan.threads),
        device_kernel=planned.device_kernel,
        seed=planned.recipe.train.seed,
    )


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


def _attention(recipe: Recipe, *, on_cuda: bool) -> str:
    """Ours where its kernels work: on CUDA, in bf16."""
    wanted = recipe.model.attention
    ours = wanted == "auto" and on_cuda and _precision(recipe, on_cuda=on_cuda) is torch.bfloat16
    return VARLEN if ours else wanted


def _precision(recipe: Recipe, *, on_cuda: bool) -> torch.dtype:
    match recipe.train.precision:
        case "fp32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
    return torch.bfloat16 if on_cuda else torch.float32
