"""PagesContract: what every Pages does, host or GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatchError
from kvstore.core.layout import NULL_BLOCK, LayerGroup, Layout, TensorSpan
from kvstore.device.base import Blocks, Pages
from kvstore.testing.samples import packed, pattern

_Bytes = NDArray[np.uint8]


class PagedBench(Protocol):
    """What PagesContract works on: engine memory, filled with a pattern, and its Pages."""

    pages: Pages

    def image(self) -> _Bytes:
        """A copy of the engine's memory."""


LAYOUTS: dict[str, Layout] = {
    "one tensor": Layout(
        "float16", 16, (LayerGroup("full", 16, None, (TensorSpan(0, 8192, 8192, 9),)),)
    ),
    "MHA, K and V apart": Layout(
        "bfloat16", 32,
        (LayerGroup("full", 8, None, tuple(
            TensorSpan(i * 8 * 16384, 16384, 16384, 8) for i in range(6))),),
    ),
    "MLA": Layout(
        "bfloat16", 64,
        (LayerGroup("full", 16, None, tuple(
            TensorSpan(i * 7 * 18432, 18432, 18432, 7) for i in range(3))),),
    ),
    "MLA and index in one group": Layout(
        "uint8", 64,
        (LayerGroup("full", 16, None, (
            TensorSpan(0, 9216, 9216, 6), TensorSpan(6 * 9216, 2112, 2112, 6))),),
    ),
    "blocks of layers side by side": Layout(
        "bfloat16", 32,
        (LayerGroup("full", 16, None, tuple(
            TensorSpan(4096 + i * 4096, 5 * 4096, 4096, 8) for i in range(4))),),
    ),
    "full, window and single tokens": Layout(
        "bfloat16", 16,
        (LayerGroup("full", 16, None, (TensorSpan(0, 12288, 8192, 5),)),
         LayerGroup("window", 4, 64, (TensorSpan(8192, 12288, 4096, 5),)),
         LayerGroup("token", 1, None, (TensorSpan(5 * 12288, 132, 132, 40),))),
    ),
    "target and draft layer": Layout(
        "bfloat16", 32,
        (LayerGroup("full", 16, None, (
            TensorSpan(0, 16384, 16384, 5), TensorSpan(5 * 16384, 16384, 16384, 5),
            TensorSpan(10 * 16384, 4096, 4096, 5))),),
    ),
    "odd sizes everywhere": Layout(
        "int8", 8,
        (LayerGroup("full", 2, None, (
            TensorSpan(3, 119, 117, 9), TensorSpan(1203, 33, 31, 9))),),
    ),
}  # fmt: skip
"""Layouts that engines really have, small."""

MEMORY_BYTES = 1 << 20


def chunk_blocks(layout: Layout, seed: int) -> Blocks:
    """Distinct block IDs for one chunk in every group, in random order."""
    random = np.random.default_rng(seed)
    return tuple(
        (i, packed(*random.permutation(group.num_blocks())[: layout.blocks_per_chunk(i)]))
        for i, group in enumerate(layout.groups)
    )


def places(layout: Layout, blocks: Blocks) -> list[tuple[int, int]]:
    """(offset, bytes) of each block in canonical order: the definition, block by block."""
    found = []
    for group, ids in blocks:
        for span in layout.groups[group].tensors:
            for block in np.frombuffer(ids, "<u4").tolist():
                offset = span.offset_bytes + block * span.block_stride_bytes
                found.append((-1 if block == NULL_BLOCK else offset, span.block_bytes))
    return found


class PagesContract:
    """What every Pages does. Fixture ``make_paged``: Layout -> PagedBench of MEMORY_BYTES."""

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_gather_is_byte_equal_to_the_definition(
        self, make_paged: Callable[[Layout], PagedBench], name: str
    ) -> None:
        """Field cases 32 and 36: whatever the layout, sizes come from the registered strides
        only."""
        layout = LAYOUTS[name]
        bench, blocks = make_paged(layout), chunk_blocks(layout, 1)
        image = bench.image()
        wanted = np.concatenate([image[a : a + n] for a, n in places(layout, blocks)])
        out = np.zeros_like(wanted)
        bench.pages.gather(blocks, out)
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(bench.image(), image)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_scatter_writes_its_blocks_and_nothing_else(
        self, make_paged: Callable[[Layout], PagedBench], name: str
    ) -> None:
        """Field cases 32 and 36: the blocks hold the chunk; every byte beside them is as before."""
        layout = LAYOUTS[name]
        bench, blocks = make_paged(layout), chunk_blocks(layout, 2)
        wanted, start = bench.image(), 0
        source = pattern(3, sum(n for _, n in places(layout, blocks)))
        for offset, nbytes in places(layout, blocks):
            wanted[offset : offset + nbytes] = source[start : start + nbytes]
            start += nbytes
        bench.pages.scatter(blocks, source)
        np.testing.assert_array_equal(bench.image(), wanted)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_scatter_skips_null_blocks(
        self, make_paged: Callable[[Layout], PagedBench], name: str
    ) -> None:
        """Blocks that slid out of a window are named NULL_BLOCK: their bytes go nowhere."""
        layout = LAYOUTS[name]
        bench = make_paged(layout)
        blocks = tuple((g, packed(NULL_BLOCK) + ids[4:]) for g, ids in chunk_blocks(layout, 4))
        wanted, start = bench.image(), 0
        source = pattern(5, sum(n for _, n in places(layout, blocks)))
        for offset, nbytes in places(layout, blocks):
            if offset >= 0:
                wanted[offset : offset + nbytes] = source[start : start + nbytes]
            start += nbytes
        bench.pages.scatter(blocks, source)
        np.testing.assert_array_equal(bench.image(), wanted)

    def test_refusals_come_before_the_first_byte(
        self, make_paged: Callable[[Layout], PagedBench]
    ) -> None:
        """A block out of range, a group out of order, a count or size that doesn't fit: nothing
        moves, although earlier groups were fine."""
        layout = LAYOUTS["full, window and single tokens"]
        bench, good = make_paged(layout), chunk_blocks(layout, 6)
        image, size = bench.image(), sum(n for _, n in places(layout, good))
        bad = [
            ((*good[:2], (2, packed(*range(1, 16), 40))), size),
            ((*good[:2], (2, good[2][1][:-4])), size - 132),
            ((*good[:2], (2, good[2][1][:-1])), size),
            ((good[1], good[0], good[2]), size),
            ((*good[:2], (3, packed(0))), size),
            (good, size - 1),
            (good, size + 1),
        ]
        for blocks, nbytes in bad:
            with pytest.raises(LayoutMismatchError):
                bench.pages.scatter(blocks, pattern(7, nbytes))
            with pytest.raises(LayoutMismatchError):
                bench.pages.gather(blocks, np.zeros(nbytes, np.uint8))
        np.testing.assert_array_equal(bench.image(), image)

    def test_gather_refuses_null_block(self, make_paged: Callable[[Layout], PagedBench]) -> None:
        """There are no bytes to store where a block slid out."""
        bench = make_paged(LAYOUTS["one tensor"])
        out = np.zeros(8192, np.uint8)
        with pytest.raises(LayoutMismatchError, match="NULL_BLOCK"):
            bench.pages.gather(((0, packed(NULL_BLOCK)),), out)
        assert not out.any()
