"""Service: store and lookup, step by step."""

from __future__ import annotations

import pytest

from kvstore.core.keys import (
    NO_PARENT,
)
from kvstore.core.layout import NULL_BLOCK, Shard
from kvstore.core.messages import (
    AllMoved,
    Completed,
    Moved,
    MoveKind,
    MoveStatus,
    Refused,
    Retrieve,
    Store,
)
from tests.core.driver import BLOCK_BYTES, Driver, block_ids, limits

TWO_RANKS = (Shard(tp_rank=0, tp_size=2), Shard(tp_rank=1, tp_size=2))


# ---------------------------------------------------------------- a store from start to end


def test_a_store_is_acknowledged_after_its_commit_and_found_then() -> None:
    """Two chunks: while their Moves run, a lookup misses and the store has no answer; with the last
    Moved both come."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    number = engine.store(keys)
    assert [move.kind for move in driver.moves] == [MoveKind.STORE] * 2
    assert engine.peek(keys) == 0
    driver.end(driver.moves[0])
    assert engine.peek(keys) == 1
    assert driver.is_open(engine.workers[0], number)
    driver.end(driver.moves[0])
    assert driver.completed(engine.workers[0], number) == Completed(b"\1\1")
    assert engine.peek(keys) == 2
    assert driver.service.idle()


def test_moves_that_end_together_each_end_as_they_did() -> None:
    """Two engines' stores and a chunk that fails end in one event: each store has its own answer
    then, the failed chunk's children fail with it, and a session that is lost may go."""
    driver = Driver(limits(copy_depth=8))
    one, other = driver.engine("e1"), driver.engine("e2")
    first, second = one.store(one.chain(2)), other.store(other.chain(2, seed=5))
    driver.close(other.workers[0])
    moves, driver.moves = driver.moves, []
    statuses = [MoveStatus.OK, MoveStatus.FAILED, MoveStatus.OK, MoveStatus.OK]
    for move, status in zip(moves, statuses, strict=True):
        driver.media.end(move, status)
    ended = zip(moves, statuses, strict=True)
    driver.event(AllMoved(tuple(Moved(move.id, status) for move, status in ended)))
    assert driver.completed(one.workers[0], first).done == b"\1\0"
    assert driver.is_open(other.workers[0], second)
    assert driver.detached == [other.workers[0]]
    assert one.peek(one.chain(2)) == 1
    assert driver.service.idle()


def test_a_store_move_says_what_to_gather_and_where_to() -> None:
    """Each STORE names its chunk, its parent, its depth, its own blocks and a place of its own."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(3)[1:]
    engine.put(engine.chain(1))
    engine.store(keys, full=block_ids(2, start=70))
    first, second = driver.moves
    assert (first.header.key, first.header.parent) == (keys[0], keys.parent)
    assert (second.header.parent, second.header.depth) == (keys[0], 2)
    assert first.blocks == ((0, block_ids(1, start=70)),)
    assert second.blocks == ((0, block_ids(1, start=71)),)
    assert first.source is None
    assert first.session == engine.workers[0]
    assert first.header.payload_bytes == BLOCK_BYTES
    assert first.target != second.target


def test_moves_that_end_backwards_are_acknowledged_in_the_end() -> None:
    """The last chunk lands first: nothing is visible before the head, everything after it."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(3)
    number = engine.store(keys)
    for move in reversed(driver.moves[1:]):
        driver.end(move)
        assert engine.peek(keys) == 0
        assert driver.is_open(engine.workers[0], number)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1"
    assert engine.peek(keys) == 3


def test_a_store_of_nothing_completes_at_once() -> None:
    """No keys, no Moves, an empty mask."""
    driver = Driver(limits())
    engine = driver.engine()
    number = engine.store(engine.chain(0))
    assert driver.completed(engine.workers[0], number) == Completed(b"")


