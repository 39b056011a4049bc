"""`estimate-memory`: what a recipe needs of a machine, from config.json alone. No weights, no device, no data file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatrain.plan.accounting import MemoryPlan, checkpoint_bytes
from megatrain.plan.advice import advise
from megatrain.plan.cutting import attempt
from megatrain.plan.disk import MANY, DiskNeeds
from megatrain.plan.explain import explain
from megatrain.plan.job import MOMENT_BYTES, Job, Settings
from megatrain.plan.largest import Largest, find_largest
from megatrain.plan.memory import unavailable
from megatrain.plan.preflight import disk_shortage, page_lock_warning
from megatrain.plan.refusal import shortage
from megatrain.plan.speed import SpeedEstimate, estimate
from megatrain.recipe import Recipe
from megatrain.train.machine import Described, Machine, find_machine
from megatrain.train.structure import Structure, read_structure

TOLD_ELSEWHERE = ("host", "device", "host_limit", "device_limit")
"""Of a plan's fields; the others are what it decides."""


@dataclass(frozen=True)
class Estimate:
    """A plan for a machine, with what it takes of everything."""

    recipe: Recipe
    structure: Structure
    machine: Machine
    job: Job
    plan: MemoryPlan
    disk_needs: DiskNeeds
    speed: SpeedEstimate
    largest: Largest | None  # where it was asked for

    @property
    def fits(self) -> bool:
        free = self.machine.disk_free_bytes
        return self.plan.fits and (free is None or self.disk_needs.least <= free)

    @property
    def disk(self) -> dict[str, int]:
        return self.disk_needs.table

    @property
    def disk_trouble(self) -> str | None:
        free = self.machine.disk_free_bytes
        return None if free is None else disk_shortage(self.disk_needs, free=free)

    @cached_property
    def advice(self) -> tuple[str, ...]:
        said = []
        if not self.plan.fits:
            said.append(shortage(self.plan))
            for advice in advise(self.job, short=self.plan):
                said.append(f"{advice}{': enough' if advice.enough else ''}")
        elif not self.machine.elsewhere and (trouble := unavailable(self.plan, job=self.job)) is not None:
            said.append(f"now: {trouble.message}; {trouble.hint}")
        said += [text for text in (self.disk_trouble, page_lock_warning(self.plan, job=self.job)) if text is not None]
        positions = self.structure.facts.max_positions
        if positions is not None and self.plan.seq_len > positions:
            said.append(f"data.max_seq_len {self.plan.seq_len} is beyond the model's {positions} positions")
        return tuple(said)

    @property
    def explanation(self) -> tuple[str, ...]:
        return explain(self.plan, job=self.job) if self.plan.fits else ()

    @property
    def assumed(self) -> tuple[str, ...]:
        shape = self.structure.assumed
        return (
            *((shape,) if shape is not None else ()),
            *self.machine.assumed,
            f"{self.job.batch_size} rows of {self.job.seq_len} tokens a step, "
            f"{'packed' if self.job.packed else 'not packed'}; attention {self.structure.facts.attention}",
            "the tokenised data set comes on top of host memory: 5 bytes a token",
            f"speed: {self.speed.rates.source}",
        )

    @property
    def host(self) -> dict[str, int]:
        """By purpose; on the CPU what computing takes is host memory too."""
        return self.plan.host | ({"compute (on the CPU)": self.plan.device_total} if self.plan.on_cpu else {})

    def to_json(self) -> dict[str, Any]:
        sizes, plan = self.structure.facts.sizes, self.plan
        limit = plan.device_limit
        return {
            "status": "fits" if self.fits else "does_not_fit",
            "exit_code": 0 if self.fits else 3,
            "params": {
                "total": sizes.params_total,
                "trainable": sizes.params_trainable,
                "active": sizes.params_active,
            },
            "host": self.host | {"total_bytes": plan.host_total},
            "device": plan.device | {"total_bytes": plan.device_total},
            "disk": self.disk | {"total_bytes": sum(self.disk.values())},
            "limits": {
                "host_bytes": plan.host_limit.bytes,
                "host_source": plan.host_limit.source,
                "vram_bytes": None if limit is None else limit.bytes,
                "vram_source": None if limit is None else limit.source,
                "disk_bytes": self.machine.disk_free_bytes,
            },
            "fits": self.fits,
            "advice": list(self.advice),
            "speed": {
                "tokens_per_s": self.speed.tokens_per_s,
                "bound_by": self.speed.bound_by,
                "step_s": self.speed.step_s,
                "seconds": self.speed.resources | {"launches": self.speed.launch_s},
            },
            "plan": {key: value for key, value in plan.to_dict().items() if key not in TOLD_ELSEWHERE},
            "explanation": list(self.explanation),
            "assumed": list(self.assumed),
        } | ({} if self.largest is None else {"max": self.largest.to_dict()})


def estimate_memory(recipe: Recipe, *, described: Described, largest: bool) -> Estimate:
    """Raises ModelError for a model that cannot be had or cannot run exactly."""
    machine = find_machine(recipe, described)
    structure = read_structure(recipe, ways=machine.ways)
    sizes, facts = structure.facts.sizes, structure.facts
    job = Job(
        sizes,
        memory=_memory(recipe, described),
        batch_size=recipe.train.batch_size,
        seq_len=recipe.data.max_seq_len,
        packed=recipe.data.packing,
        limits=machine.limits,
        stem_shared=facts.stem_shared,
        dense_masks=facts.dense_masks,
        moment_bytes=MOMENT_BYTES[recipe.optimizer.state],
        can_reside=machine.on_cuda,
        compiled=machine.ways.compiled,
    )
    plan = attempt(job)
    tokens = job.batch_size * job.seq_len
    return Estimate(
        recipe=recipe,
        structure=structure,
        machine=machine,
        job=job,
        plan=plan,
        disk_needs=_disk(recipe, structure=structure, job=job),
        speed=estimate(sizes, plan=plan, rates=machine.rates, tokens=tokens, moment_bytes=job.moment_bytes),
        largest=find_largest(job) if largest else None,
    )


def _memory(recipe: Recipe, described: Described) -> Settings:
    """--vram is a ceiling as memory.vram is; the smaller of the two counts."""
    memory = Settings.of(recipe.memory)
    if described.vram is None or (isinstance(memory.vram, int) and memory.vram <= described.vram):
        return memory
    return replace(memory, vram=described.vram, vram_source="--vram")


def _disk(recipe: Recipe, *, structure: Structure, job: Job) -> DiskNeeds:
    """Steps are not counted here: a run that saves now and then is taken to save more than once."""
    sizes, every = structure.facts.sizes, recipe.train.save_every
    return DiskNeeds(
        checkpoint=checkpoint_bytes(sizes, moment_bytes=job.moment_bytes),
        export=_export_param_bytes(recipe, config=structure.config) * sizes.params_total if recipe.output.export else 0,
        keep=recipe.output.keep,
        saves=1 if every is None or every.unit == "seconds" else 2,
        saves_at_most=1 if every is None else MANY,
    )


def _export_param_bytes(recipe: Recipe, *, config: dict[str, Any]) -> int:
    wanted = recipe.output.export_dtype
    if wanted != "auto":
        return 4 if wanted == "fp32" else 2
    return 4 if str(config.get("dtype", config.get("torch_dtype", "bfloat16"))) == "float32" else 2
