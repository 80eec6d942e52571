"""Hybrid models: full parts keep every token, window parts serve the last tokens of a hit only.

All layouts here have 16 tokens a chunk, one full block and one window block a chunk, 4 KiB each.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core import room
from kvstore.core.layout import NULL_BLOCK, Part, Shard
from kvstore.core.messages import Lookup, MoveKind, MoveStatus, TierName
from tests.core.driver import Driver, Engine, block_ids, layout, limits

NULL = NULL_BLOCK.to_bytes(4, "little")
NVME = TierName.NVME


def ready(window: int = 16, host_slots: int = 16, **settings: Any) -> tuple[Driver, Engine]:
    """A driver and an engine with a window of so many tokens."""
    driver = Driver(limits(host_slots=host_slots, **settings))
    if settings.get("nvme_slots"):
        driver.scanned()
    return driver, driver.engine(shape=layout(window=window))


def slid(chunks: int, kept: int) -> bytes:
    """The window group's blocks of a request whose window has slid past all but the last."""
    return NULL * (chunks - kept) + block_ids(kept, start=40)


def put(engine: Engine, chunks: int, kept: int, seed: int = 0) -> bytes:
    """Store a prompt of which the engine has the last ``kept`` window blocks only."""
    number = engine.store(engine.chain(chunks, seed), window=slid(chunks, kept))
    engine.driver.run()
    return engine.driver.completed(engine.workers[0], number).done


# ---------------------------------------------------------------- storing


def test_a_store_moves_both_parts_of_each_chunk() -> None:
    """Two chunks, two parts each, in slots of their own, each with its own group's blocks."""
    driver, engine = ready()
    engine.store(engine.chain(2), full=block_ids(2, start=10), window=block_ids(2, start=20))
    moved = {(m.header.key, m.header.part): m.blocks for m in driver.moves}
    keys = engine.chain(2)
    assert moved[keys[1], Part.FULL] == ((0, block_ids(1, start=11)),)
    assert moved[keys[1], Part.WINDOW] == ((1, block_ids(1, start=21)),)
    assert len({move.target for move in driver.moves}) == len(moved) == 4


def test_null_window_blocks_are_skipped_and_never_read() -> None:
    """Field case 35: the window has slid past three of four chunks: their full parts are kept,
    their window parts aren't; all four are acknowledged."""
    driver, engine = ready()
    assert put(engine, 4, kept=1) == b"\1\1\1\1"
    windows = [m for m in driver.handed_out if m.header.part is Part.WINDOW]
    assert [m.blocks for m in windows] == [((1, block_ids(1, start=40)),)]
    assert driver.stats().drops == {}


def test_a_null_full_block_ends_the_batch_though_its_window_block_is_there() -> None:
    """Without its full part a chunk is nothing."""
    driver, engine = ready()
    number = engine.store(engine.chain(2), full=block_ids(1) + NULL)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\0"
    assert driver.count(MoveKind.STORE) == 2


def test_a_failed_window_part_fails_the_chunk_in_the_mask_but_keeps_its_full_part() -> None:
    """The acknowledgement says that not everything was kept; a hit ending there isn't given, a
    longer one may be."""
    driver, engine = ready()
    number = engine.store(engine.chain(2))
    bad = next(m for m in driver.moves if m.header.part is Part.WINDOW and m.header.depth == 0)
    driver.end(bad, MoveStatus.FAILED)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\0\1"
    assert engine.peek(engine.chain(1)) == 0
    assert engine.peek(engine.chain(2)) == 2


def test_the_window_part_comes_with_a_later_store() -> None:
    """First stored when its window had slid on, then again by a request that ends there."""
    driver, engine = ready()
    put(engine, 4, kept=1)
    assert engine.peek(engine.chain(2)) == 0
    put(engine, 2, kept=1)
    assert engine.peek(engine.chain(2)) == 2
    assert sum(m.header.part is Part.FULL for m in driver.handed_out) == 4


# ---------------------------------------------------------------- lookup steps down


