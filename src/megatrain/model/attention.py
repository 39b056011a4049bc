"""Attention over packed rows without a mask: each document is a sequence of its own for the kernel.

Registered with transformers as ``megatrain_varlen``. Hugging Face builds no mask for a name that it has no mask
function for, so nothing of size S^2 exists and nothing is read back from the device. Used only where masks are
causal, or causal in a sliding window, within documents; `varlen_windows` checks that on the masks themselves.

Letters: B rows, S positions, H heads, K key/value heads, D head size, T = B * S tokens, n documents.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from megatrain.model.batch import MicroBatch
from megatrain.model.kept_attention import attention_kept, document_mask
from megatrain.model.stubs import LayerCall

VARLEN = "megatrain_varlen"
Window = tuple[int, int]  # how many tokens to the left and right a token sees; -1: all of its document
CAUSAL: Window = (-1, 0)
TRIAL_WINDOW = 5
_WINDOW_ATTRIBUTE = "megatrain_window"


@dataclass(frozen=True)
class Documents:
    """Where documents begin in a micro-batch laid out as one row of T tokens.

    `starts`: int32, n + 1 rising offsets, the last repeated up to a power of two so that shapes seldom change.
    `longest`: no document has more tokens (rounded up to a power of two, at most S).
    `whole_rows`: every row is one document, padding behind it; then plain causal attention is the same and faster.
    """

    starts: Tensor
    longest: int
    whole_rows: bool

    @classmethod
    def of(cls, batch: MicroBatch) -> Documents:
        """From the batch on the CPU: rows are documents, packed rows restart positions, padding stands apart."""
        rows, length = batch.input_ids.shape
        begins = torch.zeros(rows, length, dtype=torch.bool)
        begins[:, 0] = True
        if batch.position_ids is not None:
            begins |= (batch.position_ids == 0).cpu()
        if batch.attention_mask is not None:
            mask = batch.attention_mask.cpu()
            begins[:, 1:] |= mask[:, 1:] != mask[:, :-1]
        offsets = begins.flatten().nonzero().flatten()
        total = rows * length
        ends = torch.cat([offsets[1:], torch.tensor([total])])
        longest = int((ends - offsets).max())
        count = _power_of_two(offsets.numel() + 1)
        starts = torch.full((count,), total, dtype=torch.int32)
        starts[: offsets.numel()] = offsets.to(torch.int32)
        return cls(starts, min(_power_of_two(longest), length), not batch.packed)

    def to(self, device: torch.device) -> Documents:
        return Documents(self.starts.to(device, non_blocking=True), self.longest, self.whole_rows)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class AttentionCall(NamedTuple):
    """A module that asked for attention here."""

    module: nn.Module
    heads: int
    sizes: tuple[int, ...]  # of a head: query, key and value
    plain: bool  # nothing was asked for that the kernel has not


class _Current:
    """The documents of the pass that runs now, and (while a trial watches) the calls that were made."""

    documents: Documents | None = None
    seen: list[AttentionCall] | None = None
    must_allow_groups = False  # before PyTorch 2.12 grouped heads needed no permission


_CURRENT = _Current()


def use_documents(documents: Documents | None) -> None:
    """Set the documents that the next layers attend within. None: every row is one document, by SDPA."""
    _CURRENT.documents = documents


@contextmanager
def watch_attention() -> Iterator[list[AttentionCall]]:
    """Collects every call of this attention."""
    _CURRENT.seen = []
    try:
        yield _CURRENT.seen
    finally:
        _CURRENT.seen = None


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, S, D]
    key: Tensor,  # [B, K, S, D]
    value: Tensor,  # [B, K, S, D]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; returns [B, S, H, D]."""
    rows, heads, length, size = query.shape
    grouped = key.shape[1] != heads
    if _CURRENT.seen is not None:
        odd = ("softcap", "s_aux", "sinks", "position_bias")
        plain = attention_mask is None and dropout == 0.0 and all(kwargs.get(k) is None for k in odd)
        _CURRENT.seen.append(AttentionCall(module, heads, (size, key.shape[-1], value.shape[-1]), plain))
    documents = _CURRENT.documents
    if documents is not None and documents.whole_rows and getattr(module, _WINDOW_ATTRIBUTE) == CAUSAL:
        documents = None
    kept = attention_kept(
        *(query, key, value),
        starts=None if documents is None else documents.starts,
        longest=0 if documents is None else documents.longest,
        window=-1 if documents is None else getattr(module, _WINDOW_ATTRIBUTE)[0],
        scale=scaling,
    )
    if kept is not None:
        return kept, None
    if documents is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    if dropout > 0:
        raise RuntimeError("attention dropout with documents: set_windows should have refused this model")
    kernel: Callable[..., Tensor] = _flash if query.is_cuda else varlen_by_mask
    flat = [t.transpose(1, 2).reshape(rows * length, t.shape[1], t.shape[-1]) for t in (query, key, value)]
    starts, longest = documents.starts, documents.longest
    window: Window = getattr(module, _WINDOW_ATTRIBUTE)
    out = kernel(*flat, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=grouped)
    return out.view(rows, length, heads, value.shape[-1]), None


