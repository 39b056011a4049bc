"""A layer's MLP in tiles of the sequence, for rows so long that a layer's backward does not fit at once.

An MLP looks at one token at a time, and most of what a layer keeps for its backward is its own. With tiles the layer
keeps what goes into its MLP, and the backward runs it tile by tile with a graph of one tile. As nobody reads what the
MLP of a recompute gives (unread.py), that repeats nothing. Gradients of its weights are summed over tiles in fp32.

That it looks at one token at a time is proved by the functions it calls, on the meta device.

Letters: T tokens of a micro-batch, t of a tile, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from megatrain.model.anatomy_of import Parts
from megatrain.model.rehearsal import LONG, SHORT, Rehearsals, bytes_per_token
from megatrain.model.skeleton import LayerList
from megatrain.model.stubs import Recorder
from megatrain.model.trial import Trial, rehearsing_again
from megatrain.model.unread import outputs_are_read_now

_OPERATORS = ("mul", "add", "sub", "truediv", "pow", "neg", "rmul", "radd", "rsub")
_FUNCTIONS = (
    *("linear", "silu", "gelu", "relu", "relu6", "leaky_relu", "sigmoid", "tanh", "softplus", "hardtanh", "elu", "erf"),
    *(
        "mul",
        "add",
        "sub",
        "div",
        "pow",
        "neg",
        "square",
        "sqrt",
        "exp",
        "abs",
        "clamp",
        "minimum",
        "maximum",
    ),
    *("to", "float", "type_as", "contiguous"),
)
_OF_ONE_TOKEN = frozenset((*_FUNCTIONS, *(f"__{name}__" for name in _OPERATORS)))
_ALONG_FEATURES = frozenset(("chunk", "split"))


@dataclass(frozen=True)
class Tiling:
    """The MLP of each layer that has one; bytes that autograd keeps of a token without it, and of it alone."""

    modules: tuple[nn.Module | None, ...]
    rest_bytes_per_token: int
    mlp_bytes_per_token: int
    elems: int  # of the largest


class MlpTiles:
    """Stands for the forward of an MLP: [..., D] -> [..., D] in tiles of `tokens`."""

    def __init__(self, module: nn.Module, *, unread: bool, tokens: int) -> None:
        """unread: in a run with a graph nobody reads what it gives, but within `outputs_are_read`."""
        self.module, self.tokens = module, tokens
        self._forward = module.forward
        self._unread = unread
        self.names = tuple(name for name, _ in module.named_parameters())
        self._places = tuple(_place(module, name) for name in self.names)

    def __call__(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        if flat.shape[1] <= self.tokens:
            return self._forward(hidden)  # type: ignore[no-any-return]
        if torch.is_grad_enabled():
            own = [holder[key] for holder, key in self._places]
            skips = self._unread and not outputs_are_read_now()
            out: Tensor = _Tiled.apply(flat, self, skips, *own)  # type: ignore[no-untyped-call]
            return out.view(hidden.shape)
        return self.run(flat).view(hidden.shape)

    def run(self, flat: Tensor) -> Tensor:
        """[1, T, D] -> [1, T, D] without a graph."""
        out = torch.empty_like(flat)
        for span in self.spans(flat):
            out[:, span] = self._forward(flat[:, span])
        return out

    def spans(self, flat: Tensor) -> Iterator[slice]:
        """The tiles of [1, T, D]."""
        total = flat.shape[1]
        yield from (slice(at, min(at + self.tokens, total)) for at in range(0, total, self.tokens))


class _Tiled(torch.autograd.Function):
    """An MLP of which only the input is kept."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, tiles: MlpTiles, skips: bool, *own: Tensor) -> Tensor:
        ctx.save_for_backward(flat, *own)
        ctx.tiles = tiles
        return flat.new_zeros(()).expand(flat.shape) if skips else tiles.run(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        tiles: MlpTiles = ctx.tiles
        flat, *own = ctx.saved_tensors
        sums: list[Tensor | None] = [None] * len(own)  # of a parameter that its forward does not read there is none
        back = torch.empty_like(flat)
        for span in tiles.spans(flat):
            leaf = flat[:, span].detach().requires_grad_(True)
            mine = {name: p.detach().requires_grad_(True) for name, p in zip(tiles.names, own, strict=True)}
            with torch.enable_grad():
                out = functional_call(tiles.module, mine, (leaf,))
            slope, *found = torch.autograd.grad(out, [leaf, *mine.values()], grads[0][:, span], allow_unused=True)
            back[:, span] = slope
            for i, gradient in enumerate(found):
                if gradient is not None:
                    total = sums[i]
                    sums[i] = gradient.to(torch.float32, copy=True) if total is None else total.add_(gradient)
        return back, None, None, *(None if t is None else t.to(p.dtype) for t, p in zip(sums, own, strict=True))


def set_tiles(tiling: Tiling, *, tokens: int, unread: Sequence[frozenset[str]], layers: Sequence[nn.Module]) -> None:
    """Run the MLPs in tiles of `tokens` from now on; 0: whole. unread: see `Trial.unread_in_layers`."""
    for module, names, layer in zip(tiling.modules, unread, layers, strict=True):
        if module is None:
            continue
        module.__dict__.pop("forward", None)
        if tokens:
            path = next(path for path, part in layer.named_modules() if part is module)
            skipped = any(name.startswith(f"{path}.") for name in names)
            module.forward = MlpTiles(module, unread=skipped, tokens=tokens)


def find_tiling(
    *, found: LayerList, parts: Parts, recorder: Recorder, trial: Trial, kinds: Sequence[int]
) -> Tiling | None:
    """None: nothing to gain. Nothing is skipped in the layers yet; outer tensors are on meta before and after.

    Dropout that is on would draw other numbers in a tile, so an MLP that has it is left alone.
    """
    firsts = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    names = {kind: _mlp_of(found.layers[i]) for kind, i in firsts.items()}
    if trial.shared or not any(names.values()):
        return None
    modules = tuple(
        None if (name := names[kind]) is None else layer.get_submodule(name)
        for layer, kind in zip(found.layers, kinds, strict=True)
    )
    indices = list(firsts.values())
    try:
        with rehearsing_again(trial, parts=parts):
            rest = _rehearse(modules, indices=indices, found=found, parts=parts, recorder=recorder, trial=trial)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return None  # somebody else's code without a part of it; nothing is lost but the tiles
    elems = max(sum(p.numel() for p in module.parameters()) for module in modules if module is not None)
    alone = trial.saved_bytes_per_token - rest
    return Tiling(modules, rest, alone, elems) if alone > 0 else None


class _Kept(torch.autograd.Function):
    """Stands for an MLP in tiles: keeps its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden.new_zeros(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a rehearsal has no backward")


def _rehearse(
    modules: Sequence[nn.Module | None],
    *,
    indices: Sequence[int],
    found: LayerList,
    parts: Parts,
    recorder: Recorder,
    trial: Trial,
) -> int:
    """Bytes that autograd keeps of a token, of the hungriest layer without its MLP. Layers hand nothing on."""
    kept: list[list[int]] = []
    for length in (SHORT, LONG):
        base = partial(trial.base, **trial.flags)
        rehearsals = Rehearsals.of_row(recorder, base, length=length, shared=trial.shared)
        kept.append([])
        for i in indices:
            layer, part, module = found.layers[i], parts.layers[i], modules[i]
            if module is not None:
                module.forward = partial(_keep, module)
            try:
                kept[-1].append(rehearsals.run(i, layer=layer, parts=part).saved_bytes)
            finally:
                if module is not None:
                    del module.forward
    return max(map(bytes_per_token, *kept))


def _keep(module: nn.Module, hidden: Tensor) -> Tensor:
    out: Tensor = _Kept.apply(hidden, next(iter(module.parameters())))  # type: ignore[no-untyped-call]
    return out


def _mlp_of(layer: nn.Module) -> str | None:
    """The name of the layer's MLP: of the children that see one token at a time the one with most weights."""
    found: dict[str, int] = {
        n: sum(p.numel() for p in c.parameters()) for n, c in layer.named_children() if _sees_one_token(c)
    }
    return max(found, key=found.__getitem__, default=None)


def _sees_one_token(module: nn.Module) -> bool:
    """Whether its forward takes hidden states alone and calls nothing that could mix tokens."""
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    first = next((part for part in module.modules() if type(part) is nn.Linear), None)
    if len(needed) != 1 or first is None or any(p.dim() > 2 for p in module.parameters()):
        return False
    hidden = torch.empty(1, 8, first.in_features, dtype=first.weight.dtype, device="meta")
    try:
        with torch.no_grad(), _OneToken():
            out = module(hidden)
    except (_Mixes, RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return isinstance(out, Tensor) and out.shape == hidden.shape


class _Mixes(Exception):
    """A function that may look at other tokens."""


class _OneToken(TorchFunctionMode):
    """Lets pass what works on each token by itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) and not isinstance(out, tuple | list):
            return out  # a shape, a dtype
        if name in _ALONG_FEATURES:
            if kwargs.get("dim", args[2] if len(args) > 2 else 0) not in (-1, args[0].dim() - 1):
                raise _Mixes(name)
        elif name == "__get__":
            if isinstance(out, Tensor):
                raise _Mixes(name)
        elif func is F.dropout:
            if kwargs.get("p", args[1] if len(args) > 1 else 0.5) != 0:
                raise _Mixes(name)
        elif name not in _OF_ONE_TOKEN or (func is not F.linear and name == "linear"):
            raise _Mixes(name)
        return out


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    holder: dict[str, Any] = module.get_submodule(path)._parameters
    return holder, key