@pytest.mark.parametrize(
    ("window", "kept", "answers"),
    [
        (1, 0, [1, 2, 3, 4]),
        (16, 1, [0, 0, 0, 4]),
        (17, 1, [0, 0, 0, 4]),
        (18, 1, [0, 0, 0, 0]),
        (18, 2, [0, 0, 0, 4]),
        (33, 2, [0, 0, 0, 4]),
        (33, 3, [0, 0, 3, 4]),
        (33, 4, [1, 2, 3, 4]),
        (1000, 3, [0, 0, 0, 0]),
        (1000, 4, [1, 2, 3, 4]),
    ],
)
def test_a_hit_needs_the_window_parts_of_its_last_chunks(
    window: int, kept: int, answers: list[int]
) -> None:
    """Field case 35: of four chunks the last ``kept`` have window parts. A hit of n needs those of
    the last ceil((window - 1) / 16) chunks before n; where they aren't there the lookup steps down,
    to none in the end."""
    _, engine = ready(window)
    put(engine, 4, kept)
    assert [engine.peek(engine.chain(4)[:asked]) for asked in range(1, 5)] == answers


def test_a_lookup_steps_down_to_the_longest_hit_that_has_its_windows() -> None:
    """Six chunks, window parts of 0, 1, 2 and 5: with two needed, 6 isn't there and 3 is."""
    _, engine = ready(33)
    put(engine, 3, kept=3)
    put(engine, 6, kept=1)
    assert engine.peek(engine.chain(6)) == 3


def test_a_run_of_window_parts_begins_anew_below_a_gap() -> None:
    """Four chunks, window parts of 1 and 3 only, two needed: 4 lacks that of 2, 2 lacks that of 0;
    the two that are there don't make a pair."""
    _, engine = ready(33)
    put(engine, 2, kept=1)
    put(engine, 4, kept=1)
    assert engine.peek(engine.chain(4)) == 0


def test_a_longer_window_group_counts_for_all() -> None:
    """The widest window decides: the layout tells two chunks for 33 tokens."""
    _, engine = ready(33)
    assert engine.layout.window_chunks() == 2
    assert layout(window=1).window_chunks() == 0
    assert layout().window_chunks() == 0


# ---------------------------------------------------------------- retrieving


def test_a_retrieve_loads_the_window_of_the_last_chunks_only() -> None:
    """Field case 35: the engine gives null blocks for what its window has slid past: the full parts
    of all and the last window part are loaded."""
    driver, engine = ready()
    put(engine, 4, kept=1)
    number = engine.retrieve(engine.chain(4), window=slid(4, 1))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1\1"
    loads = [m for m in driver.handed_out if m.kind is MoveKind.LOAD]
    assert sum(m.header.part is Part.FULL for m in loads) == 4
    windows = [m for m in loads if m.header.part is Part.WINDOW]
    assert [m.blocks for m in windows] == [((1, block_ids(1, start=40)),)]


def test_a_retrieve_of_a_window_part_that_is_not_there_stops_at_its_chunk() -> None:
    """The engine asks for the window of chunk 1, which was never stored: chunk 1 isn't done, and
    none of its parts is loaded."""
    driver, engine = ready()
    put(engine, 4, kept=1)
    number = engine.retrieve(engine.chain(4), window=NULL + block_ids(3))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\0\0\0"
    assert driver.count(MoveKind.LOAD) == 1


def test_parts_come_from_whichever_tier_has_them() -> None:
    """The host keeps the full parts and has given up the window part, which NVMe has: one READ."""
    driver, engine = ready(host_slots=4, nvme_slots=16)
    put(engine, 2, kept=1)
    put(engine, 2, kept=0, seed=1)
    assert driver.tier().chunks == 4
    assert engine.lookup(engine.chain(2)) == 2
    driver.handed_out.clear()
    number = engine.retrieve(engine.chain(2), window=slid(2, 1))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    assert [m.header.part for m in driver.handed_out if m.kind is MoveKind.READ] == [Part.WINDOW]