def _flash(*args: Any, enable_gqa: bool, **kwargs: Any) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import, and only CUDA gets here

    if _CURRENT.must_allow_groups:
        kwargs["enable_gqa"] = enable_gqa
    out = varlen_attn(*args, **kwargs)
    assert isinstance(out, Tensor)  # a tuple only when asked for more
    return out


def varlen_by_mask(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, K, D]
    value: Tensor,  # [T, K, D]
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: Window,
    enable_gqa: bool,
) -> Tensor:
    """The kernel's definition, with a mask over all tokens: for the CPU (probes and tests). Returns [T, H, D]."""
    mask = document_mask(cu_seq_q, query.shape[0], window=window_size[0])
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out.squeeze(0).transpose(0, 1).contiguous()


AttentionInterface.register(VARLEN, varlen_attention)


def trial_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with a window small enough to be seen in the masks of a short row."""
    twin = copy.deepcopy(config)
    if getattr(twin, "sliding_window", None):
        twin.sliding_window = TRIAL_WINDOW
    return twin


def varlen_windows(
    calls: Sequence[LayerCall], *, config: PretrainedConfig, position_ids: Tensor
) -> tuple[Window | None, ...] | None:
    """Per layer the window its mask stands for (None: the layer has no mask); None if any mask is something else.

    calls: of `trial_config(config)` with sdpa on one packed row, `position_ids` [1, S].
    """
    starts, length = (position_ids[0] == 0).nonzero().flatten(), position_ids.shape[1]
    full = document_mask(starts, length, window=-1)
    sliding = document_mask(starts, length, window=TRIAL_WINDOW - 1)  # to the left: the token itself is one of a window
    windows: list[Window | None] = []
    for call in calls:
        masks = [v for v in call.others().values() if isinstance(v, Tensor) and v.shape[-2:] == full.shape]
        if not masks:
            windows.append(None)
        elif len(masks) > 1 or masks[0].dtype is not torch.bool:
            return None
        elif torch.equal(masks[0].view(full.shape), full):
            windows.append(CAUSAL)
        elif torch.equal(masks[0].view(full.shape), sliding):
            windows.append((int(getattr(config, "sliding_window", 0)) - 1, 0))
        else:
            return None
    return tuple(windows)


def set_windows(
    layers: Sequence[nn.Module],
    *,
    windows: Sequence[Window | None],
    seen: Sequence[AttentionCall],
    training: bool,
) -> bool:
    """Tell each attention module its window. False if a layer with a mask does not come here for its attention.

    training: attention dropout counts (the kernel has none).
    """
    from torch.nn.attention.varlen import varlen_attn

    _CURRENT.must_allow_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    calls: dict[int, list[AttentionCall]] = {}
    for call in seen:
        calls.setdefault(id(call.module), []).append(call)
    for layer, window in zip(layers, windows, strict=True):
        inside = [m for m in layer.modules() if id(m) in calls]
        if window is None:
            if inside:
                return False
            continue
        usable = all(
            call.plain and len(set(call.sizes)) == 1 and call.sizes[0] % 8 == 0 and call.sizes[0] <= 256
            for m in inside
            for call in calls[id(m)]
        )
        if not inside or not usable or (training and any(_drops(m) for m in inside)):
            return False
        for module in inside:
            setattr(module, _WINDOW_ATTRIBUTE, window)
    return True


def keepable(layers: Sequence[nn.Module], *, calls: Sequence[AttentionCall]) -> dict[int, tuple[int, int]]:
    """Layers, by number, whose attention can wait for the backward (kept_attention.py): heads, and a head's size.

    Those with one call of this attention that sees all of a document; in a window it is cheap to run again. calls: of
    two passes through every layer. Windows are set.
    """
    found = {}
    for index, layer in enumerate(layers):
        inside = {id(module) for module in layer.modules()}
        mine = [call for call in calls if id(call.module) in inside]
        if len(mine) == 2 and getattr(mine[0].module, _WINDOW_ATTRIBUTE, None) == CAUSAL:
            found[index] = (mine[0].heads, mine[0].sizes[-1])
    return found


def _drops(module: nn.Module) -> bool:
    rates = [p.p for p in module.children() if isinstance(p, nn.Dropout)]
    rates += [v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
    return any(rate > 0 for rate in rates)
