"""A head in slices and an embedding as rows (stream/sliced.py), in bytes.

Letters: V rows of the head or the embedding, D their width.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.sizes_types import ModelSizes, SliceSizes

HEAD_PLACES = 2
"""`stream.schedule.HEAD_PLACES`: one slice is used while the next arrives."""
ALIGN_ELEMS = 128
"""`model.layout.ALIGN_ELEMS`."""
SLICE_HIDDEN_BYTES = 24
"""Per element of a chunk's hidden states at the peak: gathered, through the final norm in fp32, and gradients."""


@dataclass(frozen=True)
class SlicedEnds:
    """What takes the place of whole ends on the device."""

    sizes: ModelSizes
    known: SliceSizes
    slices: int
    rows: int  # most distinct tokens of a step

    @property
    def height(self) -> int:
        """Rows of a slice: `stream.step.slice_rows`."""
        height = -(-self.known.head_rows // self.slices)
        return height if height < 64 else -(-height // 8) * 8

    @property
    def row_block_bytes(self) -> int:
        """The step's rows of the embedding, on the device and, page-locked, on the host."""
        return self.rows * self.known.embedding_width * self.known.itemsize

    @property
    def embedding_bytes(self) -> int:
        """Of the whole one."""
        return self.known.embedding_rows * self.known.embedding_width * self.known.itemsize

    @property
    def slice_bytes(self) -> int:
        return self.height * self.known.head_width * self.known.itemsize

    @property
    def weights(self) -> int:
        """Stem and tail without the two large weights, and the rows."""
        gone = _padded(self.known.embedding_rows * self.known.embedding_width)
        gone += 0 if self.known.tied else _padded(self.known.head_rows * self.known.head_width)
        whole = self.sizes.stem.streamed_bytes + self.sizes.tail.streamed_bytes
        return whole - gone * self.known.itemsize + self.row_block_bytes

    @property
    def places(self) -> int:
        return HEAD_PLACES * self.slice_bytes

    @property
    def tables(self) -> int:
        """Where each token's row is and, tied, where in its slice each row is."""
        return 8 * (self.known.embedding_rows + (self.rows if self.known.tied else 0))

    def sums(self, *, layer_elems: int, stem_shared: bool) -> int:
        """fp32 gradient sums of layers, tail and stem: one block, but for a stem that is needed with the others."""
        known = self.known
        head = 0 if known.tied else _padded(known.head_rows * known.head_width)
        tail = _padded(self.height * known.head_width) + self.sizes.tail.elems - head
        embedding = _padded(known.embedding_rows * known.embedding_width)
        stem = _padded(self.rows * known.embedding_width) + self.sizes.stem.elems - embedding
        if stem_shared:
            return 4 * (max(layer_elems, tail) + stem)
        return 4 * max(layer_elems, tail, stem)

    def head_bytes(self, *, chunk: int, step_tokens: int, logit_bytes: int) -> int:
        """At the head's peak: a chunk, the gradient of a slice, the fp32 gradient of all hidden states."""
        return self.chunk_bytes(chunk, logit_bytes=logit_bytes) + self.fixed_bytes(step_tokens=step_tokens)

    def chunk_bytes(self, chunk: int, *, logit_bytes: int) -> int:
        return chunk * (self.height * logit_bytes + SLICE_HIDDEN_BYTES * self.sizes.hidden_numel_per_token)

    def fixed_bytes(self, *, step_tokens: int) -> int:
        return self.slice_bytes + 4 * step_tokens * self.sizes.hidden_numel_per_token


def _padded(elems: int) -> int:
    return -(-elems // ALIGN_ELEMS) * ALIGN_ELEMS
