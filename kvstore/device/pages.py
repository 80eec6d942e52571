"""HostPages: gathers and scatters the blocks of an engine's memory on the host.

Theory. All copies here must drop the interpreter lock, or one busy copy thread stalls the daemon's
loop. rows.py copies rows of one contiguous array at memcpy speed without it, so memory is seen as
rows of ``page`` bytes, ``page`` being the greatest common divisor of every offset, stride and block
size in question, counted from the first tensor's offset; a block is then a run of rows, and the row
numbers of a chunk are one multiplication and addition over tables made at registration:

    index = fixed + row_stride * block_ids[block_of_row]

A group usually has one such view for all its tensors (one copy call for all layers). Where the
common divisor is small because tensors differ in size (an index cache of 132 bytes a token beside
MLA's 1152), each tensor gets a view of its own, mostly with whole blocks as rows. Where even that
leaves rows below 128 bytes, a strided view [blocks, block bytes] is indexed instead: that gathers
through a temporary array of the chunk's size, so it is the second choice (0.45 of memcpy to 0.6 at
rows of 512 bytes, but 0.41 to 0.15 at rows of 8).

Copies may clip row numbers out of range, so IDs are checked before.

Rejected: ``np.take`` from strided views (it copies the whole view), slices block by block (a
Python call each, 50 times slower at 117 bytes), ``np.put`` and assignment of void dtypes (both
hold the interpreter lock throughout).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatchError
from kvstore.core.layout import NULL_BLOCK, LayerGroup, Layout, TensorSpan
from kvstore.device.base import Blocks
from kvstore.device.rows import ROWS, RowCopies

_GROUP_PAGE_BYTES_MIN = 4096
"""One view for a whole group pays from rows of this size on, even if tensors alone had larger."""
_ROWS_MAX = 1 << 20
"""Rows a chunk: three tables of 8 bytes a row are kept for each registered group."""
_ROW_BYTES_MIN = 128
"""Below it a copy per row costs more than a temporary array."""

_Bytes = NDArray[np.uint8]
_Index = NDArray[np.intp]


class HostPages:
    """The Pages of host memory: ``array`` uint8 [memory bytes] seen through ``layout``.

    Borrows the array: whoever closes the mapping drops the HostPages first. Immutable, so it
    works from several threads.
    """

    def __init__(self, array: _Bytes, layout: Layout, copies: RowCopies = ROWS) -> None:
        self._plans = tuple(
            _plan(_Memory(array, copies), group, layout.blocks_per_chunk(i))
            for i, group in enumerate(layout.groups)
        )

    def gather(self, blocks: Blocks, out: _Bytes) -> None:
        """Copy blocks into ``out``; raises LayoutMismatchError before the first byte moves."""
        work = self._check(blocks, out, "out")
        for plan, ids, _ in work:
            if (ids == NULL_BLOCK).any():
                raise LayoutMismatchError(
                    f"blocks: group {plan.name!r} names NULL_BLOCK, which can't be stored"
                )
        for plan, ids, part in work:
            for run in plan.runs:
                run.gather(ids, part[run.start : run.end])

    def scatter(self, blocks: Blocks, source: _Bytes) -> None:
        """Copy ``source`` into blocks; raises LayoutMismatchError before the first byte moves."""
        for plan, ids, part in self._check(blocks, source, "source"):
            present = ids != NULL_BLOCK
            for run in plan.runs:
                run.scatter(ids, present, part[run.start : run.end])

    def _check(
        self, blocks: Blocks, flat: _Bytes, name: str
    ) -> list[tuple[_GroupPlan, _Index, _Bytes]]:
        """Each group's plan, block IDs and piece of ``flat``, all checked."""
        work = []
        start, last = 0, -1
        for group, packed in blocks:
            if not last < group < len(self._plans):
                raise LayoutMismatchError(
                    f"blocks: group {group} after {last}; valid are rising indices below "
                    f"{len(self._plans)}"
                )
            plan, last = self._plans[group], group
            work.append((plan, plan.block_ids(packed), flat[start : start + plan.nbytes]))
            start += plan.nbytes
        if flat.nbytes != start or not flat.flags.c_contiguous or flat.dtype != np.uint8:
            raise LayoutMismatchError(
                f"blocks: {name} is {flat.dtype} of {flat.nbytes} bytes; valid is contiguous "
                f"uint8 of {start}"
            )
        return work


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """How one group's blocks of one chunk lie: ``runs`` make up its ``nbytes`` in order."""

    name: str
    blocks: int
    num_blocks: int
    nbytes: int
    runs: tuple[_RowRun | _StridedRun, ...]

    def block_ids(self, packed: bytes) -> _Index:
        if len(packed) != 4 * self.blocks:
            raise LayoutMismatchError(
                f"blocks: group {self.name!r} has {len(packed)} bytes of block IDs; valid are "
                f"{4 * self.blocks} ({self.blocks} a chunk)"
            )
        ids = np.frombuffer(packed, dtype="<u4").astype(np.intp)
        bad = ids[(ids >= self.num_blocks) & (ids != NULL_BLOCK)]
        if bad.size:
            raise LayoutMismatchError(
                f"blocks: group {self.name!r} has no block {bad[0]}; valid are "
                f"0..{self.num_blocks - 1}"
            )
        return ids


