"""The smallest executor there can be over `Pass`, and plain Hugging Face beside it.

Two weight slots take turns and are filled with NaN on release, so a layer that keeps a view of its slot, or
reads another layer's, cannot go unseen.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.model.anatomy import Unit
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.experts_pass import ExpertPass
from megatrain.model.passes import Pass
from megatrain.model.skeleton import ModelSpec
from megatrain.model.sliced_tail import HeadSlice, SliceGradient
from megatrain.model.streamed import StreamedModel
from megatrain.model.tail import Accumulate

WHOLE = 1 << 30  # a head chunk larger than any batch: Hugging Face's own arithmetic


class CpuRng:
    """The CPU's default generator."""

    def get(self) -> object:
        return torch.get_rng_state()

    def set(self, state: Any) -> None:
        torch.set_rng_state(state)


@dataclass
class Result:
    """Loss, router loss and every gradient of one step. `gradients`: by canonical name; absent if none flowed."""

    loss: Tensor
    aux: Tensor | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: Tensor) -> None:
        old = self.gradients.get(name)
        self.gradients[name] = gradient.clone() if old is None else old + gradient


def reference_model(
    config: PretrainedConfig, *, attention: str, dtype: torch.dtype = torch.float32, training: bool = False
) -> Any:
    """Plain Hugging Face, weights and router biases moved away from their symmetric initial values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name or "expert_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.train(training)
    return model


def make_batches(
    count: int, *, rows: int = 2, length: int = 24, packed: bool = False, padded: bool = False, vocab: int = 256
) -> list[MicroBatch]:
    """Random rows; packed: two documents of 9 and the rest; padded: each row shorter by another amount."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, vocab, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = IGNORE
        positions = mask = None
        if packed:
            positions = torch.cat([torch.arange(9), torch.arange(length - 9)]).repeat(rows, 1)
            labels[:, 9] = IGNORE
        if padded:
            mask = torch.ones_like(ids)
            for row in range(rows):
                mask[row, length - 7 + 4 * row :] = 0
            labels[mask == 0] = IGNORE
        tokens = ids.numel() if mask is None else int(mask.sum())
        batches.append(MicroBatch(ids, labels, positions, mask, tokens, int((labels != IGNORE).sum())))
    return batches


def inputs_of(batch: MicroBatch) -> dict[str, Tensor]:
    given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    return {k: v for k, v in given.items() if v is not None}


def router_loss(model: Any, logits: Sequence[tuple[Tensor, ...]], mask: Tensor | None) -> Tensor:
    """Hugging Face's function over the router logits of several micro-batches, called with the model's own numbers."""
    home = sys.modules[type(model).__module__]
    config = model.config
    names = ("num_experts", "num_local_experts")
    experts = next(v for k in names if (v := getattr(model, k, getattr(config, k, None))))
    chosen = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    result: Tensor = home.load_balancing_loss_func(joined, experts, chosen, mask)
    return result


def run_reference_with_router_loss(model: Any, batches: Sequence[MicroBatch], *, coefficient: float) -> Result:
    """Hugging Face with its auxiliary loss: its own `out.aux_loss` for one micro-batch, its function once for more."""
    model.zero_grad()
    denominator = sum(b.supervised for b in batches)
    outs = [model(**inputs_of(b), use_cache=False, output_router_logits=True) for b in batches]
    losses = [_cross_entropy(out.logits, b) / denominator for out, b in zip(outs, batches, strict=True)]
    if len(batches) == 1:
        aux = outs[0].aux_loss
        (losses[0] + coefficient * aux).backward()
    else:
        leaves = [tuple(t.detach().requires_grad_(True) for t in out.router_logits) for out in outs]
        aux = router_loss(model, leaves, None)
        (coefficient * aux).backward()
        for loss, out, leaf in zip(losses, outs, leaves, strict=True):  # in order, as the step sums them
            torch.autograd.backward([loss, *out.router_logits], [torch.ones(()), *(t.grad for t in leaf)])
    total = sum(loss.detach() for loss in losses)
    assert isinstance(total, Tensor)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Result(total, aux.detach(), gradients)


def _cross_entropy(logits: Tensor, batch: MicroBatch) -> Tensor:
    targets = F.pad(batch.labels, (0, 1), value=IGNORE)[:, 1:].reshape(-1)
    rows = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, targets, ignore_index=IGNORE, reduction="sum")


