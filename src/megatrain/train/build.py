"""The only place that constructs the rooms: takes the memory of a plan, fills it, connects store and executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from megatrain.data.loader import Loader
from megatrain.data.prepare import Prepared
from megatrain.host.initial import init_random
from megatrain.host.store import HostStore
from megatrain.host.weights import check_pretrained, fetch, load_pretrained
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import load_kernel
from megatrain.optim.worker import OptimizerWorker
from megatrain.recipe import Recipe
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry
from megatrain.train.evaluation import evaluation_groups
from megatrain.train.gate import UnitGate
from megatrain.train.model_config import model_path
from megatrain.train.planning import Planned
from megatrain.train.run import Run
from megatrain.train.signals import PolledUpdates, StopFlag
from megatrain.train.yardstick import yardstick

PAD_MULTIPLE_CUDA = 64
"""Padded rows come in few lengths, so that compiled layers and the allocator see few shapes."""


def moments_of(recipe: Recipe) -> torch.dtype:
    """What the optimizer's moments are stored in."""
    return torch.bfloat16 if recipe.optimizer.state == "bf16" else torch.float32


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
            tile_tokens=chosen.tile_tokens,
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


def check_weights(planned: Planned) -> None:
    """Raise what reading a folder's weights would, as far as their headers tell. What is on a hub stays there."""
    folder = Path(model_path(planned.recipe))
    if planned.recipe.model.init == "pretrained" and folder.is_dir():
        model = planned.model
        check_pretrained(folder, units=model.anatomy.units, meta_model=model.meta_model)


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