def test_what_is_there_already_is_not_moved_again() -> None:
    """Field case 85: a chunk that is READY costs a second store nothing but a use."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(2))
    number = engine.store(engine.chain(3))
    assert len(driver.moves) == 1
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1\1"
    assert driver.count(MoveKind.STORE) == 3


def test_one_chunk_stored_by_four_engines_at_once_is_moved_once() -> None:
    """Field case 85: ten stores of four engines; one STORE Move, ten acknowledgements, none before
    the commit."""
    driver = Driver(limits())
    engines = [driver.engine(f"e{number}") for number in range(4)]
    keys = engines[0].chain(1)
    asked = [(engine, engine.store(keys)) for engine in engines * 3][:10]
    assert len(driver.moves) == 1
    assert all(driver.is_open(engine.workers[0], number) for engine, number in asked)
    driver.run()
    assert driver.count(MoveKind.STORE) == 1
    for engine, number in asked:
        assert driver.completed(engine.workers[0], number).done == b"\1"


def test_a_failed_move_fails_all_who_joined_it_and_a_retry_works() -> None:
    """Field case 21: two engines wait for one write; it fails; both are told, the chunk is a miss,
    and the next store of either one keeps it."""
    driver = Driver(limits())
    one, two = driver.engine("e1"), driver.engine("e2")
    keys = one.chain(1)
    first, second = one.store(keys), two.store(keys)
    driver.end(driver.moves[0], MoveStatus.FAILED)
    assert driver.completed(one.workers[0], first).done == b"\0"
    assert driver.completed(two.workers[0], second).done == b"\0"
    assert driver.drops("store_failed") == 1
    assert one.peek(keys) == 0
    assert two.put(keys) == b"\1"
    assert one.peek(keys) == 1


def test_a_failure_in_the_middle_keeps_the_leading_part() -> None:
    """Field case 21: chunk 2 of 4 fails after 3 and 4 have landed: lookup = 1, the mask says which,
    a retry of the rest works."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(4)
    number = engine.store(keys)
    first, second, third, fourth = driver.moves
    for move in (fourth, third, first):
        driver.end(move)
    driver.end(second, MoveStatus.FAILED)
    assert driver.completed(engine.workers[0], number).done == b"\1\0\0\0"
    assert engine.peek(keys) == 1
    assert driver.tier().slots_used == 1
    assert engine.put(keys[1:]) == b"\1\1\1"
    assert engine.peek(keys) == 4


def test_six_stores_of_one_request_are_tracked_one_by_one() -> None:
    """Field case 37: six steps store a chunk each for one request, their Moves end in another
    order: each is acknowledged by itself, and all chunks are there."""
    driver = Driver(limits(host_slots=6, copy_depth=6))
    engine = driver.engine()
    keys = engine.chain(6)
    numbers = [engine.store(keys[step : step + 1]) for step in range(6)]
    done = []
    for place in (0, 2, 1, 5, 4, 3):
        driver.end(next(m for m in driver.moves if m.header.key == keys[place]))
        done.append(sum(not driver.is_open(engine.workers[0], number) for number in numbers))
    assert done == [1, 1, 3, 3, 3, 6]
    assert engine.peek(keys) == 6


# ---------------------------------------------------------------- what isn't kept


def test_a_batch_that_does_not_fit_keeps_its_leading_part() -> None:
    """Six chunks into four slots: four are kept, two refused with the reason, and counted."""
    driver = Driver(limits())
    engine = driver.engine()
    number = engine.store(engine.chain(6))
    driver.run()
    completed = driver.completed(engine.workers[0], number)
    assert completed.done == b"\1\1\1\1\0\0"
    assert "host_full" in completed.reason
    assert driver.drops("host_full") == 2
    assert engine.peek(engine.chain(6)) == 4


def test_a_store_below_a_parent_that_is_not_there_is_refused() -> None:
    """Chunks 2 and 3 without 0 and 1: no hit could ever reach them."""
    driver = Driver(limits())
    engine = driver.engine()
    number = engine.store(engine.chain(4)[2:])
    completed = driver.completed(engine.workers[0], number)
    assert completed.done == b"\0\0"
    assert driver.drops("parent_missing") == 2
    assert driver.tier().slots_used == 0


