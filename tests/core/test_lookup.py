"""Service: who may ask what, lookups and identity, and the numbers it keeps."""

from __future__ import annotations

import random

import pytest

from kvstore.core.errors import InvariantError
from kvstore.core.keys import (
    NO_PARENT,
    Adapter,
    ContentItem,
    KeyContext,
    Namespace,
    prefix_keys,
)
from kvstore.core.layout import Shard
from kvstore.core.messages import (
    ADMIN,
    Cancel,
    HitStatus,
    Lookup,
    LookupReply,
    MoveID,
    MoveKind,
    MoveStatus,
    Refused,
    Release,
    Retrieve,
    SessionID,
    Store,
    TierName,
)
from kvstore.core.messages import Moved as MovedEvent
from tests.core.driver import BLOCK_BYTES, MODEL, Driver, block_ids, layout, limits

TWO_RANKS = (Shard(tp_rank=0, tp_size=2), Shard(tp_rank=1, tp_size=2))

# ---------------------------------------------------------------- who may ask what


@pytest.mark.parametrize(
    "message",
    [Lookup("r", b""), Release("r"), Cancel(1), Store("r", b"", 0, NO_PARENT, ())],
    ids=["lookup", "release", "cancel", "store"],
)
def test_a_session_that_never_registered_is_refused(message: Lookup) -> None:
    """Everything but register and attach needs an engine."""
    driver = Driver(limits())
    assert isinstance(driver.ask(SessionID(9), message), Refused)


def test_a_scheduler_has_no_memory_to_store_or_retrieve() -> None:
    """Store and retrieve are a worker's."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(1)
    store = Store("r", keys.data, 0, keys.parent, (block_ids(1),))
    assert isinstance(driver.ask(engine.scheduler, store), Refused)
    retrieve = Retrieve("r", keys.data, (block_ids(1),))
    assert isinstance(driver.ask(engine.scheduler, retrieve), Refused)


def test_a_moved_that_nobody_asked_for_stops_the_daemon() -> None:
    """A Move that isn't running can't end: that is a bug, not an outcome."""
    driver = Driver(limits())
    driver.engine()
    with pytest.raises(InvariantError):
        driver.service.handle(MovedEvent(MoveID(77), MoveStatus.OK), 1.0)


def test_a_transfers_number_that_is_in_use_is_refused_and_harms_nobody() -> None:
    """A broken client sends a second store under the number of one in flight. Whatever it is told,
    the first transfer ends as it should, and the loss of the session leaves nothing behind."""
    driver = Driver(limits(copy_depth=1))
    engine, other = driver.engine("e1"), driver.engine("e2")
    other.store(other.chain(1, 9))
    number = engine.store(engine.chain(1))
    driver._requests = number - 1
    engine.store(engine.chain(1, 1))
    driver.close(engine.workers[0])
    driver.run()
    assert driver.detached == [engine.workers[0]]
    assert driver.service.idle()


# ---------------------------------------------------------------- lookup and identity


def test_lookup_is_answered_at_once_and_moves_nothing() -> None:
    """Directory only: hit, miss, and the leading part of a longer chain."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(2, shared=2))
    before = len(driver.handed_out)
    body = driver.ask(engine.scheduler, Lookup("r", engine.chain(4, shared=2).data))
    assert body == LookupReply(HitStatus.HIT, 2)
    body = driver.ask(engine.scheduler, Lookup("r", engine.chain(4, seed=3).data))
    assert body == LookupReply(HitStatus.MISS, 0)
    assert driver.ask(engine.scheduler, Lookup("r", b"")) == LookupReply(HitStatus.MISS, 0)
    assert len(driver.handed_out) == before


def test_a_chunk_that_one_rank_lacks_cuts_the_hit_for_all() -> None:
    """Field case 30: four ranks store 16 chunks, chunk 9 fails for rank 2: the lookup says 9, and
    every rank loads exactly 9."""
    driver = Driver(limits(host_slots=64))
    engine = driver.engine(shards=[Shard(tp_rank=rank, tp_size=4) for rank in range(4)])
    keys = engine.chain(16)
    for rank in range(4):
        engine.store(keys, rank)
    while driver.moves:
        header = driver.moves[0].header
        bad = header.shard == 2 and header.key == keys[9]
        driver.end(driver.moves[0], MoveStatus.FAILED if bad else MoveStatus.OK)
    assert engine.lookup(keys) == 9
    for rank in range(4):
        assert engine.get(keys[:9], rank) == bytes([1] * 9)


