"""Requests that end before they have done what they began, and engines that do nothing at all."""

from __future__ import annotations

import itertools

from kvstore import Shard
from kvstore.core.messages import (
    Done,
    EngineState,
    HitStatus,
    Lookup,
    LookupReply,
    Register,
    Release,
    Reply,
    Request,
)
from tests.core.driver import MODEL, Driver, limits
from tests.faults.conftest import StartEngine, StartNode
from tests.link_rig import eventually
from tests.small_engine import WAIT_S, SmallEngine, tokens

CYCLES = 250
CHUNKS = 4
PROMPTS = 7
STATES = ("before lookup", "looked up", "loading", "loaded", "storing")


def abort(engine: SmallEngine, state: str, cancel_first: bool, number: int) -> int:
    """Bring a request to a state and end it there: the transfer cancelled before the request is
    released, or after. The end comes twice, as engines repeat it. Tells the hit."""
    fresh = state == "storing"
    keys = engine.keys(tokens(CHUNKS, 100 + number if fresh else number % PROMPTS))
    request, ticket, hit = f"r{number}", None, 0
    if state != "before lookup":
        hit = engine.worker.lookup(request, keys).chunks
        if fresh:
            engine.fill(keys)
            ticket = engine.worker.store(request, keys, engine.blocks(keys))
        elif state != "looked up":
            ticket = engine.worker.retrieve(request, keys[:hit], engine.blocks(keys[:hit]))
    if ticket is not None and state == "loaded":
        outcome = ticket.wait(WAIT_S)
        assert outcome is not None
        assert all(outcome.done)
        assert engine.right_chunks(keys[:hit]) == hit
    for _ in range(2):
        if ticket is not None and cancel_first:
            ticket.cancel()
        engine.worker.release(request)
        if ticket is not None:
            ticket.cancel()
    assert ticket is None or ticket.wait(WAIT_S) is not None
    return hit


def put(engine: SmallEngine, seed: int) -> None:
    """Store a whole prompt."""
    keys = engine.keys(tokens(CHUNKS, seed))
    engine.fill(keys)
    assert engine.store(keys).leading_chunks == CHUNKS


def test_requests_aborted_in_every_state_leave_nothing(
    start_node: StartNode, start_engine: StartEngine
) -> None:
    """Field case 47: requests on prompts of which the host holds a part end in each state, in both
    orders of the hooks. In the end no lease, pin, Move or ticket is left, and every place can be
    had."""
    node = start_node(4 * CHUNKS, 16 * CHUNKS)
    engine = start_engine(node, CHUNKS)
    for seed in range(PROMPTS):
        put(engine, seed)
        node.rest()
    ways = itertools.cycle(itertools.product(STATES, (True, False)))
    hits = 0
    for number, (state, cancel_first) in zip(range(CYCLES), ways, strict=False):
        hits += abort(engine, state, cancel_first, number)
    assert hits > CYCLES
    eventually(lambda: node.stats().leases == 0)
    node.rest()
    figures = node.stats()
    assert figures.sessions == 1
    assert figures.tiers[0].pinned == figures.tiers[1].pinned == 0
    assert engine.worker.state().open_tickets == 0
    for seed in range(4):
        put(engine, 10_000 + seed)
    for seed in range(4):
        fresh = engine.keys(tokens(CHUNKS, 10_000 + seed))
        assert engine.hits(fresh) == CHUNKS
        assert engine.retrieve(fresh).leading_chunks == CHUNKS
        assert engine.right_chunks(fresh) == CHUNKS


def test_ten_thousand_lookups_without_a_load_leave_no_lease() -> None:
    """Field case 46: requests look up and end without loading; half of them never say so."""
    driver = Driver(limits(host_slots=4))
    engine = driver.engine()
    keys = engine.chain(4)
    engine.put(keys)
    for number in range(10_000):
        request = f"r{number}"
        for message in (Lookup(request, keys.data), *[Release(request)] * (number % 2)):
            event = Request(engine.scheduler, 100 + 2 * number, message)
            (reply,) = driver.service.handle(event, driver.now)
            assert isinstance(reply, Reply)
            assert reply.body in (LookupReply(HitStatus.HIT, 4), Done())
    driver.tick()
    assert driver.stats().leases == 5_000
    driver.tick(61.0)
    for _ in range(5_000):
        if driver.stats().leases:
            driver.tick()
    assert driver.stats().leases == 0
    assert driver.tier().pinned == 0
    assert engine.put(engine.chain(4, seed=1)) == bytes([1] * 4)


def test_ranks_that_do_nothing_for_an_hour_stay_registered() -> None:
    """Field case 34: eight ranks that hold the same KV (MLA), only rank 0 ever stores. Nobody is
    deregistered for being idle; a rank whose connection breaks registers again under its name."""
    driver = Driver(limits(host_slots=64))
    shards = tuple(Shard(tp_rank=rank, tp_size=8, replicas=8) for rank in range(8))
    engine = driver.engine(shards=shards)
    for minute in range(60):
        assert engine.store(engine.chain(1, seed=minute)) > 0
        driver.run()
        driver.tick(60.0)
    assert driver.stats().engines[0].ranks_registered == 8
    assert engine.peek(engine.chain(1, seed=59)) == 1
    driver.close(engine.workers[3])
    assert not driver.stats().engines[0].ready
    again = driver.session()
    state = driver.ask(again, Register("e1", "t1", MODEL, engine.layout, shards[3]))
    assert isinstance(state, EngineState)
    assert state.ready
    assert engine.peek(engine.chain(1, seed=59)) == 1
