"""How long a step takes on a machine whose rates are known: seconds per resource, and what they overlap to.

The cost model, for T tokens and a plan:

compute    6 FLOP per multiplied parameter and token, plus causal attention (2 T S D a layer forward, twice that
           backward), plus what a layer's recompute repeats (RECOMPUTE_SHARE of its forward; kept layers repeat
           nothing), plus what element-wise kernels and gradient sums move through the device's own memory
link       in: every streamed unit once, layers a second time for the backward unless they are still in a slot;
           out: one gradient per streamed unit. Activations that wait on the host go out and come back in
groups     where experts come in groups, the rest of a layer runs once more in the forward and in the backward, and the
           element-wise kernels of experts pass over all choices of all tokens for every group. Few rows an
           expert are slow there
optimizer  AdamW's bytes over what the host's memory moves. Resident units are updated on the device instead
launches   what the host takes to enqueue a layer's kernels, however short they are: of a GPU only

The forward hides the update and the fetches, the backward the fetches and the gradients:

step = start + max(forward, update, link, launches) + max(head and backward, link, launches)

`start` is what cannot hide: with exact clipping, the first units are updated and fetched when the device has
nothing to do. The numbers are estimates; `megatrain bench` measures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatrain.model.sizes_types import ModelSizes, UnitSizes
from megatrain.plan.accounting import MemoryPlan, grouped_experts, sliced_ends
from megatrain.plan.attention import head_params, layer_params
from megatrain.plan.experts import GROUP_PLACES, active_params
from megatrain.plan.launches import launch_s
from megatrain.plan.rates import Rates
from megatrain.plan.slices import HEAD_PLACES

RECOMPUTE_SHARE = 0.71
"""Of a layer's forward: its last product is not read by the backward. 0.71 for Llama and Qwen shapes."""
ATTENTION_BACKWARD = 2.5
"""Fused attention's backward over its forward: five products for two."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 1.5, 2.5
"""Device memory traffic of a layer's element-wise kernels, in units of what autograd saves for its backward."""
SUM_BYTES = 16
"""Per parameter and micro-batch: the gradient is read (2), its fp32 sum read and written (8); PyTorch's kernel for two
dtypes reached 2.3 to 2.7 of the 3.8 TB/s that others do on an H200."""
LOGIT_BYTES = 10
"""Per logit: written, read for the loss, turned into its gradient, read twice by the products."""

GROUP_ROWS = 1300
"""Rows of an expert in a micro-batch with which a group's products take twice as long as a dense layer's. It makes the
time of one run in groups come out (four layers of Mixtral on an H200, 512 rows), whatever it is that takes it there. In
whole layers experts' products come as fast as others (650 to 700 TFLOP/s, a profile of 1,280 and 2,560 rows)."""


@dataclass(frozen=True)
class SpeedEstimate:
    """Seconds of one step by resource, and what they come to when they overlap."""

    tokens: int
    forward_s: float  # the layers' forward, on the device
    head_s: float  # head and loss, forward and backward
    backward_s: float  # the layers' backward, recompute included
    recompute_s: float  # the part of backward_s that repeats the forward
    products_s: float  # the part of all compute that is matrix products and attention
    link_in_s: float  # alone on the link
    link_out_s: float
    optimizer_s: float  # on the CPU
    device_update_s: float  # of resident units
    launch_s: float  # by the host, which enqueues
    start_s: float  # the first units' update and fetch, which nothing hides
    step_s: float
    bound_by: str  # "compute" | "optimizer" | "link" | "launches": what the step waits for most of its time
    rates: Rates

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.head_s + self.backward_s + self.device_update_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def resources(self) -> dict[str, float]:
        """Seconds below which each resource cannot do this plan's work: of compute, products and attention alone."""
        link_s = max(self.link_in_s, self.link_out_s)
        return {"compute": self.products_s, "optimizer": self.optimizer_s, "link": link_s}

    @property
    def light_by(self) -> str:
        """The resource that is needed longest."""
        return max(self.resources, key=lambda name: self.resources[name])

    @property
    def light_s(self) -> float:
        """The speed of light: with all else hidden, a step of this plan takes as long as its slowest resource."""
        return self.resources[self.light_by]

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "compute_s": self.compute_s,
            "tokens_per_s": self.tokens_per_s,
            "light_s": self.light_s,
            "light_by": self.light_by,
        }
        return asdict(self) | derived


def step_flops(sizes: ModelSizes, *, tokens: int, seq_len: float) -> float:
    """FLOP of one step as a rate in TFLOP/s or an MFU counts them: 6 per multiplied parameter and token, plus
    6 x layers x sequence x hidden a token for causal attention. Nothing that is recomputed."""
    attention = len(sizes.layers) * seq_len * sizes.hidden_numel_per_token
    return 6.0 * (layer_params(sizes) + head_params(sizes) + attention) * tokens


