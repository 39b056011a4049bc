"""Whether a model's head can be computed in slices of its rows, and its embedding be given as a few rows: by trial.

A head can be sliced if its logits are an elementwise function of one product `hidden @ weight.T (+ bias)`: a
soft-cap or a scale is one, what mixes entries of the vocabulary or knows their numbers is not. An embedding can be
given as rows if its weight is only looked up, by the token ids as they came. Both are tried out on Hugging Face's own
code with numbers; nothing is known by name.

Letters: V vocabulary, D width of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError
from megatrain.model.anatomy_of import Parts, hollow
from megatrain.model.sites import Site, Sites
from megatrain.model.stubs import Recorder
from megatrain.model.trial import Trial

_WIDTH, _CUT, _TOKENS = 12, 5, 3
"""Of the made-up product: entries of the vocabulary, of which the first slice has _CUT; and tokens."""


class NotSliceable(ModelError):
    """The head or the embedding does something that slices or rows would lose."""


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, width] that is used in one way at the given places."""

    name: str  # canonical
    sites: Sites
    rows: int
    width: int


@dataclass(frozen=True)
class Slicing:
    """Where slices of the head and rows of the embedding are put. Tied: one tensor is both."""

    head: Matrix
    bias: Matrix | None  # of the head: [V]; its width is 0
    embedding: Matrix
    lookup: nn.Embedding  # the module that looks rows up
    padding: int | None  # the token whose row gets no gradient as an embedding

    @property
    def tied(self) -> bool:
        return self.head.name == self.embedding.name


@dataclass(frozen=True)
class _Use:
    """One call of a function with a watched tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: frozenset[int]  # ids of the watched tensors among its arguments


class _Watch(TorchFunctionMode):
    """Notes every use of the watched tensors. Linear layers give `answer` where it is set, else their rows' mean."""

    def __init__(self, watched: set[int], *, answer: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.uses: list[_Use] = []
        self._watched, self._answer = watched, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # a shape or a dtype is no value
            mine = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self._watched}
            if mine:
                self.uses.append(_Use(func, args, kwargs, frozenset(mine)))
        if func is F.linear:
            answer = self._answer(args[0], args[1])
            return args[0].mean(-1, keepdim=True).repeat_interleave(len(args[1]), -1) if answer is None else answer
        return func(*args, **kwargs)


def find_slicing(model: Any, *, parts: Parts, recorder: Recorder, trial: Trial) -> Slicing:
    """Stubs are in place; outer tensors are on the meta device before and after. Raises NotSliceable.

    Every place of a tied tensor is given a tensor of its own, so that a use tells the place.
    """
    bound: dict[int, tuple[str, Site]] = {}  # id of the stand-in -> whose, where
    held: list[tuple[Site, Tensor]] = []
    for name, tensor in parts.outer.items():
        for holder, key in parts.outer_sites[name]:
            stand_in = hollow(tensor)
            held.append(((holder, key), holder[key]))
            holder[key] = stand_in
            bound[id(stand_in)] = (name, (holder, key))
    probe = _Probe(model, parts=parts, recorder=recorder, trial=trial, bound=bound)
    try:
        head, bias = probe.head()
        embedding, lookup = probe.embedding(tied_to=head.name)
        return Slicing(head, bias, embedding, lookup, lookup.padding_idx)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        # Somebody else's code on arguments that it was not made for; nothing is lost but the slices.
        raise NotSliceable(f"the model's forward does not run on a trial of its head: {error}") from error
    finally:
        for (holder, key), tensor in held:
            holder[key] = tensor


