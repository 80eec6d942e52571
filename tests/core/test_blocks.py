"""Blocks of a request: checked against the layout, cut by chunk and part, null blocks."""

from __future__ import annotations

import struct

import pytest

from kvstore.core import blocks as core_blocks
from kvstore.core.blocks import ChunkBlocks, check_blocks
from kvstore.core.layout import NULL_BLOCK, LayerGroup, Layout, Part, TensorSpan
from kvstore.core.messages import Refused
from tests.core.driver import BLOCKS, Driver, block_ids, limits

TWO = Layout(
    "float32",
    32,
    (
        LayerGroup("full", 16, None, (TensorSpan(0, 64, 64, 100),)),
        LayerGroup("window", 32, 32, (TensorSpan(6400, 64, 64, 10), TensorSpan(7040, 64, 64, 8))),
    ),
)
"""Two full blocks and one window block a chunk; the window group's smallest tensor has 8 blocks."""


def packed(*ids: int) -> bytes:
    """Packed block IDs."""
    return struct.pack(f"<{len(ids)}I", *ids)


def checked(chunks: int, *blocks: bytes) -> ChunkBlocks:
    """Blocks that pass the check."""
    found = check_blocks(TWO, chunks, blocks)
    assert isinstance(found, ChunkBlocks), found
    return found


def test_blocks_are_cut_by_chunk_and_part_in_token_order() -> None:
    """Chunk 1 of three has full blocks 2 and 3 and window block 1 of the lists."""
    blocks = checked(3, packed(9, 8, 7, 6, 5, 4), packed(3, 2, 1))
    assert blocks.of(Part.FULL, 1) == ((0, packed(7, 6)),)
    assert blocks.of(Part.WINDOW, 1) == ((1, packed(2)),)
    assert blocks.of(Part.FULL, 0) == ((0, packed(9, 8)),)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ((packed(1, 2),), ("1 groups", "has 2", "full, window")),
        ((packed(1), packed(1)), ("'full'", "1 block IDs", "need 2")),
        ((packed(1, 2), packed(1, 2)), ("'window'", "2 block IDs", "need 1")),
        ((packed(1, 2)[:-1], packed(1)), ("'full'", "1.75", "need 2")),
        ((packed(1, 100), packed(1)), ("'full'", "block ID 100", "0..99")),
        ((packed(1, 99), packed(8)), ("'window'", "block ID 8", "0..7")),
        ((packed(NULL_BLOCK, NULL_BLOCK - 1), packed(1)), ("'full'", str(NULL_BLOCK - 1))),
    ],
    ids=["groups", "too-few", "too-many", "torn", "id", "smallest-tensor", "beside-null"],
)
def test_blocks_that_do_not_fit_are_named_in_one_line(
    blocks: tuple[bytes, ...], words: tuple[str, ...]
) -> None:
    """The line says which group, what it has, and what is valid: nothing outside the memory is
    ever touched."""
    reason = check_blocks(TWO, 1, blocks)
    assert isinstance(reason, str)
    assert "\n" not in reason
    for word in words:
        assert word in reason


def test_null_blocks_are_known_by_chunk_and_part() -> None:
    """Field case 35: the window has slid past chunk 0, half past nothing else; a full chunk with
    one null block is not whole."""
    blocks = checked(2, packed(1, NULL_BLOCK, 2, 3), packed(NULL_BLOCK, 4))
    assert blocks.any_null(Part.FULL, 0)
    assert not blocks.all_null(Part.FULL, 0)
    assert not blocks.any_null(Part.FULL, 1)
    assert blocks.all_null(Part.WINDOW, 0)
    assert not blocks.any_null(Part.WINDOW, 1)
    assert not blocks.all_null(Part.WINDOW, 1)


def test_a_block_id_whose_bytes_only_look_null_across_two_ids_is_none() -> None:
    """0xFFFF0000 and 0x0000FFFF side by side hold eight 0xF digits that are no null block."""
    wide = Layout(
        "float32", 32, (LayerGroup("g", 16, None, (TensorSpan(0, 1, 1, NULL_BLOCK - 1),)),)
    )
    ids = packed(0xFFFF_0000, 0x0000_FFFF) + packed(NULL_BLOCK, 1)
    blocks = check_blocks(wide, 2, (ids,))
    assert isinstance(blocks, ChunkBlocks)
    assert not blocks.any_null(Part.FULL, 0)
    assert blocks.any_null(Part.FULL, 1)


def test_a_part_without_groups_is_all_null() -> None:
    """A model without windows has nothing to move for WINDOW."""
    plain = Layout("float32", 16, (LayerGroup("g", 16, None, (TensorSpan(0, 1, 1, 4),)),))
    blocks = check_blocks(plain, 1, (packed(3),))
    assert isinstance(blocks, ChunkBlocks)
    assert blocks.all_null(Part.WINDOW, 0)
    assert not blocks.all_null(Part.FULL, 0)


def test_no_chunks_need_no_blocks() -> None:
    """An empty batch is whole; one with blocks and no chunks is refused."""
    checked(0, b"", b"")
    assert isinstance(check_blocks(TWO, 0, (packed(1), b"")), str)


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_block_ids_of_a_long_request_are_checked_as_its_chunks_are_begun(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Eight IDs an event: of a request of 200 chunks the first eight are checked before anything is
    begun. Chunk 150 names a block that isn't there: what is before it is done, and no Move names
    it; where chunk 5 does, nothing is begun."""
    monkeypatch.setattr(core_blocks, "CHECK_IDS", 8)
    driver = Driver(limits(host_slots=400))
    engine = driver.engine()
    keys = engine.chain(200)
    if verb == "retrieve":
        for first in range(0, 200, 50):
            assert engine.put(keys[first : first + 50]) == b"\1" * 50
    ask = getattr(engine, verb)
    bad = BLOCKS.to_bytes(4, "little")
    number = ask(keys, full=block_ids(150) + bad + block_ids(49))
    while driver.moves or driver.service.next_tick_s(driver.now) == 0.0:
        driver.run()
        driver.tick()
    completed = driver.completed(engine.workers[0], number)
    assert completed.done == b"\1" * 150 + b"\0" * 50
    assert "block ID 4096" in completed.reason
    assert all(bad not in blocks for move in driver.handed_out for _, blocks in move.blocks)
    refused = driver.answer(engine.workers[0], ask(keys, full=block_ids(5) + bad + block_ids(194)))
    assert isinstance(refused, Refused)