def run_reference(model: Any, batches: Sequence[MicroBatch], *, masks: Any = None) -> Result:
    """The step as Hugging Face would do it: one graph per micro-batch, gradients summed by autograd.

    masks: attention masks to give to the model instead of the batch's own.
    """
    model.zero_grad()
    denominator = sum(b.supervised for b in batches)
    total = torch.zeros(())
    for batch in batches:
        extra = {} if masks is None else {"attention_mask": masks}
        logits = model(**(inputs_of(batch) | extra), use_cache=False).logits
        loss = _cross_entropy(logits, batch) / denominator
        loss.backward()
        total = total + loss.detach()
    return Result(total, None, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


class Streamed:
    """A StreamedModel with the weights of `source`, stepped layer-major over micro-batches."""

    def __init__(
        self,
        source: nn.Module,
        *,
        config: PretrainedConfig,
        attention: str,
        dtype: torch.dtype = torch.float32,
        training: bool = False,
        compile: bool = False,
        packing: bool = False,
        device: str = "cpu",
        rng: Any = None,
        slices: int = 0,
        groups: int = 0,
    ) -> None:
        """slices: of the head, in `step`; the embedding then comes as rows. groups: of every layer's experts."""
        spec = ModelSpec(copy.deepcopy(config), attention, dtype, training, compile)
        self.device = torch.device(device)
        self.model = StreamedModel.build(spec, rng=rng or CpuRng())
        if packing:
            self.model.check_packing()
        weights: dict[str, Tensor] = dict(source.named_parameters(remove_duplicate=False))
        weights |= dict(source.named_buffers(remove_duplicate=False))
        anatomy = self.model.anatomy
        self.attention_calls = 0
        self.blocks = {unit.index: _block(unit, weights).to(self.device) for unit in anatomy.units}
        size = max(unit.layout.nbytes for unit in anatomy.layers)
        self.slots = [_nan(size).to(self.device), _nan(size).to(self.device)]
        self.model.outer_buffers_to(self.device)
        self.groups = self.model.divide_experts(groups)
        stem = anatomy.stem.layout.views(self.blocks[anatomy.stem.index])
        tail = anatomy.tail.layout.views(self.blocks[anatomy.tail.index])
        self.ends = Slices(self.model, stem=stem, tail=tail, count=slices) if slices else None
        if self.ends is None:
            self.model.bind_outer(stem=stem, tail=tail)

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        chunk: int = WHOLE,
        keep_graphs: bool = False,
        keep_attention: bool = False,
    ) -> Result:
        """keep_graphs: no layer is recomputed; weights then stay, each layer's in a block of its own.

        keep_attention: layers are recomputed but for their attention; `attention_calls` counts those that were kept.
        """
        anatomy = self.model.anatomy
        denominator = sum(b.supervised for b in batches)
        result = Result(torch.zeros((), device=self.device))

        def accumulate(name: str, gradient: Tensor) -> None:
            canonical = name.partition(":")[2]
            result.add(canonical, gradient if self.ends is None else self.ends.whole(canonical, gradient))

        if self.ends is not None:
            self.ends.begin(batches)
        passes = []
        for batch in batches:
            documents = self.model.documents(batch)  # before the batch leaves the CPU
            passes.append(self.model.begin(_moved(batch, self.device), grad=True, documents=documents))
        stored = [[p.hidden] for p in passes]
        for i in range(len(anatomy.layers)):
            weights = self._stay(i) if keep_graphs else self._load(i)
            if self.groups[i] is not None:
                self._mix(i, passes, weights, [kept[i] for kept in stored])
            for p, kept in zip(passes, stored, strict=True):
                kept.append(p.forward(i, weights, kept[i], keep_graph=keep_graphs, keep_attention=keep_attention))
            self._release(i)
        result.aux = self.model.aux_loss(passes, grad=True)
        slopes = []
        if self.ends is not None:
            hidden = [kept[-1] for kept in stored]
            slopes = self.ends.tails(passes, hidden, denominator, chunk=chunk, result=result, accumulate=accumulate)
        for p, kept in zip(passes, stored, strict=True) if self.ends is None else ():
            out = p.tail(kept[-1], denominator=denominator, chunk=chunk, grad=True, accumulate=accumulate)
            result.loss = result.loss + out.loss
            assert out.hidden_grad is not None
            slopes.append(out.hidden_grad)
        for i in reversed(range(len(anatomy.layers))):
            weights, unit = ({} if keep_graphs else self._load(i)), anatomy.layers[i]
            groups = self.groups[i]
            if groups is not None:
                self._unmix(i, passes, weights, [kept[i] for kept in stored], slopes, result=result)
            for m, p in enumerate(passes):
                hidden = None if keep_graphs else stored[m][i]
                attention = p.take_attention(i) if keep_attention else ()
                self.attention_calls += len(attention) // 2
                slopes[m], found = p.backward(i, weights, hidden, slopes[m], accumulate=accumulate, attention=attention)
                for entry, gradient in zip((unit.layout if groups is None else groups.rest).params, found, strict=True):
                    if gradient is not None:
                        result.add(unit.full_names[entry.name][0], gradient)
            self._release(i)
        for p, slope in zip(passes, slopes, strict=True):
            p.finish(slope, accumulate=accumulate)
        return result

    def _mix(self, layer: int, passes: Sequence[Pass], weights: dict[str, Tensor], hidden: Sequence[Tensor]) -> None:
        """The experts' part of a forward: all passes up to them, then through one group after the other."""
        for p, one in zip(passes, hidden, strict=True):
            assert isinstance(p, ExpertPass)
            p.route(layer, weights, one)
        for g, _, tensors in self._groups(layer):
            for p in passes:
                p.mix(layer, g, tensors)

    def _unmix(
        self,
        layer: int,
        passes: Sequence[Pass],
        weights: dict[str, Tensor],
        hidden: Sequence[Tensor],
        slopes: Sequence[Tensor],
        *,
        result: Result,
    ) -> None:
        unit = self.model.anatomy.layers[layer]
        for p, one, slope in zip(passes, hidden, slopes, strict=True):
            assert isinstance(p, ExpertPass)
            p.reroute(layer, weights, one, slope)
        for g, span, tensors in self._groups(layer):
            for p in passes:
                for name, gradient in zip(tensors, p.unmix(layer, g, tensors), strict=True):
                    full = torch.zeros_like(unit.layout.views(self.blocks[unit.index])[name])
                    full[span] = gradient
                    result.add(unit.full_names[name][0], full)

    def _groups(self, layer: int) -> Iterator[tuple[int, slice, dict[str, Tensor]]]:
        """Number, experts and weights of each group; a block of its own, which is NaN when the next one comes."""
        groups, unit = self.groups[layer], self.model.anatomy.layers[layer]
        assert groups is not None
        whole = unit.layout.views(self.blocks[unit.index])
        for g, span in enumerate(groups.spans):
            tensors = {name: whole[name][span].clone() for name in (e.name for e in groups.layouts[g].params)}
            yield g, span, tensors
            for tensor in tensors.values():
                tensor.fill_(torch.nan)

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, float]:
        """The last layer's output and the mean loss, without gradients."""
        current = self.model.begin(batch, grad=False)
        out = current.hidden
        for i in range(len(self.model.anatomy.layers)):
            weights = self._load(i)
            if self.groups[i] is not None:
                self._mix(i, [current], weights, [out])
            out = current.forward(i, weights, out)
            self._release(i)
        found = current.tail(out, denominator=batch.supervised, chunk=WHOLE, grad=False, accumulate=_refuse)
        return out, float(found.loss)

    def _load(self, layer: int) -> dict[str, Tensor]:
        unit, slot, groups = self.model.anatomy.layers[layer], self.slots[layer % 2], self.groups[layer]
        if groups is not None:
            parts = [self.blocks[unit.index][at] for at in unit.layout.around(*groups.experts.names)]
            slot[: groups.rest.nbytes].copy_(torch.cat(parts))
            return groups.rest.views(slot)
        slot[: unit.layout.nbytes].copy_(self.blocks[unit.index])
        return unit.layout.views(slot)

    def _stay(self, layer: int) -> dict[str, Tensor]:
        unit = self.model.anatomy.layers[layer]
        return unit.layout.views(self.blocks[unit.index])

    def _release(self, layer: int) -> None:
        self.slots[layer % 2].fill_(255)  # see _nan


