"""Attention whose output waits for the backward, so that the recompute does not run it again.

The first forward hands out each call's output and log-sum-exp; the recompute is given them and goes
straight to the backward, which needs nothing else beside query, key and value. For long rows that saves the
largest part of the recompute, at 2 bytes per element of the output: far less than any other product's input costs.

Both directions are operators of their own, so that a compiled layer calls them as they are. The kernels are those that
`F.scaled_dot_product_attention` and varlen attention use, so the numbers are those of a recompute.

Letters: B rows, S positions, T = B * S, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten
LSE_BYTES = 4
"""Of a row's log-sum-exp, per head."""


@dataclass
class Exchange:
    """What one run of a layer gives and takes beside its arguments, in the order of its attention calls.

    noting: `noted` fills with the output [B, S, H, D] and the log-sum-exp [B * H * S] of each call. given: such a list,
    for a run with a graph; its calls return these outputs and have a backward, but no forward. Neither: nothing of it.
    """

    noting: bool = False
    given: tuple[Tensor, ...] = ()
    noted: list[Tensor] = field(default_factory=list)


class _Current:
    """The exchange of the layer that runs now, in plain pieces, which the compiler follows."""

    noting = False
    noted: list[Tensor] = []  # noqa: RUF012 - replaced, never shared
    given: Sequence[Tensor] = ()
    used = 0


_CURRENT = _Current()


def begin_exchange(*, noting: bool = False, given: Sequence[Tensor] = ()) -> list[Tensor]:
    """From now on attention is noted or given. Returns the list that fills. Without arguments: the end of it."""
    _CURRENT.noting, _CURRENT.noted, _CURRENT.given, _CURRENT.used = noting, [], given, 0
    return _CURRENT.noted


def attention_kept(
    query: Tensor,  # [B, H, S, D]
    key: Tensor,  # [B, K, S, D]
    value: Tensor,  # [B, K, S, D]
    *,
    starts: Tensor | None,
    longest: int,
    window: int,
    scale: float | None,
) -> Tensor | None:
    """The output [B, S, H, D] if this run notes or was given it; None if attention is to be computed as usual.

    starts, longest: of the documents (see Documents); None: every row is causal by itself. window: tokens to the left.
    """
    if _CURRENT.noting:
        out, lse = attend(query.detach(), key.detach(), value.detach(), starts, longest, window, scale)
        _CURRENT.noted += [out, lse]
        output: Tensor = out
        return output
    if _CURRENT.used >= len(_CURRENT.given):
        return None
    out, lse = _CURRENT.given[_CURRENT.used], _CURRENT.given[_CURRENT.used + 1]
    _CURRENT.used += 2
    known: Tensor = _KnownAttention.apply(query, key, value, out, lse, starts, longest, window, scale)  # type: ignore[no-untyped-call]
    return known


class _KnownAttention(torch.autograd.Function):
    """Attention whose output is known already."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        starts: Tensor | None,
        longest: int,
        window: int,
        scale: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, out, lse, starts)
        ctx.settings = (longest, window, scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        slopes = attend_backward(grads[0], *ctx.saved_tensors, *ctx.settings)
        return (*slopes, None, None, None, None, None, None)


@torch.library.custom_op("megatrain::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    longest: int,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, D] and log-sum-exp, fp32 [B * H * S], both contiguous. See `attention_kept`."""
    rows, heads, length, size = query.shape
    if not query.is_cuda:
        mask = None if starts is None else _bias(starts, rows * length, window=window, dtype=query.dtype)
        flat = [t if starts is None else _one_row(t) for t in (query, key, value)]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *flat, 0.0, starts is None, attn_mask=mask, scale=scale
        )
    elif starts is not None:
        flat = [_flat(t) for t in (query, key, value)]
        out, lse = aten._flash_attention_forward(
            *flat,
            *(starts, starts, longest, longest, 0.0, _plain(window), False),
            scale=scale,
            window_size_left=window,
            window_size_right=0,
        )[:2]
    elif _by_cudnn(query, key, value, scale=scale):
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)[:2]
    if starts is None or not query.is_cuda:
        out = out.transpose(1, 2)
    return out.reshape(rows, length, heads, size).contiguous(), lse.reshape(-1).clone()


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, length, size = query.shape
    out = query.new_empty((rows, length, heads, size))
    return out, query.new_empty((rows * heads * length,), dtype=torch.float32)


