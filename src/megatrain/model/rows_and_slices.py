"""Rows of the embedding and slices of the head, put where Hugging Face's code looks for the whole weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.model.sliced_tail import HeadSlice, SliceableHead
from megatrain.model.slicing import Slicing
from megatrain.model.tail import Head


class BoundSlices:
    """A model whose embedding is given as rows, and whose head one slice at a time."""

    def __init__(self, slicing: Slicing, *, bound: Mapping[str, Tensor], run: Callable[[Tensor], Tensor]) -> None:
        """bound: outer tensors by name; the embedding's is [most rows, D], and what it holds is the caller's.

        run: the whole model behind its layers, from hidden states to logits.
        """
        self._slicing, self._bound, self._run = slicing, bound, run
        self._table: Tensor | None = None
        self._hook = slicing.lookup.register_forward_pre_hook(self._to_rows)

    def remove(self) -> None:
        """Let the model look up token ids again: it is bound anew."""
        self._hook.remove()
        self._slicing.lookup.padding_idx = self._slicing.padding

    def head(self, whole: Head) -> SliceableHead:
        """The head as a function of a slice; `whole` tells what else it reads."""
        slicing = self._slicing
        sliced = {slicing.head.name} | ({slicing.bias.name} if slicing.bias is not None else set())
        pairs = zip(whole.names, whole.parameters, strict=True)
        others = [(name, parameter) for name, parameter in pairs if name.partition(":")[2] not in sliced]
        return SliceableHead(self.logits, whole.compile, tuple(n for n, _ in others), tuple(p for _, p in others))

    def slice_at(self, first: int, weight: Tensor) -> HeadSlice:
        """Rows `first` and on of the head. weight: [v, D], in a place that holds it until it is used."""
        bias = None
        if self._slicing.bias is not None:
            whole = self._bound[self._slicing.bias.name]
            bias = whole[first : first + weight.shape[0]].detach().requires_grad_(True)
        return HeadSlice(first, weight.detach().requires_grad_(True), bias)

    def look_up(self, table: Tensor, *, padding: int | None) -> None:
        """From now on token t stands in row table[t], int64 [V]; -1 (an error) where it stands in none.

        padding: the row of the embedding's padding token, whose gradient is left out; None: there is none.
        """
        self._table = table
        embedding = self._slicing.embedding
        self._slicing.lookup.padding_idx = padding
        embedding.sites.put({embedding.name: self._bound[embedding.name]})

    def logits(self, hidden: Tensor, piece: HeadSlice) -> Tensor:
        """The logits of one slice, [b, s, v]."""
        head, bias = self._slicing.head, self._slicing.bias
        head.sites.put({head.name: piece.weight})
        if bias is not None:
            assert piece.bias is not None
            bias.sites.put({bias.name: piece.bias})
        table, self._table = self._table, None  # the model is run on made-up ids: any row will do
        try:
            return self._run(hidden)
        finally:
            self._table = table

    def _to_rows(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._table is None:
            return None
        ids, *rest = args
        return (torch.index_select(self._table, 0, ids.flatten()).view(ids.shape), *rest)