class Slices:
    """The head in slices and the embedding as rows, each slice in a block that is NaN before and after."""

    def __init__(self, model: StreamedModel, *, stem: dict[str, Tensor], tail: dict[str, Tensor], count: int) -> None:
        slicing = model.slicing
        assert slicing is not None
        self.slicing = slicing
        self.head = (stem if slicing.tied else tail)[slicing.head.name]
        self.embedding = stem[slicing.embedding.name]
        self.rows = torch.full_like(self.embedding, torch.nan)
        self.bound = model.bind_sliced(
            stem={n: t for n, t in stem.items() if n != slicing.embedding.name},
            tail={n: t for n, t in tail.items() if n != slicing.head.name},
            rows=self.rows,
        )
        height = -(-len(self.head) // count)
        self.spans = [slice(at, min(at + height, len(self.head))) for at in range(0, len(self.head), height)]

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Give the model the rows that the batches read."""
        self.ids = torch.cat([batch.input_ids.flatten() for batch in batches]).unique()
        self.rows.fill_(torch.nan)[: len(self.ids)] = self.embedding[self.ids]
        table = torch.full((len(self.embedding),), -1)
        table[self.ids] = torch.arange(len(self.ids))
        padding = None if self.slicing.padding is None else int(table[self.slicing.padding])
        self.bound.look_up(table, padding=None if padding == -1 else padding)

    def whole(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient in the shape of the parameter: that of the embedding comes as rows."""
        if name != self.slicing.embedding.name:
            return gradient
        full = torch.zeros_like(self.embedding)
        full[self.ids] = gradient[: len(self.ids)]
        return full

    def tails(
        self,
        passes: Sequence[Pass],
        hidden: Sequence[Tensor],
        denominator: int,
        *,
        chunk: int,
        result: Result,
        accumulate: Accumulate,
    ) -> list[Tensor]:
        """Both sweeps over the vocabulary; the gradients of the hidden states."""
        tails = [p.sliced_tail(h, denominator=denominator, chunk=chunk) for p, h in zip(passes, hidden, strict=True)]
        for span in self.spans:
            piece = self._piece(span)
            for tail in tails:
                tail.measure(piece)
            piece.weight.data.fill_(torch.nan)
        for tail in tails:
            result.loss = result.loss + tail.loss()
        for span in reversed(self.spans):
            piece = self._piece(span)
            for tail in tails:
                tail.differentiate(
                    piece, accumulate=accumulate, accumulate_slice=lambda g, at=span: self._add(result, at, g)
                )
            piece.weight.data.fill_(torch.nan)
        return [tail.hidden_grad() for tail in tails]

    def _piece(self, span: slice) -> HeadSlice:
        return self.bound.slice_at(span.start, self.head[span].clone())

    def _add(self, result: Result, span: slice, gradient: SliceGradient) -> None:
        full = torch.zeros_like(self.head)
        full[span] = gradient.weight
        result.add(self.slicing.head.name, full)
        if self.slicing.bias is not None:
            bias = torch.zeros(len(self.head), dtype=self.head.dtype)
            bias[span] = gradient.bias
            result.add(self.slicing.bias.name, bias)


def _refuse(name: str, gradient: Tensor) -> None:
    raise AssertionError(f"an evaluation gave a gradient of {name}")


def _moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return batch
    ids, labels, positions, mask = (
        None if t is None else t.pin_memory().to(device, non_blocking=True)
        for t in (batch.input_ids, batch.labels, batch.position_ids, batch.attention_mask)
    )
    assert ids is not None
    assert labels is not None
    return MicroBatch(ids, labels, positions, mask, batch.tokens, batch.supervised)


def _block(unit: Unit, weights: dict[str, Tensor]) -> Tensor:
    block = torch.zeros(unit.layout.nbytes, dtype=torch.uint8)
    for name, view in unit.layout.views(block).items():
        source = weights[unit.full_names[name][0]].detach()
        assert source.dtype == view.dtype, (unit.full_names[name][0], source.dtype, view.dtype)
        view.copy_(source)
    return block


def _nan(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 255, dtype=torch.uint8)  # all bits set is a NaN in bf16 and in fp32


def differences(ours: Result, theirs: Result) -> dict[str, float]:
    """Largest absolute difference of each tensor that is not bit-equal; a missing gradient counts as zeros."""
    found = {} if torch.equal(ours.loss, theirs.loss) else {"loss": float((ours.loss - theirs.loss).abs())}
    if theirs.aux is not None and not (ours.aux is not None and torch.equal(ours.aux, theirs.aux)):
        found["aux"] = float("nan") if ours.aux is None else float((ours.aux - theirs.aux).abs())
    for name in ours.gradients.keys() | theirs.gradients.keys():
        a, b = ours.gradients.get(name), theirs.gradients.get(name)
        if a is None or b is None:
            known = b if a is None else a
            assert known is not None
            if bool(known.any()):
                found[name] = float(known.abs().max())
        elif not torch.equal(a, b):
            found[name] = float((a.double() - b.double()).abs().max())
    return found
