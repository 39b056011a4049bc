"""When the device runs out of memory after all (another program took it): fewer rows at once, or an explanation.

As long as no update was submitted the run can simply be cut smaller: the store holds the weights that it was filled
with. Later the state of the last complete step is saved and the run ends, to be resumed when there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatrain.data.prepare import Prepared
from megatrain.errors import DoesNotFit
from megatrain.host.pages import footprint
from megatrain.plan.accounting import MemoryPlan, account
from megatrain.plan.words import gib, table
from megatrain.report.console import Console
from megatrain.stream.device import Device
from megatrain.stream.device_cuda import others_bytes
from megatrain.train.build import PAD_MULTIPLE_CUDA, build_executor
from megatrain.train.evaluation import evaluation_groups
from megatrain.train.failure import device_is_full
from megatrain.train.planning import Planned
from megatrain.train.prospect import Prospect
from megatrain.train.run import Run
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState
from megatrain.train.trainer import Trainer


def train_through(
    prospect: Prospect,
    *,
    run: Run,
    state: TrainState,
    make: Callable[[Prospect, Run, TrainState], Trainer],
    console: Console,
    stop: StopFlag,
) -> Run:
    """Train to the end, cut smaller where the device has no room for the first step. Returns the run that was trained.

    make: the trainer of a run. Raises DoesNotFit where the device is full and nothing smaller is left to try.
    """
    while True:
        trainer = make(prospect, run, state)
        try:
            trainer.train()
            return run
        except RuntimeError as error:
            if not device_is_full(error):
                raise
            reason = str(error).splitlines()[0]
            smaller = fewer_rows(prospect.planned) if trainer.state.step == state.step else None
            if smaller is None:
                raise device_full(run.plan, device=run.device, reason=reason) from error
        # here the failed step's frames are gone, and with them what they held on the device
        state = trainer.state
        console.warn(
            f"the device ran out of memory in the first step ({reason}); nothing was updated yet, going on "
            + _difference(smaller.plan, was=run.plan)
        )
        prospect = replace(prospect, planned=smaller)
        run = cut_again(run, planned=smaller, prepared=prospect.prepared, stop=stop)


def fewer_rows(planned: Planned) -> Planned | None:
    """The same run with half the rows of a micro-batch (or fewer), with neither graphs nor attention kept and one
    buffer for gradients; None if one row is all there is, and nothing of that can go.

    What waits in host memory must fit where it was planned: the store is not allocated again.
    """
    plan = planned.plan
    rows = plan.micro_batch
    while rows > 1:
        rows = -(-rows // 2)
        smaller = _recut(planned, rows=rows)
        if not plan.load_buffers or _waiting_bytes(smaller) <= _waiting_bytes(plan):
            return replace(planned, plan=smaller)
    spare = plan.kept or plan.attention or plan.grad_buffers > 1
    return replace(planned, plan=_recut(planned, rows=plan.micro_batch)) if spare else None


def cut_again(run: Run, *, planned: Planned, prepared: Prepared, stop: StopFlag | None) -> Run:
    """`run`, of which no update was submitted, with the executor of `planned`. The old executor is closed.

    Raises DoesNotFit.
    """
    run.device.synchronize()
    run.executor.close()
    run.device.release_cache()
    run.gate.more_updates()
    pad_multiple = PAD_MULTIPLE_CUDA if planned.on_cuda else 1
    return replace(
        run,
        executor=build_executor(planned, store=run.store, worker=run.worker, stop=stop),
        eval_batches=evaluation_groups(prepared, recipe=planned.recipe, plan=planned.plan, pad_multiple=pad_multiple),
        plan=planned.plan,
    )


def device_full(plan: MemoryPlan, *, device: Device, reason: str) -> DoesNotFit:
    """What to tell the user: the plan's numbers by purpose, and what others hold."""
    others = others_bytes(device)
    held = "" if others is None else f"; other processes hold {gib(others)} of it"
    limit = "" if plan.device_limit is None else f" of {gib(plan.device_limit.bytes)} ({plan.device_limit.source})"
    return DoesNotFit(
        f"the device ran out of memory{held}. Planned were {gib(plan.device_total)}{limit}: {table(plan.device)}. "
        f"PyTorch says: {reason}",
        hint=(
            "free the device of other programs, or set memory.vram below what is really free; `--resume auto` goes on "
            "from the last checkpoint"
        ),
    )


def _recut(planned: Planned, *, rows: int) -> MemoryPlan:
    plan, job = planned.plan, planned.job
    changed = replace(
        plan,
        micro_batch=rows,
        micro_batches=-(-job.batch_size // rows),
        input_bytes=rows * job.seq_len * job.sizes.hidden_bytes_per_token,
        grad_buffers=min(1, plan.grad_buffers),
        kept=0,
        attention="",
        attention_bytes=0,
        attention_buffers=0,
    )
    return account(changed, terms=job.terms(micro_batch=rows))


def _difference(plan: MemoryPlan, *, was: MemoryPlan) -> str:
    if plan.micro_batch == was.micro_batch:
        return "with everything recomputed" if was.kept or was.attention else "with one buffer for gradients"
    return f"with micro-batches of {plan.micro_batch} rows (were {was.micro_batch}); sums round differently"


def _waiting_bytes(plan: MemoryPlan) -> int:
    """Of one layer's inputs in host memory."""
    return plan.micro_batches * footprint(plan.input_bytes, pinned=True)