@pytest.mark.parametrize("first", [0, 2, 7])
def test_a_store_whose_depth_does_not_follow_its_parents_is_refused(first: int) -> None:
    """A client counts wrong: chunk 1 as the ``first``-th below chunk 0. Kept, it would be an orphan
    at the next start."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    engine.put(keys[:1])
    message = Store("r", keys[1:].data, first, keys[0], (block_ids(1),))
    number = driver.send(engine.workers[0], message)
    driver.run()
    body = driver.answer(engine.workers[0], number)
    assert isinstance(body, Refused) or body == Completed(b"\0", reason="not kept: parent_missing")
    assert driver.tier().slots_used == 1


def test_a_root_with_a_parent_and_a_child_without_one_are_refused() -> None:
    """``first`` and ``parent`` must agree: the header on disk names the parent."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    for first, parent in ((0, keys[0]), (1, NO_PARENT)):
        message = Store("r", keys[1:].data, first, parent, (block_ids(1),))
        assert isinstance(driver.ask(engine.workers[0], message), Refused)
    assert driver.service.idle()


def test_a_chunk_with_a_null_block_ends_the_batch() -> None:
    """Field case 35: blocks that the engine has given up hold nobody's tokens: they are never
    read."""
    driver = Driver(limits())
    engine = driver.engine()
    blocks = block_ids(1) + NULL_BLOCK.to_bytes(4, "little") + block_ids(1)
    number = engine.store(engine.chain(3), full=blocks)
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\0\0"
    assert driver.drops("null_block") == 2
    assert driver.count(MoveKind.STORE) == 1


@pytest.mark.parametrize("verb", [Store, Retrieve])
def test_block_ids_outside_the_memory_are_refused_in_one_line(
    verb: type[Store] | type[Retrieve],
) -> None:
    """The last block ID is one too high: refused with the valid range, nothing is moved, and the
    session's bytes in flight are none."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(2))
    keys, blocks = engine.chain(2), (block_ids(2, start=4095),)
    message = (
        Store("r", keys.data, 0, keys.parent, blocks)
        if verb is Store
        else Retrieve("r", keys.data, blocks)
    )
    body = driver.ask(engine.workers[0], message)
    assert isinstance(body, Refused)
    assert "4096" in body.reason
    assert "0..4095" in body.reason
    assert not driver.moves
    assert driver.service.idle()


def test_bytes_in_flight_per_session_are_limited() -> None:
    """Room for two chunks in flight: the third is refused at once, another session's is not, and
    after the acknowledgement there is room again."""
    driver = Driver(limits(session_bytes_max=2 * BLOCK_BYTES))
    engine, other = driver.engine("e1"), driver.engine("e2")
    first = engine.store(engine.chain(2))
    refused = engine.store(engine.chain(1, 1))
    completed = driver.completed(engine.workers[0], refused)
    assert completed.done == b"\0"
    assert str(2 * BLOCK_BYTES) in completed.reason
    assert driver.drops("session_limit") == 1
    other.store(other.chain(1, 2))
    driver.run()
    assert not driver.is_open(engine.workers[0], first)
    assert engine.put(engine.chain(2, 3)) == b"\1\1"


def test_a_store_larger_than_the_limit_passes_when_nothing_else_is_in_flight() -> None:
    """A batch of three chunks with a limit of one is not refused for ever."""
    driver = Driver(limits(session_bytes_max=BLOCK_BYTES))
    engine = driver.engine()
    assert engine.put(engine.chain(3)) == b"\1\1\1"


def test_an_engine_that_is_not_ready_stores_nothing_and_hits_nothing() -> None:
    """Its second rank is lost: a store completes at once with nothing done, lookups miss."""
    driver = Driver(limits())
    engine = driver.engine(shards=TWO_RANKS)
    keys = engine.chain(1)
    engine.put(keys)
    driver.close(engine.workers[1])
    assert engine.lookup(keys) == 0
    number = engine.store(engine.chain(2, 1))
    completed = driver.completed(engine.workers[0], number)
    assert completed.done == b"\0\0"
    assert "ready" in completed.reason
    assert driver.drops("engine_not_ready") == 2
    assert engine.get(keys) == b"\0"
