"""Everything that is known, and can fail, before the first byte of weights: data, model structure, plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatrain.data import Loader, Prepared, load_tokenizer, prepare
from megatrain.errors import UsageError
from megatrain.model.config_values import vocabulary
from megatrain.optim.lr import warmup_steps
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.explain import explain
from megatrain.plan.preflight import page_lock_warning
from megatrain.plan.words import place
from megatrain.recipe import Recipe
from megatrain.report.console import Console
from megatrain.report.process import versions
from megatrain.report.sinks import check_available
from megatrain.train.intervals import total_steps
from megatrain.train.manifest import Identity
from megatrain.train.model_config import max_positions, read_config
from megatrain.train.planning import Planned, plan_run
from megatrain.train.resume import Start
from megatrain.train.signals import StopFlag
from megatrain.units import format_size

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Prospect:
    """What a run will be."""

    recipe: Recipe  # as the user wrote it
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    planned: Planned
    total_steps: int

    @cached_property
    def identity(self) -> Identity:
        """What its checkpoints will say of it."""
        return Identity(
            recipe=self.recipe.to_dict(),
            plan=self.planned.plan.to_dict(),
            precision=_PRECISIONS[self.planned.model.spec.precision],
            config_hash=self.planned.model.sizes.config_hash,
            data=self.prepared.fingerprint(),
            total_steps=self.total_steps,
            versions=versions(),
        )


def look_ahead(recipe: Recipe, *, start: Start, console: Console, stop: StopFlag) -> Prospect:
    """Read the data, the model's structure and the machine's limits. Raises what is wrong with any of them."""
    check_available(tensorboard=recipe.report.tensorboard, wandb=recipe.report.wandb is not None)
    config = read_config(recipe)
    console.phase("reading and tokenising the data")
    tokenizer = load_tokenizer(recipe)
    prepared = prepare(
        recipe,
        tokenizer=tokenizer,
        max_positions=max_positions(config),
        vocab_size=vocabulary(config),
        should_stop=stop.check,
    )
    for warning in prepared.report.warnings():
        console.warn(warning)
    steps = _count_steps(recipe, prepared=prepared, start=start)
    stop.check()
    console.phase("reading the model's structure and planning memory")
    planned = _plan(recipe, config=config, start=start, console=console)
    stop.check()
    prospect = Prospect(recipe, tokenizer, prepared, planned, steps)
    _describe(prospect, start=start, console=console)
    return prospect


def _count_steps(recipe: Recipe, *, prepared: Prepared, start: Start) -> int:
    """Raises RecipeError for a warm-up longer than the run, UsageError for a checkpoint that stands nowhere in it."""
    loader = Loader.of(prepared.train, recipe=recipe)
    steps = total_steps(loader, epochs=recipe.train.epochs, steps=recipe.train.steps)
    warmup_steps(recipe.optimizer.warmup, total=steps)
    for checkpoint in start.candidates:
        state = checkpoint.state
        same = checkpoint.manifest.identity.data == prepared.fingerprint()  # else that is what will be told
        if same and state.index >= max(1, loader.steps_in_epoch(state.epoch)):
            raise UsageError(
                f"{checkpoint.path.name} says that {state.index} steps of epoch {state.epoch + 1} are done, "
                f"which has {loader.steps_in_epoch(state.epoch)}",
                where="--resume",
            )
    return steps


def _plan(recipe: Recipe, *, config: PretrainedConfig, start: Start, console: Console) -> Planned:
    """A resumed run keeps its precision, and what of its plan decides rounding, as far as this machine has room."""
    if not start.candidates:
        return plan_run(recipe, config=config)
    identity = start.candidates[0].manifest.identity
    if recipe.train.precision == "auto":
        train = recipe.train.model_copy(update={"precision": identity.precision})
        recipe = recipe.model_copy(update={"train": train})
    try:
        before = MemoryPlan.from_dict(identity.plan)
        _check_cut(before, batch_size=recipe.train.batch_size)
    except (KeyError, TypeError, ValueError):
        console.note("the checkpoint's memory plan is of another version; planning anew")
        return plan_run(recipe, config=config)
    planned = plan_run(recipe, config=config, resumed=before)
    said = new_rounding(before, now=planned.plan)
    if said is not None:
        console.note(said)
    return planned


def new_rounding(before: MemoryPlan, *, now: MemoryPlan) -> str | None:
    """What a resumed run is told where its plan rounds otherwise than before; None where it does not."""
    changes = [
        f"{what.format(mine)} (were {theirs})"
        for what, mine, theirs in (
            ("micro-batches of {} rows", now.micro_batch, before.micro_batch),
            ("logits of {} tokens at once", now.head_chunk, before.head_chunk),
            ("{} slices of the head", now.head_slices, before.head_slices),
            ("experts in {} groups", now.expert_groups, before.expert_groups),
            ("tiles of {} tokens", now.tile_tokens, before.tile_tokens),
        )
        if mine != theirs
    ]
    return f"the memory plan is new: {', '.join(changes)}; sums round differently than before" if changes else None


def _check_cut(plan: MemoryPlan, *, batch_size: int) -> None:
    """Raises ValueError for a plan that no planner made: what is taken from it must be counts."""
    counts = (plan.micro_batch, plan.head_chunk, plan.head_slices + 1, plan.expert_groups + 1, plan.tile_tokens + 1)
    if not all(type(count) is int and count >= 1 for count in counts) or plan.head_slices == 1:
        raise ValueError("not a plan")
    if plan.micro_batch > batch_size:
        raise ValueError("not a plan of this step")


def _describe(prospect: Prospect, *, start: Start, console: Console) -> None:
    plan, train, steps = prospect.planned.plan, prospect.prepared.train, prospect.total_steps
    console.note(
        f"{len(train):,} documents, {train.token_count:,} tokens ({train.supervised_count:,} supervised), "
        f"{steps} steps of {prospect.recipe.train.batch_size} sequences"
    )
    planned = prospect.planned
    console.note(
        f"{planned.device_name}: micro-batches of {plan.micro_batch}, {plan.slots} weight slots, "
        f"activations {place(plan)}, {plan.threads} optimizer threads, "
        f"{format_size(plan.host_total)} of host memory"
        + (f", {format_size(plan.device_total)} of VRAM" if not plan.on_cpu else "")
    )
    for sentence in explain(plan, job=planned.job):
        console.note(sentence)
    slower = page_lock_warning(plan, job=planned.job)
    if slower is not None:
        console.warn(slower)
    if start.candidates and start.candidates[0].manifest.identity.total_steps != steps:
        before = start.candidates[0].manifest.identity.total_steps
        console.note(f"the run now has {steps} steps (was {before}); the learning rate follows the new total")