class _Probe:
    """The trials, with stand-ins bound."""

    def __init__(
        self, model: Any, *, parts: Parts, recorder: Recorder, trial: Trial, bound: dict[int, tuple[str, Site]]
    ) -> None:
        self._model, self._parts, self._recorder, self._trial, self._bound = model, parts, recorder, trial, bound
        self._shared = frozenset(name for layer in parts.layers for name in layer.shared)

    # -- the head ---------------------------------------------------------------------------------------

    def head(self) -> tuple[Matrix, Matrix | None]:
        """The weight whose product the logits are, and its bias."""
        linear, logits = self._last_product()
        weight, bias = linear.args[1], linear.kwargs.get("bias", linear.args[2] if len(linear.args) > 2 else None)
        if logits.shape[-1] != weight.shape[0]:
            raise NotSliceable("the logits are not the rows of one product")
        name, site = self._bound[id(weight)]
        if name in self._shared:
            raise NotSliceable(f"layers read the head's weight {name}")
        self._check_elementwise(id(weight), bias=None if bias is None else id(bias))
        rows, width = weight.shape
        biases = None
        if bias is not None:
            bias_name, bias_site = self._bound[id(bias)]
            biases = Matrix(bias_name, Sites({bias_name: [bias_site]}), rows, 0)
        return Matrix(name, Sites({name: [site]}), rows, width), biases

    def _run(self, hidden: Tensor, *, answer: Callable[[Tensor, Tensor], Tensor | None]) -> tuple[Tensor, _Watch]:
        shape = hidden.shape[-3:-1] if self._trial.full_length_tail else (1, 1)
        dummy = torch.zeros(shape, dtype=torch.int64)
        with torch.no_grad(), _Watch(set(self._bound), answer=answer) as watch:
            out = self._recorder.inject(hidden, run=lambda: self._model(input_ids=dummy, **self._trial.flags))
        logits: Tensor = out.logits
        return logits, watch

    def _hidden(self) -> Tensor:
        shape = list(self._trial.hidden_shape)
        shape[-2] = _TOKENS
        dtype = next(t.dtype for t in self._parts.outer.values() if t.is_floating_point())
        return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))

    def _last_product(self) -> tuple[_Use, Tensor]:
        logits, watch = self._run(self._hidden(), answer=lambda rows, weight: None)
        products = [use for use in watch.uses if use.func is F.linear]
        if not products or id(products[-1].args[1]) not in self._bound:
            raise NotSliceable("the head is not a linear layer")
        return products[-1], logits

    def _check_elementwise(self, weight: int, *, bias: int | None) -> None:
        """Hand made-up products to what follows the head: in two slices it must do what it does to the whole."""
        generator = torch.Generator().manual_seed(2)
        hidden = self._hidden()
        whole = 10 * torch.randn((1, _TOKENS, _WIDTH), dtype=hidden.dtype, generator=generator)
        inputs: list[Tensor] = []

        def logits(product: Tensor) -> Tensor:
            def answer(rows: Tensor, used: Tensor) -> Tensor | None:
                if id(used) != weight:
                    return None
                inputs.append(rows)
                return product

            out, watch = self._run(hidden, answer=answer)
            uses = [use for use in watch.uses if use.tensors & {weight, bias} and use.func is not F.embedding]
            if len(uses) != 1:
                raise NotSliceable("the head's weight is read more than once")
            return out

        try:
            expected = logits(whole)
            found = torch.cat([logits(whole[..., :_CUT]), logits(whole[..., _CUT:])], -1)
            self._model.train(self._trial.stochastic)
            logits(whole)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise NotSliceable(f"what follows the head needs the whole vocabulary: {error}") from error
        finally:
            self._model.eval()
        if expected.shape != whole.shape or not torch.equal(found, expected):
            raise NotSliceable("what follows the head is not elementwise")
        if any(not torch.equal(rows, inputs[0]) for rows in inputs[1:]):
            raise NotSliceable("the head draws random numbers")

    # -- the embedding ------------------------------------------------------------------------------------

    def embedding(self, *, tied_to: str) -> tuple[Matrix, nn.Embedding]:
        """The largest weight that is only looked up by the token ids; the head's own where it is one."""
        ids = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
        uses = self._lookups(ids)
        found = [self._plain_lookup(name, uses, ids=ids) for name in dict.fromkeys(n for n, _, _ in uses)]
        plain = [matrix for matrix in found if matrix is not None]
        tied = [matrix for matrix in plain if matrix[0].name == tied_to]
        if not plain or (tied_to in self._trial.stem and not tied):
            raise NotSliceable("the embedding is more than a look-up by token ids")
        matrix, module = (tied or sorted(plain, key=lambda m: m[0].rows * m[0].width))[-1]
        table = torch.tensor([1, 2, 0])
        handle = module.register_forward_pre_hook(lambda _, args: (table[args[0]], *args[1:]))
        try:
            mapped = [use for name, _, use in self._lookups(ids) if name == matrix.name]
        finally:
            handle.remove()
        if not torch.equal(mapped[0].args[0], table[ids]):
            raise NotSliceable("the embedding's module does not look up what it is given")
        return matrix, module

    def _lookups(self, ids: Tensor) -> list[tuple[str, Site, _Use]]:
        """Every use of an outer parameter before the layers: name, place, call."""
        run, flags = self._trial.base, self._trial.flags
        with torch.no_grad(), _Watch(set(self._bound), answer=lambda rows, weight: None) as watch:
            self._recorder.record(lambda: run(input_ids=ids, **flags))
        return [(*self._bound[key], use) for use in watch.uses for key in use.tensors]

    def _plain_lookup(
        self, name: str, uses: list[tuple[str, Site, _Use]], *, ids: Tensor
    ) -> tuple[Matrix, nn.Embedding] | None:
        mine = [(site, use) for other, site, use in uses if other == name]
        tensor = self._parts.outer[name]
        if len(mine) != 1 or mine[0][1].func is not F.embedding or name in self._shared or not tensor.requires_grad:
            return None
        site, use = mine[0]
        given = inspect.signature(F.embedding).bind(*use.args, **use.kwargs).arguments
        special = given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse")
        module = next((m for m in self._model.modules() if m._parameters is site[0]), None)
        if special or not isinstance(module, nn.Embedding) or not _same(given["input"], ids):
            return None
        return Matrix(name, Sites({name: [site]}), *tensor.shape), module


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