def test_a_failed_read_of_a_window_part_steps_the_lease_down() -> None:
    """The lookup promised four; the window part of chunk 3 is bad on NVMe: the same lookup answers
    what still has its windows, here 2, not 3."""
    driver, engine = ready(host_slots=6, nvme_slots=16)
    put(engine, 2, kept=1)
    number = engine.store(engine.chain(4)[2:], window=NULL + block_ids(1))
    driver.run()
    for seed in range(1, 7):
        put(engine, 1, kept=0, seed=seed)
    assert engine.lookup(engine.chain(4)) == 4
    number = engine.retrieve(engine.chain(4), window=slid(4, 1))
    bad = next(m for m in driver.moves if m.header.part is Part.WINDOW)
    driver.end(bad, MoveStatus.CORRUPT)
    driver.run()
    assert driver.completed(engine.workers[0], number).done[3] == 0
    assert engine.lookup(engine.chain(4)) == 2


def test_a_failed_load_steps_a_lease_down_to_a_hit_that_has_its_windows() -> None:
    """Four were promised, the LOAD of chunk 3's window part fails: three would need the window part
    of chunk 2, which was never stored; so the answer is 2."""
    driver, engine = ready()
    put(engine, 2, kept=1)
    engine.store(engine.chain(4)[2:], window=NULL + block_ids(1))
    driver.run()
    assert engine.lookup(engine.chain(4)) == 4
    engine.retrieve(engine.chain(4), window=slid(4, 1))
    while driver.moves:
        bad = driver.moves[0].header.part is Part.WINDOW
        driver.end(driver.moves[0], MoveStatus.FAILED if bad else MoveStatus.OK)
    assert engine.lookup(engine.chain(4)) == 2


# ---------------------------------------------------------------- keeping


def test_a_lease_keeps_the_window_parts_that_its_hit_needs() -> None:
    """A hit of three with two window parts needed is leased: a fill may take the window part of
    chunk 0, and no other; the answer stays."""
    driver, engine = ready(33, host_slots=6)
    put(engine, 3, kept=3)
    assert engine.lookup(engine.chain(3)) == 3
    assert put(engine, 6, kept=0, seed=1).count(1) == 1
    assert engine.lookup(engine.chain(3)) == 3
    number = engine.retrieve(engine.chain(3), window=slid(3, 2))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1"
    engine.release()
    assert put(engine, 6, kept=0, seed=2).count(1) == 6


def test_a_lease_that_stepped_down_keeps_the_window_parts_of_the_shorter_hit() -> None:
    """Four were promised; chunk 3's window part fails to load, and two is the answer. A fill may
    take what it likes but the window part of chunk 1: the answer stays two, nor does it rise when
    chunk 2 gets its window part."""
    driver, engine = ready(host_slots=8)
    put(engine, 2, kept=1)
    engine.store(engine.chain(4)[2:], window=NULL + block_ids(1))
    driver.run()
    assert engine.lookup(engine.chain(4)) == 4
    engine.retrieve(engine.chain(4), window=slid(4, 1))
    while driver.moves:
        bad = driver.moves[0].header.part is Part.WINDOW
        driver.end(driver.moves[0], MoveStatus.FAILED if bad else MoveStatus.OK)
    assert engine.lookup(engine.chain(4)) == 2
    assert put(engine, 6, kept=0, seed=1).count(1) < 6
    assert engine.lookup(engine.chain(4)) == 2
    engine.store(engine.chain(4)[:3], window=slid(3, 1))
    driver.run()
    assert engine.lookup(engine.chain(4)) == 2


def test_window_parts_leave_first_and_the_chunks_stay_useful_to_longer_prompts() -> None:
    """Two prompts fill the host; the third takes the window parts of the first two: their full
    parts stay, and a prompt that continues one hits them with its own windows."""
    _, engine = ready(host_slots=8)
    put(engine, 2, kept=2)
    put(engine, 2, kept=2, seed=1)
    put(engine, 4, kept=0, seed=2)
    assert engine.peek(engine.chain(2)) == 0
    put(engine, 2, kept=0)
    assert engine.driver.tier().chunks == 8


