"""From a recipe to the samples of a run: read, understand, print, tokenise, cut, and account for every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatrain.data.account import DataReport, SourceAccount
from megatrain.data.encode import Draft, Encoded, Encoder
from megatrain.data.files import locate, read
from megatrain.data.formats import RowReader
from megatrain.data.order import hold_out
from megatrain.data.records import BadRow, Cause, Record, Refusal, Tally
from megatrain.data.samples import Flags, Samples, SamplesBuilder, Tokens
from megatrain.errors import DataError

if TYPE_CHECKING:
    from megatrain.recipe import Recipe, Source

_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1_000_000
_MOST_DRAWN = 2**28  # rows of an epoch, where weights make more of them than there are
_ENOUGH = 10  # bad rows after which reading on tells nothing new
_HOPELESS = 1_000_000  # bad rows without a good one, whatever bad_rows says: a table may claim 2**60 of them


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    train: Samples
    eval: Samples | None
    report: DataReport

    def fingerprint(self) -> str:
        """Equal if and only if a resumed run sees what the first one saw."""
        return self.train.fingerprint() + (self.eval.fingerprint() if self.eval is not None else "")


def prepare(
    recipe: Recipe,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_positions: int | None,
    vocab_size: int | None,
    should_stop: Callable[[], None] = lambda: None,
) -> Prepared:
    """Everything that a run will see, in memory.

    `max_positions` is the model's max_position_embeddings, None if it has no such limit; `vocab_size` the rows of
    its embedding, None if they are not known. `should_stop` is called for every batch of rows and raises to end the
    work. Raises DataError.
    """
    data = recipe.data
    _check_length(recipe, max_positions=max_positions)
    encoder = Encoder(tokenizer, train_on=data.train_on)
    train, accounts = _read_all(recipe, data.train, role="train", encoder=encoder, should_stop=should_stop)
    _check_ids(train, vocab_size=vocab_size)
    if data.eval is not None:
        held, more = _read_all(recipe, data.eval, role="eval", encoder=encoder, should_stop=should_stop)
        _check_ids(held, vocab_size=vocab_size)
        _check_weights(train, data.train)
        _check_weights(held, data.eval)
        return Prepared(train, held, DataReport((*accounts, *more)))
    _check_weights(train, data.train)
    if not data.eval_fraction:
        return Prepared(train, None, DataReport(accounts))
    chosen = hold_out(train, fraction=data.eval_fraction, seed=recipe.train.seed)
    if not chosen.any():
        hint = "give more rows, or set data.eval_fraction: 0"
        raise DataError("one row is too few to hold out a share of them", where="data.eval_fraction", hint=hint)
    return Prepared(train.select(~chosen), train.select(chosen), DataReport(accounts))


def _check_length(recipe: Recipe, *, max_positions: int | None) -> None:
    scaled = {"rope_scaling", "rope_parameters"} & set(recipe.model.config)
    if max_positions is None or recipe.data.max_seq_len <= max_positions or scaled:
        return
    raise DataError(
        f"{recipe.data.max_seq_len} is beyond the {max_positions} positions that the model knows",
        where="data.max_seq_len",
        hint=f"set data.max_seq_len: {max_positions}, or scale the rotary embedding with model.config: "
        "{rope_scaling: {...}}",
    )


def _check_ids(samples: Samples, *, vocab_size: int | None) -> None:
    largest = max(int(samples.tokens.max(initial=0)), samples.pad_id)
    if vocab_size is not None and largest >= vocab_size:
        hint = "tokenizer.path must name the model's own tokenizer"
        raise DataError(f"the tokenizer makes token {largest}, the model knows {vocab_size}", hint=hint)


def _check_weights(samples: Samples, sources: Sequence[Source]) -> None:
    """Every source takes part in an epoch, and an epoch has an end."""
    rows = np.bincount(samples.source, minlength=len(sources))
    for source, count in zip(sources, rows.tolist(), strict=True):
        if source.weight < 1 and round(source.weight * count) == 0:
            raise DataError(
                f"a weight of {source.weight:g} draws none of its {count} rows in an epoch",
                where=source.path,
                hint="raise the weight, or leave the source out",
            )
    drawn = sum(source.weight * count for source, count in zip(sources, rows.tolist(), strict=True))
    if drawn > max(_MOST_DRAWN, len(samples)):
        heaviest = max(sources, key=lambda source: source.weight)
        raise DataError(
            f"with a weight of {heaviest.weight:g} an epoch draws {drawn:.3g} rows",
            where=heaviest.path,
            hint="a weight multiplies how often the rows of a source are drawn; lower it, or give others less than 1",
        )


def _read_all(
    recipe: Recipe,
    sources: Sequence[Source],
    *,
    role: str,
    encoder: Encoder,
    should_stop: Callable[[], None],
) -> tuple[Samples, tuple[SourceAccount, ...]]:
    builder = SamplesBuilder()
    accounts = []
    for number, source in enumerate(sources):
        intake = _Intake(recipe, source=source, number=number, role=role, encoder=encoder, builder=builder)
        intake.run(should_stop)
        accounts.append(intake.account)
    weights = tuple(source.weight for source in sources)
    return builder.build(weights=weights, pad_id=encoder.pad), tuple(accounts)


class _Intake:
    """Takes in the rows of one source."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        source: Source,
        number: int,
        role: str,
        encoder: Encoder,
        builder: SamplesBuilder,
    ) -> None:
        self._data = recipe.data
        self._source = source
        self._number = number
        self._encoder = encoder
        self._builder = builder
        self.account = SourceAccount(source.path, role, weight=source.weight)
        self._reader = RowReader(
            source.format,
            columns=source.columns,
            system=recipe.data.system,
            tool_calls=encoder.prints_tool_calls,
        )

    def run(self, should_stop: Callable[[], None]) -> None:
        batch: list[tuple[Record, Draft]] = []
        characters = 0
        for record in self._records():
            if self.account.read % _BATCH_ROWS == 0:
                should_stop()
            self.account.read += 1
            draft = self._draft(record)
            if draft is None:
                continue
            batch.append((record, draft))
            characters += len(draft.text)
            if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                should_stop()
                self._take(batch)
                batch, characters = [], 0
        self._take(batch)
        self.account.format = self._reader.format
        if not self.account.used or (self.account.refused.count and self._data.bad_rows == "error"):
            raise self.account.refusal()

    def _records(self) -> Iterator[Record]:
        split, subset = self._source.split, self._source.subset
        place = locate(self._source.path, split=split, subset=subset)
        self.account.files_left_out = tuple(map(str, place.left_out))
        records = read(place, subset=subset, split=split, wanted=self._reader.wanted)
        for count, record in enumerate(records):
            if count == self._source.limit:
                return
            yield record

    def _draft(self, record: Record) -> Draft | None:
        try:
            if record.fault is not None:
                raise BadRow(record.fault, cause=Cause.FILE)
            return self._encoder.draft(self._reader.read(record.columns))
        except BadRow as reason:
            self._refuse(record, str(reason), cause=reason.cause)
            return None

    def _refuse(self, record: Record, reason: str, *, cause: Cause = Cause.VALUES) -> None:
        self.account.refused.add(Refusal.of(record, reason=reason), cause=cause)
        ends = self._data.bad_rows == "error" or not self.account.used
        if ends and self.account.refused.count >= (_ENOUGH if self.account.used else _HOPELESS):
            raise self.account.refusal()

    def _take(self, batch: list[tuple[Record, Draft]]) -> None:
        encoded = self._encoder.encode([draft for _, draft in batch])
        for (record, draft), sample in zip(batch, encoded, strict=True):
            pieces = self._fit(record, draft=draft, sample=sample)
            if not pieces:
                continue
            self._builder.add(pieces, source=self._number, file=record.file, row=record.row)
            self.account.used += 1
            self.account.tokens += sum(len(tokens) for tokens, _ in pieces)
            self.account.supervised += sum(int(np.count_nonzero(flags)) for _, flags in pieces)
            if draft.drops_tools:
                self._note(self.account.tools_unprinted, record, "has tools")
        self._builder.seal_batch()

    def _fit(self, record: Record, *, draft: Draft, sample: Encoded) -> list[tuple[Tokens, Flags]]:
        """The pieces of a row that are trained on; none if it is left out, which is then noted."""
        length, most = len(sample.tokens), self._data.max_seq_len
        if not sample.supervised.any():
            self._refuse(record, "no supervised token in it")
            return []
        if length <= most:
            return [(sample.tokens, sample.supervised)]
        reason = f"{length} tokens, max_seq_len is {most}"
        policy = self._data.long_rows
        if policy == "auto":
            policy = "split" if draft.is_text else "truncate"
        match policy:
            case "skip":
                self._note(self.account.long, record, reason)
                return []
            case "error":
                hint = "raise data.max_seq_len, or let data.long_rows truncate, split or skip such rows"
                raise DataError(f"the row has {reason}", where=record.where, hint=hint)
            case "split":
                pieces = split(sample, most=most)
            case _:
                pieces = [truncate(sample, most=most, eos=self._encoder.eos if draft.is_text else None)]
        kept = [(piece.tokens, piece.supervised) for piece in pieces if piece.supervised.any()]
        if not kept:
            self._refuse(record, f"no supervised token is left of it ({reason})")
            return []
        self._note(self.account.split if policy == "split" else self.account.truncated, record, reason)
        return kept

    def _note(self, tally: Tally, record: Record, reason: str) -> None:
        tally.add(Refusal.of(record, reason=reason))


def truncate(sample: Encoded, *, most: int, eos: int | None) -> Encoded:
    """The first `most` tokens; a text still ends with its one EOS (`eos`)."""
    tokens, supervised = sample.tokens[:most].copy(), sample.supervised[:most].copy()
    if eos is not None:
        tokens[-1], supervised[-1] = eos, True
    return Encoded(tokens, supervised)


def split(sample: Encoded, *, most: int) -> list[Encoded]:
    """Pieces of at most `most` tokens, one after the other. The first token of a piece is not supervised.

    The last piece never is a single token, which nothing could be learnt from: it would be the EOS.
    """
    cuts = list(range(0, len(sample.tokens), most))
    if len(sample.tokens) - cuts[-1] == 1 and most > 2:
        cuts[-1] -= 1
    pieces = []
    for start, end in zip(cuts, [*cuts[1:], len(sample.tokens)], strict=True):
        supervised = sample.supervised[start:end].copy()
        supervised[0] = False
        pieces.append(Encoded(sample.tokens[start:end], supervised))
    return pieces
