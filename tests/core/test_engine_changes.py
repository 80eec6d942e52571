"""Engines that change: lost workers, successors, new revisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core import spaces
from kvstore.core.keys import Namespace
from kvstore.core.layout import Layout, Shard
from kvstore.core.messages import (
    Attach,
    EngineState,
    Refused,
    Register,
    SessionID,
    SetRevision,
)
from tests.core.driver import MODEL, Driver, layout, limits


def register(
    driver: Driver,
    shard: Shard,
    shape: Layout | None = None,
    namespace: Namespace = MODEL,
    tenant: str = "t1",
) -> tuple[SessionID, EngineState | Refused]:
    """Register a worker of engine "e1" on a new session."""
    session = driver.session()
    body = driver.ask(session, Register("e1", tenant, namespace, shape or layout(), shard))
    assert isinstance(body, EngineState | Refused)
    return session, body


def refusal(body: EngineState | Refused) -> str:
    """The reason, which is one line."""
    assert isinstance(body, Refused), body
    assert "\n" not in body.reason
    return body.reason


def pushes(driver: Driver, session: SessionID) -> list[EngineState]:
    """What a session was told without asking."""
    return [body for body in driver.answers(session, 0) if isinstance(body, EngineState)]


# ---------------------------------------------------------------- losing a worker


def test_losing_a_worker_makes_the_engine_unready_and_tells_the_others() -> None:
    """Rank 1 of 2 is lost: rank 0 and the scheduler are told, once; lookups miss from then on."""
    driver = Driver(limits())
    engine = driver.engine(shards=[Shard(0, 2), Shard(1, 2)])
    engine.put(engine.chain(1))
    driver.close(engine.workers[1])
    for session in (engine.workers[0], engine.scheduler):
        last = pushes(driver, session)[-1]
        assert (last.ready, last.namespace) == (False, b"")
    assert engine.lookup(engine.chain(1)) == 0


def test_a_new_worker_takes_the_place_and_the_hits_are_back() -> None:
    """Field case 53, the core's part: it registers the same rank: ready, the same namespace, and
    what was stored is a hit."""
    driver = Driver(limits())
    engine = driver.engine(shards=[Shard(0, 2), Shard(1, 2)])
    engine.put(engine.chain(1))
    driver.close(engine.workers[1])
    _, state = register(driver, Shard(1, 2))
    assert isinstance(state, EngineState)
    assert state.namespace == engine.digest
    assert pushes(driver, engine.scheduler)[-1] == state
    assert engine.lookup(engine.chain(1)) == 1


def test_a_rank_is_taken_until_the_last_move_of_its_lost_session_has_ended() -> None:
    """The lost worker's memory is still being read: its successor is refused, "try again", and is
    welcome after the Moved."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.store(engine.chain(1))
    driver.close(engine.workers[0])
    session, body = register(driver, Shard())
    assert "try again" in refusal(body)
    driver.run()
    state = driver.ask(session, Register("e1", "t1", MODEL, layout(), Shard()))
    assert isinstance(state, EngineState)
    assert state.ready


def test_an_engine_is_not_ready_while_a_lost_worker_is_still_there() -> None:
    """Rank 0 is lost with a Move running, rank 1 registers anew: that isn't the whole engine."""
    driver = Driver(limits())
    engine = driver.engine(shards=[Shard(0, 2), Shard(1, 2)])
    engine.store(engine.chain(1))
    driver.close(engine.workers[1])
    driver.close(engine.workers[0])
    _, body = register(driver, Shard(1, 2))
    assert isinstance(body, EngineState)
    assert not body.ready
    driver.run()
    _, body = register(driver, Shard(0, 2))
    assert isinstance(body, EngineState)
    assert body.ready


