"""Every case of the family matrix: a variant and a mode, run against plain Hugging Face in the same process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from drive import (
    WHOLE,
    Result,
    Streamed,
    differences,
    make_batches,
    reference_model,
    run_reference,
    run_reference_with_router_loss,
)
from transformers import AutoModelForCausalLM
from variants import EAGER_ONLY, VARIANTS, attention_of, config_of

from megatrain.errors import ModelError
from megatrain.model.batch import IGNORE, MicroBatch

TIES = 1e-7
"""Tied weights with several micro-batches: the sum is taken in another order."""
CHUNKED = 5e-7
"""A head in chunks or slices: sums over tokens or entries in another order; relative to the tensor's largest element
if that is over 1."""
SLICED_FURTHER = {"gemma4_text": 1e-6}
"""Variants whose layers amplify the head's rounding: 6.9e-7 was measured in slices, and in chunks of two micro-batches
6.3e-7."""
CHUNK = 7
APART = 1e-6
"""Packed against apart: other shapes, other kernels."""
DOCUMENT = 9
"""Tokens of the first document of a packed row, see make_batches."""

LEAKING = frozenset(
    {
        "bloom",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "jamba",
        "bamba",
        "nemotron_h",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "zamba2",
        "recurrent_gemma",
        "minimax",
        "olmo_hybrid",
    }
)
"""Packing is refused: state or masks that do not know documents."""
EXPLICIT_MASKS = frozenset({"opt", "mpt", "gpt_oss", "afmoe", "biogpt", "xglm"})
"""Packing works with masks from transformers.masking_utils; the family's own forward would leak."""
ROUTER_LOSS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "phimoe",
    "qwen3_next",
    "jamba",
    "qwen3_5_moe_text",
    "ernie4_5_moe",
    "minimax_m2",
    "flex_olmo",
    "granitemoehybrid",
    "dbrx",
    "jetmoe",
    "minimax",
)
DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {},
    "llama": {"attention_dropout": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1},
    "granite": {"attention_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.1},
    "stablelm": {"hidden_dropout": 0.1},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "jetmoe": {},
    "biogpt": {},
    "xglm": {},
}
RELOADED = frozenset({"gptj", "codegen"})
"""In bf16 the reference must come through from_pretrained: from_config leaves their sincos table in fp32."""


@dataclass(frozen=True)
class Case:
    variant: str
    mode: str

    def __str__(self) -> str:
        return f"{self.variant}-{self.mode}"


def all_cases() -> list[Case]:
    """The whole matrix, in the order of the variants."""
    cases = []
    for variant in VARIANTS:
        modes = ["plain", "packed", "micro-batches", "training", "padded", "chunked", "bf16", "isolation"]
        modes += ["kept", "kept-training"]  # graphs kept instead of a recompute
        modes += ["sliced"]  # the head in slices, the embedding as rows
        if variant not in EAGER_ONLY:
            modes += ["eager", "packed-eager"]
        if variant in ROUTER_LOSS:
            modes += ["router", "router-padded", "router-micro-batches"]
        if variant in DROPOUT:
            modes += ["dropout"] if variant in EAGER_ONLY else ["dropout", "dropout-eager"]
            modes += ["dropout-kept"]
        cases += [Case(variant, mode) for mode in modes]
    return cases


def run_case(case: Case) -> dict[str, float]:
    """Differences beyond what the contract allows for the case; empty: as exact as promised."""
    if case.mode == "isolation":
        return _isolation(case.variant)
    if case.mode.startswith("router"):
        return _router(case)
    attention = "eager" if case.mode.endswith("eager") else attention_of(case.variant)
    dropout = case.mode.startswith("dropout")
    training = dropout or case.mode.endswith("training")
    dtype = torch.bfloat16 if case.mode == "bf16" else torch.float32
    config = config_of(case.variant, **(DROPOUT[case.variant] if dropout else {}))
    model = reference_model(config, attention=attention, dtype=dtype, training=training)
    if case.mode == "bf16" and case.variant in RELOADED:
        model = _reloaded(model, attention=attention)
    slices = 3 if case.mode == "sliced" else 0
    streamed = Streamed(model, config=config, attention=attention, dtype=dtype, training=training, slices=slices)
    batches = make_batches(
        {"micro-batches": 3, "sliced": 2}.get(case.mode, 1),
        packed=case.mode.startswith("packed"),
        padded=case.mode == "padded",
    )
    torch.manual_seed(7)
    theirs = run_reference(model, batches)
    torch.manual_seed(7)
    chunk = CHUNK if case.mode in ("chunked", "sliced") else WHOLE
    ours = streamed.step(batches, chunk=chunk, keep_graphs="kept" in case.mode)
    assert bool(torch.isfinite(theirs.loss))
    assert len(theirs.gradients) > 10
    bound = SLICED_FURTHER.get(case.variant, CHUNKED) if case.mode == "sliced" else CHUNKED
    return _beyond(case.mode, differences(ours, theirs), theirs=theirs, streamed=streamed, bound=bound)


