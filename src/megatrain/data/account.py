"""What became of the rows of each source: the numbers behind `megatrain data` and every refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatrain.data.records import Cause, Refusal, Tally
from megatrain.errors import DataError

_SHOWN = 5
_HINTS = {
    Cause.FILE: "mend the file, or write it again in UTF-8: .jsonl and .json hold objects, the rows of .csv "
    "and .tsv as many fields as the header",
    Cause.COLUMNS: "say which columns are meant, e.g. columns: {prompt: question, completion: answer}",
    Cause.VALUES: "mend the rows, or choose another format, columns, train_on or max_seq_len",
}


@dataclass
class SourceAccount:
    """One source. read = used + refused + long; truncated and split rows are among the used."""

    path: str
    role: str  # train | eval
    format: str | None = None
    weight: float = 1.0
    read: int = 0
    used: int = 0
    tokens: int = 0
    supervised: int = 0
    refused: Tally = field(default_factory=Tally)
    long: Tally = field(default_factory=Tally)  # left out by long_rows: skip
    truncated: Tally = field(default_factory=Tally)
    split: Tally = field(default_factory=Tally)
    tools_unprinted: Tally = field(default_factory=Tally)  # used, without their tool definitions
    files_left_out: tuple[str, ...] = ()  # of a folder, beside files whose names announce a split

    def to_dict(self) -> dict[str, Any]:
        plain = {key: getattr(self, key) for key in ("path", "role", "format", "weight", "read", "used")}
        tallies = ("refused", "long", "truncated", "split", "tools_unprinted")
        return {
            **plain,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            **{key: _tally(getattr(self, key)) for key in tallies},
            "files_left_out": list(self.files_left_out),
        }

    def refusal(self) -> DataError:
        """What to raise when refused rows are an error, or when nothing else is left."""
        first = self.refused.first or self.long.first
        if not self.used:
            reason = f"; the first: {first[0]}" if first else ""
            causes = self.refused.causes.most_common(1)
            hint = _HINTS[causes[0][0] if causes else Cause.VALUES] if first else "the source holds no rows"
            return DataError(f"0 usable of {self.read} rows{reason}", where=self.path, hint=hint)
        shown = "".join(f"\n  {refusal}" for refusal in first[:_SHOWN])
        more = f"\n  and {self.refused.count - _SHOWN} more" if self.refused.count > _SHOWN else ""
        rows = "1 row" if self.refused.count == 1 else f"{self.refused.count} rows"
        return DataError(
            f"{rows} of the first {self.read} cannot be used{shown}{more}",
            where=self.path,
            hint="mend them, or leave such rows out with data.bad_rows: skip",
        )


@dataclass(frozen=True)
class DataReport:
    """Every source of train, then every source of eval."""

    sources: tuple[SourceAccount, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"sources": [source.to_dict() for source in self.sources]}

    def warnings(self) -> list[str]:
        """One line for each thing that a user should know before training on it."""
        lines = []
        for source in self.sources:
            if source.files_left_out:
                lines.append(_left_out(source))
            for tally, text in (
                (source.refused, "refused"),
                (source.long, "left out as too long"),
                (source.truncated, "truncated to max_seq_len"),
                (source.split, "split at max_seq_len"),
                (source.tools_unprinted, "used without their tools, which the chat template does not print"),
            ):
                if tally.count:
                    rows = "1 row" if tally.count == 1 else f"{tally.count} rows"
                    lines.append(f"{source.path}: {rows} {text}; the first: {tally.first[0]}")
        return lines


def _left_out(source: SourceAccount) -> str:
    names = source.files_left_out
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    files = "1 file is" if len(names) == 1 else f"{len(names)} files are"
    return (
        f"{source.path}: {files} not read, as names of others announce a split (train, ...) and theirs none: {listed}"
    )


def _tally(tally: Tally) -> dict[str, Any]:
    return {"count": tally.count, "rows": [_refusal(refusal) for refusal in tally.first]}


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {"file": refusal.file, "row": refusal.row, "line": refusal.line, "reason": refusal.reason}