def estimate(sizes: ModelSizes, *, plan: MemoryPlan, rates: Rates, tokens: int, moment_bytes: int = 4) -> SpeedEstimate:
    """One step of `tokens` tokens, padding included. moment_bytes: of an element of each of the two moments."""
    resident = plan.resident
    work = _Work(sizes, plan=plan, rates=rates, tokens=tokens)
    units = (sizes.stem, *sizes.layers, sizes.tail)
    update = [_update_s(unit, rates=rates, moment_bytes=moment_bytes) for unit in units]
    optimizer_s = sum(update[resident:])
    device_update_s = sum(_update_bytes(u, moment_bytes=moment_bytes) for u in units[:resident]) / rates.device_bytes
    forward_s, head_s, backward_s = work.forward_s(), work.head_s(), work.backward_s()
    start_s = _start_s(units, rates=rates, update=update) if resident < 1 else 0.0
    forward_link, backward_link = _links(sizes, plan=plan, resident=resident)
    launches = launch_s(sizes, plan=plan)
    last_layer_s = forward_s / len(sizes.layers)
    phases = (
        {
            "compute": start_s + forward_s + device_update_s,
            "optimizer": optimizer_s + (last_layer_s if optimizer_s else 0.0),
            "link": forward_link.seconds(rates),
            "launches": launches[0],
        },
        {"compute": head_s + backward_s, "link": backward_link.seconds(rates), "launches": launches[1]},
    )
    return SpeedEstimate(
        tokens=tokens,
        forward_s=forward_s,
        head_s=head_s,
        backward_s=backward_s,
        recompute_s=work.recompute_s(),
        products_s=work.products_s(),
        link_in_s=(forward_link.into + backward_link.into) / rates.link_in_bytes,
        link_out_s=(forward_link.out + backward_link.out) / rates.link_out_bytes,
        optimizer_s=optimizer_s,
        device_update_s=device_update_s,
        launch_s=sum(launches),
        start_s=start_s,
        step_s=sum(max(phase.values()) for phase in phases),
        bound_by=_bound(phases),
        rates=rates,
    )


def _bound(phases: tuple[dict[str, float], ...]) -> str:
    """The resource that the step spends most time under: a phase counts for the one that is its longest."""
    held: dict[str, float] = {}
    for phase in phases:
        longest = max(phase, key=lambda name: phase[name])
        held[longest] = held.get(longest, 0.0) + phase[longest]
    return max(held, key=lambda name: held[name])


# --- compute -----------------------------------------------------------------------------------------------


class _Work:
    """What the device does for `tokens` tokens, in seconds."""

    def __init__(self, sizes: ModelSizes, *, plan: MemoryPlan, rates: Rates, tokens: int) -> None:
        self._sizes, self._plan, self._rates, self._tokens = sizes, plan, rates, tokens
        layers = len(sizes.layers)
        self._products_s = 2.0 * layer_params(sizes) * tokens / rates.matmul_flops  # of one forward
        attention = 2.0 * tokens * plan.seq_len * sizes.hidden_numel_per_token * layers
        self._attention_s = attention / rates.attention_flops
        self._traffic_s = sizes.saved_bytes_per_token * tokens * layers / rates.device_bytes
        known = sizes.experts
        active = 0 if known is None else active_params(sizes, known=known)
        self._experts_s = 2.0 * active * tokens / rates.matmul_flops  # of one forward, as the next is
        self._dense_s = max(0.0, self._products_s - self._experts_s)
        self._waits_s = self._expert_waits_s()
        self._rest_products_s = self._rest_s = self._passes_s = 0.0  # with groups: what is run again, up to the experts
        experts = grouped_experts(plan, sizes=sizes)
        if experts is not None:
            attention_s = 0.0 if sizes.attention_bytes_per_token else self._attention_s  # our own does not run again
            self._rest_products_s = self._dense_s + attention_s
            traffic = FORWARD_TRAFFIC * experts.known.rest_bytes_per_token * tokens * layers / rates.device_bytes
            self._rest_s = self._rest_products_s + traffic
            again = (experts.count - 1) * experts.divided * experts.known.expert_bytes_per_token * tokens
            self._passes_s = again / rates.device_bytes

    def _expert_waits_s(self) -> float:
        """By how much one forward's products of experts in groups are slower than a dense layer's."""
        known = self._sizes.experts
        if known is None or not self._plan.expert_groups:
            return 0.0
        rows = self._plan.micro_batch * self._plan.seq_len * known.chosen / known.count
        return self._experts_s * GROUP_ROWS / rows

    def forward_s(self) -> float:
        own = self._products_s + self._attention_s + FORWARD_TRAFFIC * self._traffic_s
        return own + self._waits_s + self._rest_s + FORWARD_TRAFFIC * self._passes_s

    def recompute_s(self) -> float:
        attention_s = 0.0 if self._plan.attention else self._attention_s
        experts_s = (
            self._experts_s + self._waits_s
        )  # whole: fused experts do not know that their last product is unread
        own = RECOMPUTE_SHARE * self._dense_s + experts_s + attention_s + FORWARD_TRAFFIC * self._traffic_s
        return self._repeated() * own + self._rest_s + FORWARD_TRAFFIC * self._passes_s

    def backward_s(self) -> float:
        traffic = BACKWARD_TRAFFIC * (self._traffic_s + self._passes_s)
        own = 2 * (self._products_s + self._waits_s) + ATTENTION_BACKWARD * self._attention_s + traffic
        sums = SUM_BYTES * sum(u.elems for u in self._sizes.layers) * self._plan.micro_batches
        return self.recompute_s() + own + sums / self._rates.device_bytes

    def head_s(self) -> float:
        logits = self._sizes.vocab_size * self._tokens
        return self._head_products_s() + LOGIT_BYTES * logits / self._rates.device_bytes

    def products_s(self) -> float:
        """Matrix products and attention of the whole step."""
        products = (3 + RECOMPUTE_SHARE * self._repeated()) * self._products_s
        repeated = 0.0 if self._plan.attention else self._repeated()
        attention = (1 + ATTENTION_BACKWARD + repeated) * self._attention_s
        return products + attention + 2 * self._rest_products_s + self._head_products_s()

    def _head_products_s(self) -> float:
        """Three products; a head in slices is multiplied once more, for the log-sum-exp."""
        products = 4 if self._plan.head_slices else 3
        return 2.0 * products * head_params(self._sizes) * self._tokens / self._rates.matmul_flops

    def _repeated(self) -> float:
        """The share of the layers whose forward is repeated in the backward."""
        layers = len(self._sizes.layers)
        return max(0, layers - self._plan.kept) / layers