def _beyond(
    mode: str, found: dict[str, float], *, theirs: Result, streamed: Streamed, bound: float = CHUNKED
) -> dict[str, float]:
    """What the contract does not allow among the differences that were found. bound: of a head in chunks or slices."""
    if mode.endswith("micro-batches"):
        tied = _tied(streamed)
        return {n: d for n, d in found.items() if n not in tied or not d <= TIES}
    if mode in ("chunked", "sliced"):
        sizes = {n: max(1.0, float(g.abs().max())) for n, g in theirs.gradients.items()}
        sizes["loss"] = max(1.0, float(theirs.loss))
        return {n: d for n, d in found.items() if not d <= bound * sizes[n]}
    return found


def _tied(streamed: Streamed) -> frozenset[str]:
    """Parameters with more than one use: under several names, in several layers, or in the head too."""
    anatomy = streamed.model.anatomy
    shared = {n for plan in streamed.model.layer_plans for n in plan.shared_names}
    in_head = set(streamed.model.head.names)
    return frozenset(e.name for e in anatomy.stem.layout.params if {f"stem:{e.name}"} & (shared | in_head))


def _router(case: Case) -> dict[str, float]:
    attention = attention_of(case.variant)
    config = config_of(case.variant, output_router_logits=True)
    model = reference_model(config, attention=attention)
    streamed = Streamed(model, config=config, attention=attention)
    coefficient = streamed.model.aux_coefficient
    assert coefficient > 0
    count = 3 if case.mode == "router-micro-batches" else 1
    batches = make_batches(count, padded=case.mode == "router-padded")
    theirs = run_reference_with_router_loss(model, batches, coefficient=coefficient)
    ours = streamed.step(batches)
    assert theirs.aux is not None
    assert float(theirs.aux) > 1
    return _beyond(case.mode, differences(ours, theirs), theirs=theirs, streamed=streamed)


def _isolation(variant: str) -> dict[str, float]:
    """Packed against apart: refused where documents would mix, else within 1e-6 and document 2 unmoved bit for bit."""
    attention = attention_of(variant)
    config = config_of(variant)
    model = reference_model(config, attention=attention)
    if variant in LEAKING:
        try:
            Streamed(model, config=config, attention=attention, packing=True)
        except ModelError:
            return {}
        return {"packing was not refused": float("nan")}
    streamed = Streamed(model, config=config, attention=attention, packing=True)
    (row,) = make_batches(1, packed=True)
    other = row.input_ids.clone()
    other[:, :DOCUMENT] = (other[:, :DOCUMENT] * 7 + 5) % 250 + 3
    labels = row.labels.clone()
    labels[:, :DOCUMENT] = IGNORE
    supervised = int((labels != IGNORE).sum())
    first, loss = streamed.evaluate(replace(row, labels=labels, supervised=supervised))
    second, _ = streamed.evaluate(replace(row, input_ids=other))
    found = {}
    tokens = row.input_ids.shape[1] - DOCUMENT
    moved = (first - second).narrow(-2, DOCUMENT, tokens).abs().max()
    # The grouped product of routed experts rounds a row by how many rows its expert gets, in Hugging Face too.
    sizes = streamed.model.sizes
    allowed = 0.0 if sizes.params_active == sizes.params_total else APART * max(1.0, float(first.abs().max()))
    if not float(moved) <= allowed:
        found["document 2 moved"] = float(moved)
    rest = (row.input_ids[:, DOCUMENT:], labels[:, DOCUMENT:])
    _, apart = streamed.evaluate(MicroBatch(*rest, None, None, rest[0].numel(), supervised))
    if not abs(apart - loss) <= APART * max(1.0, apart):
        found["packed against apart"] = abs(apart - loss)
    return found


def _reloaded(model: Any, *, attention: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.bfloat16)
    again.train(model.training)
    return again
