"""Random fills of large tensors by several threads, the same for any number of them."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PIECE_ELEMS = 1 << 20
"""Elements drawn from one generator. Part of what a seed means."""

_DRAWS = frozenset({torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default})


class ParallelDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Within it, in-place normal and uniform fills on the CPU run in pieces on `pool`.

    Each piece has a generator of its own. Their seeds are consecutive, from one that the default generator
    gives when this is made: torch uses 32 bits of a seed, and drawn ones would meet in a large model.
    """

    def __init__(self, pool: Executor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self._seed = int(torch.randint(1 << 32, (1,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS or args[0].device.type != "cpu" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor: Tensor = args[0]
        if not tensor.is_contiguous() or tensor.numel() <= PIECE_ELEMS:
            return func(*args, **kwargs)
        flat = tensor.detach().view(-1)
        jobs = []
        for start in range(0, flat.numel(), PIECE_ELEMS):
            piece = flat[start : start + PIECE_ELEMS]
            jobs.append(self._pool.submit(_draw, func, piece, *args[1:], seed=self._seed, **kwargs))
            self._seed += 1
        for done in jobs:
            done.result()
        return tensor


def _draw(func: Any, piece: Tensor, *args: Any, seed: int, **kwargs: Any) -> None:
    func(piece, *args, **(kwargs | {"generator": torch.Generator().manual_seed(seed)}))