@torch.library.custom_op("megatrain::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,  # [B, S, H, D]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    longest: int,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, laid out as these are."""
    rows, heads, length, _ = query.shape
    if not query.is_cuda:
        return _backward_on_cpu(grad, query, key, value, out, lse, starts, window, scale)
    if starts is not None:
        return _backward_of_documents(grad, query, key, value, out, lse, starts, longest, window, scale)
    slope, known, dense = grad.transpose(1, 2), out.transpose(1, 2), (None, None, length, length, 0.0, True)
    if _by_cudnn(query, key, value, scale=scale):
        seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout: none
        found = aten._scaled_dot_product_cudnn_attention_backward(
            *(slope, query, key, value, known, lse.view(rows, heads, length, 1), seed, seed, None),
            *dense,
            scale=scale,
        )
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            *(slope, query, key, value, known, lse.view(rows, heads, length)),
            *dense,
            *(seed, torch.empty(0, dtype=torch.uint64, device=query.device)),
            scale=scale,
        )
    return _laid_out(found, like=(query, key, value))


@attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _backward_of_documents(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, length, size = query.shape
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout: none
    found = aten._flash_attention_backward(
        grad.reshape(rows * length, heads, size).contiguous(),
        *(_flat(t) for t in (query, key, value)),
        out.view(rows * length, heads, size),
        lse.view(heads, rows * length),
        *(starts, starts, longest, longest, 0.0, _plain(window), seed, torch.empty(0, device=query.device)),
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )
    apart = [f.view(rows, length, f.shape[1], size).transpose(1, 2) for f in found]
    return _laid_out(apart, like=(query, key, value))


def _backward_on_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, length, size = query.shape
    if starts is None:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad.transpose(1, 2), query, key, value, out.transpose(1, 2), lse.view(rows, heads, length)),
            *(0.0, True),
            scale=scale,
        )
        return _laid_out(found, like=(query, key, value))
    total = rows * length
    slope, known = (t.reshape(1, total, heads, size).transpose(1, 2) for t in (grad, out))
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(slope, *(_one_row(t) for t in (query, key, value)), known, lse.view(1, heads, total), 0.0, False),
        attn_mask=_bias(starts, total, window=window, dtype=query.dtype),
        scale=scale,
    )
    apart = [f.transpose(1, 2).reshape(rows, length, f.shape[1], size).transpose(1, 2) for f in found]
    return _laid_out(apart, like=(query, key, value))


def _by_cudnn(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> bool:
    """Whether PyTorch would take cuDNN for this causal attention."""
    grouped = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scale, enable_gqa=grouped)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def _plain(window: int) -> bool:
    return window < 0


def _flat(tensor: Tensor) -> Tensor:
    """[B, H, S, D] -> [T, H, D]"""
    rows, heads, length, size = tensor.shape
    return tensor.transpose(1, 2).reshape(rows * length, heads, size)


def _one_row(tensor: Tensor) -> Tensor:
    """[B, H, S, D] -> [1, H, T, D]"""
    return _flat(tensor).transpose(0, 1).unsqueeze(0)


def document_mask(starts: Tensor, total: int, *, window: int) -> Tensor:
    """True where a token sees another, by the documents' `starts` and the tokens seen to the left: bool [T, T]."""
    place = torch.arange(total)
    document = torch.searchsorted(starts.to(torch.int64), place, right=True)
    distance = place[:, None] - place[None, :]
    mask = (document[:, None] == document[None, :]) & (distance >= 0)
    return mask if window < 0 else mask & (distance <= window)


def _bias(starts: Tensor, total: int, *, window: int, dtype: torch.dtype) -> Tensor:
    mask = document_mask(starts, total, window=window)
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _laid_out(found: Sequence[Tensor], *, like: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """As the operator's description promises: an operator's result has the strides it was compiled for."""
    same = [f if f.stride() == t.stride() else torch.empty_like(t).copy_(f) for f, t in zip(found, like, strict=True)]
    return same[0], same[1], same[2]
