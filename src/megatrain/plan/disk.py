"""Disk that a run takes: the checkpoints that exist at once, and the exported model."""

from __future__ import annotations

from dataclasses import dataclass, replace

MANY = 1 << 30
"""Checkpoints, where nobody knows how many."""
SPARE_BYTES = 4 << 20
"""Beside the tensors of a checkpoint or a model: manifest, headers, tokenizer, directory entries."""


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes of what a run writes, and how often.

    A checkpoint goes only when a newer one is whole, so two exist while the second is written. Older ones make room
    where there is none, for a checkpoint and for the export. Checkpoints that were here before are not in these
    figures: what they hold is not free.
    """

    checkpoint: int
    export: int  # 0: none
    keep: int
    saves: int  # checkpoints that will be written, at least
    saves_at_most: int  # more where the clock decides, or the steps are not counted yet
    resumed: bool = False  # the newest checkpoint is here, and stays until the next is whole

    @property
    def of_checkpoints(self) -> DiskNeeds:
        """What the disk of the checkpoints must have where the model goes to another."""
        return replace(self, export=0)

    @property
    def of_export(self) -> DiskNeeds:
        """What that other disk must have."""
        return DiskNeeds(checkpoint=0, export=self.export, keep=self.keep, saves=0, saves_at_most=0)

    @property
    def table(self) -> dict[str, int]:
        """By purpose: with all that is kept while one more is written."""
        table = {"checkpoint being written": self.checkpoint}
        if (kept := min(self.keep, self.saves_at_most - 1)) > 0:
            table["checkpoints kept"] = kept * self.checkpoint
        if self.export:
            table["exported model"] = self.export
        return table

    @property
    def least(self) -> int:
        """Without so much the run cannot end."""
        return self._peak(keep=1, saves=self.saves)

    @property
    def all_kept(self) -> int:
        """With so much nothing goes before its time."""
        return self._peak(keep=self.keep, saves=self.saves_at_most)

    def _peak(self, *, keep: int, saves: int) -> int:
        before = int(self.resumed)
        writing = min(keep, saves - 1 + before) + 1 - before if saves else 0
        ended = min(keep, saves + before) - before
        most = max(writing * self.checkpoint, ended * self.checkpoint + self.export)
        return most + SPARE_BYTES if most else 0