def test_two_ranks_need_both_their_window_parts() -> None:
    """Rank 1's window part fails: the hit steps down for both."""
    driver = Driver(limits(host_slots=16))
    engine = driver.engine(shape=layout(window=16), shards=(Shard(0, 2), Shard(1, 2)))
    for rank in (0, 1):
        engine.store(engine.chain(2), rank)
    while driver.moves:
        header = driver.moves[0].header
        bad = (header.shard, header.part, header.depth) == (1, Part.WINDOW, 1)
        driver.end(driver.moves[0], MoveStatus.FAILED if bad else MoveStatus.OK)
    assert engine.peek(engine.chain(2)) == 1
    assert engine.get(engine.chain(1), 1) == b"\1"


def test_window_parts_are_written_to_nvme_after_their_chunk() -> None:
    """Both parts of each chunk reach NVMe, and come back as a hit of two without the host."""
    driver, engine = ready(host_slots=4, nvme_slots=16)
    put(engine, 2, kept=2)
    writes = [m.header for m in driver.handed_out if m.kind is MoveKind.WRITE]
    assert [(h.depth, h.part) for h in writes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    put(engine, 4, kept=0, seed=1)
    assert engine.peek(engine.chain(2)) == 2
    number = engine.retrieve(engine.chain(2), window=slid(2, 1))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"


def test_a_model_of_windows_only_keeps_everything_in_one_part() -> None:
    """Without a full group there is nothing to step down to: one part, every token."""
    plain = layout(window=16)
    windows_only = type(plain)(plain.dtype, plain.tokens_per_chunk, plain.groups[1:])
    assert windows_only.part_bytes(Part.WINDOW) == 0
    driver = Driver(limits())
    engine = driver.engine(shape=windows_only)
    assert engine.put(engine.chain(2)) == b"\1\1"
    assert engine.peek(engine.chain(2)) == 2
    assert engine.peek(engine.chain(1)) == 1
    assert driver.tier().slots_used == 2


# ---------------------------------------------------------------- a full tier


def test_a_prompt_stored_in_several_requests_keeps_its_newest_windows() -> None:
    """Twelve old chunks without window parts fill most of sixteen places; a prompt of four chunks
    comes in four requests. Its windows of a moment ago don't leave for its next chunk: the oldest
    chunks do, and all of it hits."""
    driver, engine = ready(33)
    for seed in range(1, 4):
        assert put(engine, 4, kept=0, seed=seed) == b"\1\1\1\1"
    keys = engine.chain(4)
    for chunk in range(4):
        assert engine.put(keys[chunk : chunk + 1]) == b"\1"
        assert engine.peek(keys[: chunk + 1]) == chunk + 1
    assert (driver.tier().evictions, driver.tier().chunks) == (4, 12)


def test_no_window_part_is_refused_while_room_is_still_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven of ten chunks are leased and come up first; four looks an event find the first chunk
    that may leave with the last look of the second event. The WINDOW part of a chunk whose FULL
    part is on its way waits for the next event rather than being refused."""
    monkeypatch.setattr(room, "STEP_COPIES", 4)
    driver, engine = ready(window=1, host_slots=10)
    for seed in range(1, 11):
        put(engine, 1, kept=0, seed=seed)
    for seed in range(1, 8):
        driver.send(engine.workers[0], Lookup(f"r{seed}", engine.chain(1, seed).data))
    number = engine.store(engine.chain(1))
    waited = False
    while driver.service.next_tick_s(driver.now) == 0.0:
        waited = waited or len(driver.moves) == 1
        driver.tick()
    assert waited, "both parts were begun in one event: this tests nothing"
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1"
    assert driver.drops("host_full") == 0
    assert engine.peek(engine.chain(1)) == 1