@dataclass(frozen=True, slots=True)
class _RowRun:
    """Bytes [start, end) of a group's piece, copied as rows of one view by one call."""

    start: int
    end: int
    copies: RowCopies
    rows: _Bytes
    fixed: _Index
    row_stride: _Index
    block_of_row: _Index

    def gather(self, ids: _Index, out: _Bytes) -> None:
        index = self.fixed + self.row_stride * ids[self.block_of_row]
        self.copies.gather(self.rows, index, out)

    def scatter(self, ids: _Index, present: NDArray[np.bool_], source: _Bytes) -> None:
        index = self.fixed + self.row_stride * ids[self.block_of_row]
        if not present.all():
            keep = present[self.block_of_row]
            index, source = index[keep], source.reshape(len(keep), -1)[keep]
        self.copies.scatter(self.rows, index, source)


@dataclass(frozen=True, slots=True)
class _StridedRun:
    """Bytes [start, end) of a group's piece: one tensor's blocks, through a strided view
    [num_blocks, block_bytes]."""

    start: int
    end: int
    view: _Bytes

    def gather(self, ids: _Index, out: _Bytes) -> None:
        np.copyto(out.reshape(len(ids), -1), self.view[ids])

    def scatter(self, ids: _Index, present: NDArray[np.bool_], source: _Bytes) -> None:
        pieces = source.reshape(len(ids), -1)
        if not present.all():
            ids, pieces = ids[present], pieces[present]
        self.view[ids] = pieces


@dataclass(frozen=True, slots=True)
class _Memory:
    """An engine's memory and how rows of it are copied."""

    array: _Bytes
    copies: RowCopies


def _plan(memory: _Memory, group: LayerGroup, blocks: int) -> _GroupPlan:
    page = _page_bytes(group.tensors)
    alone = min(_page_bytes((span,)) for span in group.tensors)
    together = page >= min(alone, _GROUP_PAGE_BYTES_MIN) and page >= _ROW_BYTES_MIN
    runs: list[_RowRun | _StridedRun] = []
    start = 0
    for spans in [group.tensors] if together else [(span,) for span in group.tensors]:
        end = start + blocks * sum(span.block_bytes for span in spans)
        if _page_bytes(spans) >= _ROW_BYTES_MIN:
            runs.append(_row_run(memory, spans, blocks, (start, end)))
        else:
            (span,) = spans
            runs.append(_strided_run(memory.array, span, (start, end)))
        start = end
    return _GroupPlan(group.name, blocks, group.num_blocks(), start, tuple(runs))


def _page_bytes(spans: Sequence[TensorSpan]) -> int:
    """The greatest row size that offsets (from the first), strides and block sizes are multiples
    of."""
    first = min(span.offset_bytes for span in spans)
    sizes = [span.block_bytes for span in spans]
    sizes += [span.offset_bytes - first for span in spans]
    sizes += [span.block_stride_bytes for span in spans if span.num_blocks > 1]
    return math.gcd(*sizes)


def _row_run(
    memory: _Memory, spans: Sequence[TensorSpan], blocks: int, place: tuple[int, int]
) -> _RowRun:
    page = _page_bytes(spans)
    count = (place[1] - place[0]) // page
    if count > _ROWS_MAX:
        raise LayoutMismatchError(
            f"layout: a chunk would be {count} rows of {page} bytes; valid are up to {_ROWS_MAX}: "
            "use fewer tokens a chunk, or offsets and strides that are multiples of a larger size"
        )
    first = min(span.offset_bytes for span in spans)
    end = max(span.end_bytes() for span in spans)
    rows = memory.array[first:end].reshape(-1, page)
    fixed, strides, numbers = [], [], []
    for span in spans:
        in_block = np.arange(span.block_bytes // page, dtype=np.intp)
        base = (span.offset_bytes - first) // page
        fixed.append(np.tile(base + in_block, blocks))
        stride = span.block_stride_bytes // page if span.num_blocks > 1 else 0
        strides.append(np.full(blocks * len(in_block), stride, np.intp))
        numbers.append(np.repeat(np.arange(blocks, dtype=np.intp), len(in_block)))
    tables = (np.concatenate(table) for table in (fixed, strides, numbers))
    return _RowRun(*place, memory.copies, rows, *tables)


def _strided_run(array: _Bytes, span: TensorSpan, place: tuple[int, int]) -> _StridedRun:
    shape, strides = (span.num_blocks, span.block_bytes), (span.block_stride_bytes, 1)
    inside = array[span.offset_bytes : span.end_bytes()]
    return _StridedRun(*place, np.lib.stride_tricks.as_strided(inside, shape, strides))