def test_an_engine_without_workers_may_come_back_as_another() -> None:
    """The scheduler stays attached; the new workers have another model: nothing of the old shape
    stands in their way."""
    driver = Driver(limits())
    engine = driver.engine(shards=[Shard(0, 2), Shard(1, 2)])
    for worker in engine.workers:
        driver.close(worker)
    other = replace(MODEL, model="org/other")
    _, state = register(driver, Shard(), layout(2), other)
    assert isinstance(state, EngineState)
    assert (state.ready, state.tokens_per_chunk) == (True, 32)
    assert pushes(driver, engine.scheduler)[-1] == state


def test_an_engine_is_forgotten_with_its_last_session() -> None:
    """Nothing of it stays."""
    driver = Driver(limits())
    engine = driver.engine()
    driver.close(engine.scheduler)
    driver.close(engine.workers[0])
    assert driver.stats().engines == ()
    assert driver.stats().sessions == 0


# ---------------------------------------------------------------- revisions


def test_a_new_revision_is_a_new_namespace_and_all_are_told() -> None:
    """Field case 12: stored under r1; after set_revision(r2) the same tokens miss; back at r1 they
    hit again."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(2))
    old = engine.digest
    state = driver.ask(engine.workers[0], SetRevision("r2"))
    assert isinstance(state, EngineState)
    assert state.namespace not in (old, b"")
    assert pushes(driver, engine.scheduler)[-1] == state
    engine.digest = state.namespace
    assert engine.peek(engine.chain(2)) == 0
    driver.ask(engine.workers[0], SetRevision("r1"))
    engine.digest = old
    assert engine.peek(engine.chain(2)) == 2


def test_every_worker_may_say_the_same_revision() -> None:
    """Two ranks update their weights one after the other: the second changes nothing, and nobody
    is told twice."""
    driver = Driver(limits())
    engine = driver.engine(shards=[Shard(0, 2), Shard(1, 2)])
    first = driver.ask(engine.workers[0], SetRevision("r2"))
    told = len(pushes(driver, engine.scheduler))
    assert driver.ask(engine.workers[1], SetRevision("r2")) == first
    assert len(pushes(driver, engine.scheduler)) == told


def test_a_revision_without_a_worker_is_refused() -> None:
    """There is no namespace that it could change."""
    driver = Driver(limits())
    session = driver.session()
    driver.ask(session, Attach("e1", "t1"))
    assert isinstance(driver.ask(session, SetRevision("r2")), Refused)


def test_a_revision_that_is_refused_leaves_the_engine_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No namespace can be added: the engine goes on under the old revision, ready and with its
    hits, as the refusal says nothing else."""
    driver = Driver(limits())
    engine = driver.engine()
    engine.put(engine.chain(1))
    monkeypatch.setattr(spaces, "SPACES_MAX", 1)
    assert isinstance(driver.ask(engine.workers[0], SetRevision("r2")), Refused)
    (stats,) = driver.stats().engines
    assert stats.ready
    assert engine.peek(engine.chain(1)) == 1


def test_the_alias_is_no_part_of_the_identity() -> None:
    """Field case 110, the core's part: another alias, the same namespace; stats show the last
    one."""
    driver = Driver(limits())
    one = driver.engine("e1", namespace=replace(MODEL, alias="first"))
    two = driver.engine("e2", namespace=replace(MODEL, alias="second"))
    assert one.digest == two.digest
    one.put(one.chain(1))
    assert two.peek(two.chain(1)) == 1
    (space,) = driver.stats().spaces
    assert (space.model, space.alias) == (MODEL.model, "second")
    assert [record.alias for record in driver.persists[-1].spaces] == ["second"]


def test_a_store_in_flight_ends_in_the_revision_it_began_in() -> None:
    """The weights change while two chunks are on their way: they are kept under the old revision,
    whose keys they have, and are no hit under the new one."""
    driver = Driver(limits())
    engine = driver.engine()
    keys = engine.chain(2)
    number = engine.store(keys)
    driver.ask(engine.workers[0], SetRevision("r2"))
    driver.run()
    assert driver.completed(engine.workers[0], number).done == b"\1\1"
    assert engine.peek(keys) == 0
    driver.ask(engine.workers[0], SetRevision("r1"))
    assert engine.peek(keys) == 2