def test_adapters_items_and_salts_keep_requests_apart() -> None:
    """Field cases 4 and 7: what was stored under one adapter, image or salt is a miss under another
    one and without."""
    driver = Driver(limits())
    engine = driver.engine()
    tokens = [7] * 32
    contexts = [
        None,
        KeyContext(adapter=Adapter("lora", "d1")),
        KeyContext(adapter=Adapter("lora", "d2")),
        KeyContext(salt="s"),
        KeyContext(items=(ContentItem("image A", 0, 8),)),
    ]
    chains = [prefix_keys(engine.digest, 16, tokens, context) for context in contexts]
    engine.put(chains[1])
    assert [engine.peek(keys) for keys in chains] == [0, 2, 0, 0, 0]
    late = KeyContext(items=(ContentItem("image B", 16, 8),))
    engine.put(prefix_keys(engine.digest, 16, tokens, late))
    assert engine.peek(chains[0]) == 1


def test_another_dtype_revision_or_format_is_another_namespace() -> None:
    """Field cases 11 and 12: the same tokens, model and shape, but one thing differs: no hit, and
    not by luck of the digest: even the first engine's own keys miss there."""
    driver = Driver(limits())
    engine = driver.engine("e1")
    engine.put(engine.chain(2))
    others = [
        driver.engine("e2", shape=layout(dtype="float16")),
        driver.engine("e3", namespace=Namespace(MODEL.model, "r2", MODEL.format)),
        driver.engine("e4", namespace=Namespace(MODEL.model, "r1", "test/other")),
        driver.engine("e5", tenant="t2"),
    ]
    for other in others:
        assert other.peek(other.chain(2)) == 0
        assert other.peek(engine.chain(2)) == 0
        assert other.get(engine.chain(2)) == b"\0\0"
    assert driver.engine("e6").peek(engine.chain(2)) == 2


# ---------------------------------------------------------------- stats


def test_stats_add_up() -> None:
    """Six chunks stored, two refused, four looked up of six, two retrieved."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(6))
    engine.lookup(engine.chain(6))
    engine.lookup(engine.chain(6))
    engine.get(engine.chain(2))
    stats = driver.stats()
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (1, 96, 64)
    assert (stats.stored_chunks, stats.retrieved_chunks) == (4, 2)
    assert (stats.store.count, stats.retrieve.count) == (1, 1)
    assert stats.drops == {"host_full": 2}
    assert (stats.sessions, stats.leases) == (2, 1)
    assert (stats.moves_in_flight, stats.moves_queued, stats.write_backlog) == (0, 0, 0)
    host = driver.tier()
    assert (host.slots_used, host.slots_total, host.chunks) == (4, 4, 4)
    assert (host.bytes_used, host.bytes_total) == (4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert (host.hits, host.misses, host.evictions, host.pinned) == (4, 2, 0, 0)
    (space,) = stats.spaces
    assert (space.tenant, space.model, space.epoch, space.chunks) == ("t1", "org/model", 0, 4)
    (told,) = stats.engines
    assert (told.engine, told.ready, told.ranks_registered, told.ranks) == ("e1", True, 1, 1)
    assert told.sessions == 2
    assert [tier.name for tier in stats.tiers] == [TierName.HOST.value]


def test_stats_count_what_is_under_way() -> None:
    """Three chunks with a depth of two: two Moves in the hands, one queued, their slots pinned."""
    driver = Driver(limits(copy_depth=2))
    engine = driver.engine()
    engine.store(engine.chain(3))
    stats = driver.stats()
    assert (stats.moves_in_flight, stats.moves_queued) == (2, 1)
    assert driver.tier().pinned == 3
    assert not driver.service.idle()
    driver.run()
    assert driver.service.idle()
    assert ADMIN not in driver.detached


def test_no_session_ever_gets_anothers_chunks_from_a_small_host_and_a_large_disk() -> None:
    """Field case 24: the host keeps 4 chunks, the disk 100. Ten engines of ten tenants store and
    retrieve prompts of the same tokens, their Moves interleaved and out of order. Every LOAD reads
    bytes that its own tenant stored under its own key (the driver compares at each Move)."""
    driver = Driver(limits(host_slots=4, nvme_slots=100, copy_depth=3, read_depth=3))
    driver.scanned()
    engines = [driver.engine(f"e{number}", tenant=f"t{number}") for number in range(10)]
    rng = random.Random(24)
    for step in range(150):
        engine = engines[step % 10]
        keys = engine.chain(1 + step % 2, step // 10 % 3)
        engine.store(keys, request=f"s{step}")
        engine.retrieve(keys, request=f"r{step}")
        for _ in range(3):
            if driver.moves:
                driver.end(rng.choice(driver.moves))
    driver.run()
    loads = [move for move in driver.handed_out if move.kind is MoveKind.LOAD]
    owners = {engine.workers[0]: engine.tenant for engine in engines}
    assert len(loads) > 50
    assert all(move.session and owners[move.session] == move.header.tenant for move in loads)
    assert driver.count(MoveKind.READ) > 10
