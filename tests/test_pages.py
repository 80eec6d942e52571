"""HostPages beside its contract: how it copies, not only what."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.errors import LayoutMismatchError
from kvstore.core.layout import LayerGroup, Layout, TensorSpan
from kvstore.device.pages import HostPages
from kvstore.device.rows import NumpyRows
from kvstore.testing import chunk_blocks, packed, pattern

Bytes = NDArray[np.uint8]
LAYERS, BLOCKS, BLOCK_BYTES = 4, 64, 65_536


def layered(stride_bytes: int = BLOCK_BYTES, block_bytes: int = BLOCK_BYTES) -> Layout:
    """Layers of one size, one behind the other; chunks of 32 blocks."""
    spans = tuple(
        TensorSpan(i * BLOCKS * stride_bytes, stride_bytes, block_bytes, BLOCKS)
        for i in range(LAYERS)
    )
    return Layout("bfloat16", 512, (LayerGroup("full", 16, None, spans),))


def test_one_copy_call_moves_all_layers() -> None:
    """Field case 81: the pieces of a chunk aren't copied one by one."""
    calls = []

    class Counted(NumpyRows):
        def gather(self, rows: Bytes, index: NDArray[np.intp], out: Bytes) -> None:
            calls.append(len(index))
            super().gather(rows, index, out)

    memory = pattern(0, LAYERS * BLOCKS * BLOCK_BYTES)
    pages = HostPages(memory, layered(), Counted())
    out = np.zeros(LAYERS * 32 * BLOCK_BYTES, np.uint8)
    pages.gather(((0, packed(*range(32))),), out)
    assert calls == [LAYERS * 32]
    np.testing.assert_array_equal(out[:BLOCK_BYTES], memory[:BLOCK_BYTES])


@pytest.mark.parametrize(
    ("stride_bytes", "block_bytes"), [(65_536, 65_536), (69_632, 65_536), (2244, 2112), (119, 117)]
)
def test_copies_allocate_no_copy_of_the_memory(stride_bytes: int, block_bytes: int) -> None:
    """np.take copies an array whole if it isn't contiguous: an engine's 100 GiB, at each chunk."""
    layout = layered(stride_bytes, block_bytes)
    memory = pattern(0, LAYERS * BLOCKS * stride_bytes)
    pages = HostPages(memory, layout)
    blocks, flat = chunk_blocks(layout, 1), np.zeros(LAYERS * 32 * block_bytes, np.uint8)
    pages.gather(blocks, flat)
    tracemalloc.start()
    pages.gather(blocks, flat)
    pages.scatter(blocks, flat)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < flat.nbytes // 4 + 60_000


@pytest.mark.parametrize("stride_bytes", [BLOCK_BYTES, BLOCK_BYTES + 7])
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_copies_give_up_the_interpreter_lock(direction: str, stride_bytes: int) -> None:
    """A copy of 32 MiB would stall the daemon's loop for milliseconds. Nobody takes the lock away
    here; so if this thread runs during the copy, the copy gave it up."""
    layout = Layout(
        "bfloat16", 8192,
        (LayerGroup("full", 16, None, (TensorSpan(0, stride_bytes, BLOCK_BYTES, 600),)),),
    )  # fmt: skip
    pages = HostPages(np.ones(600 * stride_bytes, np.uint8), layout)
    flat = np.ones(512 * BLOCK_BYTES, np.uint8)
    blocks = chunk_blocks(layout, 1)
    copy = pages.gather if direction == "gather" else pages.scatter

    def seen() -> bool:
        started = threading.Event()

        def work() -> None:
            started.set()
            copy(blocks, flat)

        thread = threading.Thread(target=work)
        before = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread.start()
            started.wait()
            return thread.is_alive()
        finally:
            sys.setswitchinterval(before)
            thread.join()

    assert any(seen() for _ in range(5))


def test_threads_copy_side_by_side() -> None:
    """Two sessions' worth of threads gather and scatter distinct blocks of one memory."""
    layout = layered(8192, 8192)
    memory = pattern(0, LAYERS * BLOCKS * 8192)
    pages, image = HostPages(memory, layout), memory.copy()
    errors: list[str] = []

    def work(first: int) -> None:
        blocks = ((0, packed(*range(first, first + 32))),)
        flat = np.zeros(LAYERS * 32 * 8192, np.uint8)
        for _ in range(20):
            pages.gather(blocks, flat)
            kept = flat.copy()
            pages.scatter(blocks, flat ^ 255)
            pages.gather(blocks, flat)
            if not np.array_equal(flat, kept ^ 255):
                errors.append("mixed up")

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    np.testing.assert_array_equal(memory, image)


def test_source_of_another_type_is_refused() -> None:
    """A strided or typed array would be copied behind the scenes, or reinterpreted."""
    layout = layered(8192, 8192)
    pages = HostPages(np.zeros(LAYERS * BLOCKS * 8192, np.uint8), layout)
    blocks, nbytes = chunk_blocks(layout, 1), LAYERS * 32 * 8192
    for flat in (np.zeros(2 * nbytes, np.uint8)[::2], np.zeros(nbytes, np.int8)):
        with pytest.raises(LayoutMismatchError, match="contiguous"):
            pages.gather(blocks, flat)  # type: ignore[arg-type]


def test_error_names_group_block_and_valid_range() -> None:
    layout = layered(8192, 8192)
    pages = HostPages(np.zeros(LAYERS * BLOCKS * 8192, np.uint8), layout)
    flat = np.zeros(LAYERS * 32 * 8192, np.uint8)
    with pytest.raises(LayoutMismatchError, match=r"'full' has no block 64; valid are 0\.\.63"):
        pages.gather(((0, packed(*range(33, 65))),), flat)


def test_blocks_are_those_that_every_tensor_has() -> None:
    """One tensor of a group is shorter: its end is the group's."""
    spans = (TensorSpan(0, 4096, 4096, 4), TensorSpan(16_384, 4096, 4096, 3))
    layout = Layout("uint8", 16, (LayerGroup("full", 16, None, spans),))
    pages = HostPages(np.zeros(7 * 4096, np.uint8), layout)
    pages.gather(((0, packed(2)),), np.zeros(8192, np.uint8))
    with pytest.raises(LayoutMismatchError, match="no block 3"):
        pages.gather(((0, packed(3)),), np.zeros(8192, np.uint8))


def test_a_chunk_of_too_many_rows_is_refused_before_tables_are_made() -> None:
    """Odd offsets cut large blocks into tiny rows: the tables for them would dwarf the memory that
    is registered, so the layout is refused with what to change."""
    span = TensorSpan(0, 65_792, 65_664, 2)
    layout = Layout("uint8", 65_536, (LayerGroup("full", 1, None, (span,)),))
    with pytest.raises(LayoutMismatchError, match=r"rows of 128 bytes; valid are up to"):
        HostPages(np.zeros(2 * 65_792, np.uint8), layout)