# --- link and optimizer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Link:
    """Bytes that cross during one phase. Where both directions are busy each has the duplex rate."""

    into: float
    out: float

    def seconds(self, rates: Rates) -> float:
        both = min(self.into, self.out)
        alone = (self.into - both) / rates.link_in_bytes + (self.out - both) / rates.link_out_bytes
        return both / rates.link_duplex_bytes + alone


def _links(sizes: ModelSizes, *, plan: MemoryPlan, resident: int) -> tuple[_Link, _Link]:
    """Of the forward and of the backward."""
    units = (sizes.stem, *sizes.layers, sizes.tail)[resident:]
    layers = sizes.layers[max(0, resident - 1) :]
    left = max(0, len(layers) - plan.slots)  # the others are still in their slots at the turn
    again = sum(u.streamed_bytes for u in layers[:left])
    experts = grouped_experts(plan, sizes=sizes)
    if experts is not None:
        there = sum(u.streamed_bytes for u in experts.layers[left:])
        again = sum(u.streamed_bytes for u in layers) - there - min(GROUP_PLACES, experts.count) * experts.group_bytes
    inputs = len(sizes.layers) * plan.input_bytes if plan.load_buffers else 0
    attention = sizes.attention_layers * plan.attention_bytes if plan.attention_buffers else 0
    waiting = plan.micro_batches * (inputs + attention)
    ends, head = sliced_ends(plan, sizes=sizes), 0
    into, out = sum(u.streamed_bytes for u in units), sum(u.param_bytes for u in units)
    if ends is not None:  # the embedding comes and goes as rows; a tied head goes home whole beside them
        head = ends.slice_bytes * (plan.head_slices - HEAD_PLACES)  # a second time, but for what is still there
        into += ends.row_block_bytes - (0 if ends.known.tied else ends.embedding_bytes)
        out += ends.row_block_bytes - (0 if ends.known.tied else ends.embedding_bytes)
    return (
        _Link(into=into, out=waiting),
        _Link(into=again + waiting * (1 if experts is None else 2) + head, out=out),
    )


def _update_s(unit: UnitSizes, *, rates: Rates, moment_bytes: int) -> float:
    return _update_bytes(unit, moment_bytes=moment_bytes) / rates.host_bytes


def _update_bytes(unit: UnitSizes, *, moment_bytes: int) -> int:
    """Master in halves read and written (8), gradient read (2); in fp32: 8 and 4. Moments read and written."""
    in_fp32 = unit.elems - unit.bf16_elems
    return (10 + 4 * moment_bytes) * unit.bf16_elems + (12 + 4 * moment_bytes) * in_fp32


def _start_s(units: tuple[UnitSizes, ...], *, rates: Rates, update: list[float]) -> float:
    """The stem's gradient home, its update, its fetch beside the first layer's update, the first layer's fetch."""
    stem, first = units[0], units[1]
    fetched = stem.streamed_bytes / rates.link_in_bytes
    home = stem.param_bytes / rates.link_out_bytes
    return home + update[0] + max(fetched, update[1]) + first.streamed_bytes / rates.link_in_bytes
