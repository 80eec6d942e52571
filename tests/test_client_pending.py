"""Lookups whose answer comes as a push: what the client says meanwhile, and when it asks again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvstore.client_session as client_session
from kvstore import HitStatus
from kvstore.core.messages import Effect, Lookup, LookupReply, Reply, Request
from tests.client_rig import Engine, keys_of
from tests.link_rig import Rig, eventually, running_rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


@pytest.fixture
def engine(rig: Rig) -> Iterator[Engine]:
    """An engine at the running server."""
    with Engine(rig.path) as engine:
        yield engine


def test_a_pending_lookup_is_answered_from_memory_until_its_push_has_come(
    rig: Rig, engine: Engine
) -> None:
    """While a remote probe is out the client asks nothing again; once the answer came it asks for
    the hit. Other keys of the request ask at once."""
    pending = LookupReply(HitStatus.PENDING, 0)
    rig.core.answers[Lookup] = lambda event: [Reply(event.session, event.id, pending)]
    session = engine.scheduler
    for _ in range(5):
        assert session.lookup("r", keys_of(2)).status is HitStatus.PENDING
    (asked,) = rig.core.requests(Lookup)
    del rig.core.answers[Lookup]
    assert session.lookup("other", keys_of(2)).chunks == 2
    rig.emit(Reply(asked.session, asked.id, LookupReply(HitStatus.HIT, 1)))
    eventually(lambda: session.lookup("r", keys_of(2)).status is HitStatus.HIT)
    assert len(rig.core.requests(Lookup)) == 3


def test_an_answer_that_comes_together_with_pending_is_asked_for_at_once(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe may be quicker than the client reads: PENDING and the push that ends it lie in the
    socket together, and the lookup isn't pending for ever."""

    monkeypatch.setattr(client_session, "PENDING_MAX_S", 600.0)

    def both(event: Request) -> list[Effect]:
        statuses = (HitStatus.PENDING, 0), (HitStatus.HIT, 1)
        return [Reply(event.session, event.id, LookupReply(*status)) for status in statuses]

    rig.core.answers[Lookup] = both
    assert engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.PENDING
    del rig.core.answers[Lookup]
    eventually(lambda: engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.HIT)


def test_a_pending_lookup_that_ends_with_a_miss_isnt_asked_again(rig: Rig, engine: Engine) -> None:
    """The push says it; a daemon that no longer remembers would let it wait again, and so on."""
    pending = LookupReply(HitStatus.PENDING, 0)
    rig.core.answers[Lookup] = lambda event: [Reply(event.session, event.id, pending)]
    assert engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.PENDING
    (asked,) = rig.core.requests(Lookup)
    rig.emit(Reply(asked.session, asked.id, LookupReply(HitStatus.MISS, 0)))
    eventually(lambda: engine.scheduler.lookup("r", keys_of(2)).status is not HitStatus.PENDING)
    assert len(rig.core.requests(Lookup)) == 1
    assert engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.PENDING
    assert len(rig.core.requests(Lookup)) == 2


def test_a_pending_lookup_whose_push_never_comes_is_asked_again(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is stopped owes the push for ever; the engine isn't kept waiting for it."""
    monkeypatch.setattr(client_session, "PENDING_MAX_S", 0.05)
    pending = LookupReply(HitStatus.PENDING, 0)
    rig.core.answers[Lookup] = lambda event: [Reply(event.session, event.id, pending)]
    assert engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.PENDING
    del rig.core.answers[Lookup]
    eventually(lambda: engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.HIT)
