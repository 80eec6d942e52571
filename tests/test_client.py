"""The public client at a scripted server: what it asks, what it answers, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator

import pytest

import kvstore
from kvstore import (
    Client,
    HitStatus,
    LayerGroup,
    Layout,
    LayoutMismatchError,
    SessionLostError,
    Shard,
    TensorSpan,
    TransferOutcome,
)
from kvstore.core.messages import (
    Attach,
    Cancel,
    Completed,
    Effect,
    EngineState,
    Lookup,
    LookupReply,
    Refused,
    Register,
    Release,
    Reply,
    Request,
    Retrieve,
    SessionID,
    Store,
)
from tests.client_rig import BLOCKS, Engine, keys_of
from tests.link_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    DIGEST,
    SPACE,
    Rig,
    eventually,
    layout,
    running_rig,
)


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


def test_importing_kvstore_needs_neither_numpy_nor_grpc() -> None:
    """An engine's process pays for what it uses only."""
    script = (
        "import kvstore, sys; print([m for m in ('numpy', 'torch', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_everything_public_is_exported() -> None:
    """The names that users write."""
    for name in ("Client", "Namespace", "Layout", "LayerGroup", "TensorSpan", "TokenRows", "Shard",
                 "HostMemory", "CudaMemory", "KVStoreError"):  # fmt: skip
        assert name in kvstore.__all__
    assert all(hasattr(kvstore, name) for name in kvstore.__all__)


def test_a_worker_registers_what_it_was_given(rig: Rig, engine: Engine) -> None:
    """The core learns of namespace, layout and shard as the engine described them."""
    state = engine.worker.state()
    assert (state.connected, state.ready, state.tokens_per_chunk) == (True, True, CHUNK_TOKENS)
    assert state.namespace == DIGEST
    (request,) = rig.core.requests(Register)
    assert isinstance(request.message, Register)
    assert request.message.namespace == SPACE
    assert request.message.layout == layout()
    assert request.message.shard == Shard()


def test_keys_depend_on_everything_that_they_are_given(engine: Engine) -> None:
    """Salt, adapter and items change the keys; the incremental hasher gives the same ones."""
    session = engine.scheduler
    tokens = list(range(3 * CHUNK_TOKENS + 5))
    plain = session.keys(tokens)
    assert len(plain) == 3
    assert plain.num_tokens == len(tokens)
    others = (
        session.keys(tokens, salt="s"),
        session.keys(tokens, adapter=kvstore.Adapter("a", "d")),
        session.keys(tokens, items=[kvstore.ContentItem("i", 1, 2)]),
    )
    assert len({plain.data, *(keys.data for keys in others)}) == 4
    hasher = session.hasher()
    assert hasher.keys(tokens[:CHUNK_TOKENS]) == plain[:1]
    assert hasher.keys(tokens) == plain


def test_keys_are_empty_until_the_engine_is_ready(rig: Rig, engine: Engine) -> None:
    """A scheduler attaches before the workers: no keys, a miss without a message; the push of
    readiness changes that with the next call."""
    unready = EngineState("e1", False, b"", 0)
    rig.core.answers[Attach] = lambda event: [Reply(event.session, event.id, unready)]
    session = engine.scheduler
    tokens = list(range(CHUNK_TOKENS))
    hasher = session.hasher()
    assert len(session.keys(tokens)) == len(hasher.keys(tokens)) == 0
    assert session.lookup("r", keys_of(1)).status is HitStatus.MISS
    assert not session.wait_ready(0.0)
    assert rig.core.requests(Lookup) == []
    rig.emit(Reply(SessionID(1), 0, EngineState("e1", True, DIGEST, CHUNK_TOKENS)))
    assert session.wait_ready(DEADLINE_S)
    assert len(session.keys(tokens)) == len(hasher.keys(tokens)) == 1
    assert session.lookup("r", keys_of(1)).status is HitStatus.HIT
    rig.emit(Reply(SessionID(1), 0, unready))
    eventually(lambda: len(session.keys(tokens)) == 0)


@pytest.mark.parametrize(
    ("found", "num_tokens", "tokens"),
    [(0, 32, 0), (1, 32, 16), (2, 33, 32), (2, 32, 31), (1, 1, 0), (9, 40, 32)],
)
def test_a_hit_never_saves_the_last_token(
    rig: Rig, engine: Engine, found: int, num_tokens: int, tokens: int
) -> None:
    """At most len-1 tokens, never a negative number, and never more chunks than were asked."""
    rig.core.answers[Lookup] = lambda event: [
        Reply(event.session, event.id, LookupReply(HitStatus(min(found, 1)), found))
    ]
    keys = kvstore.ChunkKeys(keys_of(2).data, CHUNK_TOKENS, num_tokens)
    result = engine.scheduler.lookup("r", keys)
    assert result.tokens == tokens
    assert result.chunks == min(found, 2)
    assert result.status is (HitStatus.HIT if found else HitStatus.MISS)


def test_a_refused_lookup_is_a_miss(rig: Rig, engine: Engine) -> None:
    """Whatever the daemon refuses, the engine computes."""
    rig.core.answers[Lookup] = lambda event: [Reply(event.session, event.id, Refused("no"))]
    assert engine.scheduler.lookup("r", keys_of(1)).status is HitStatus.MISS


def test_release_is_sent_and_never_waited_for(rig: Rig, engine: Engine) -> None:
    """The end of a request costs the engine one send."""
    engine.scheduler.release("r")
    eventually(lambda: len(rig.core.requests(Release)) == 1)


def test_a_store_names_its_place_in_the_chain(rig: Rig, engine: Engine) -> None:
    """A slice of keys is stored below the key before it, with its blocks in order."""
    keys = keys_of(3)
    ticket = engine.worker.store("r", keys[1:3], {"full": [9, 8, 7, 6, 5, 4, 3, 2]})
    eventually(lambda: len(rig.core.requests(Store)) == 1)
    message = rig.core.requests(Store)[0].message
    assert isinstance(message, Store)
    assert (message.first, message.parent, message.keys) == (1, keys[0], keys.data[32:])
    assert array("I", message.blocks[0]).tolist() == [9, 8, 7, 6, 5, 4, 3, 2]
    assert not ticket.done()
    rig.complete([1, 1])
    outcome = ticket.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.done == (True, True)
    assert outcome.leading_chunks == 2
    assert outcome.failed_blocks == {}


def test_an_outcome_names_the_blocks_of_what_failed_and_leaves_null_ones_out(rig: Rig) -> None:
    """Two groups, the second a window whose first block has slid out: chunk 1 of 2 failed."""
    groups = (
        LayerGroup("full", 8, None, (TensorSpan(0, 64, 64, 16),)),
        LayerGroup("window", 8, 64, (TensorSpan(1024, 64, 64, 16),)),
    )
    shape = Layout("float16", CHUNK_TOKENS, groups)
    with Engine(rig.path) as engine:
        worker = engine.client.register("e", SPACE, shape, engine.memory.describe(), Shard())
        blocks: dict[str, list[int | None]] = {"window": [None, 1, None, 3], "full": [4, 5, 6, 7]}
        ticket = worker.retrieve("r", keys_of(2), blocks)
        rig.complete([1, 0], reason="a checksum failed")
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (True, False)
        assert outcome.leading_chunks == 1
        assert outcome.failed_blocks == {"full": (6, 7), "window": (3,)}
        assert outcome.reason == "a checksum failed"
        message = rig.core.requests(Retrieve)[0].message
        assert isinstance(message, Retrieve)
        assert array("I", message.blocks[1]).tolist() == [0xFFFFFFFF, 1, 0xFFFFFFFF, 3]
        worker.store("r", keys_of(2), blocks)
        with pytest.raises(LayoutMismatchError, match="null blocks"):
            worker.store("r", keys_of(2), {"window": [0, 1, 2, 3], "full": [None, 5, 6, 7]})


def test_a_mask_that_is_too_short_counts_as_not_done(rig: Rig, engine: Engine) -> None:
    """Never taken for done what the daemon didn't say is."""
    ticket = engine.worker.store("r", keys_of(2), {"full": list(range(8))})
    rig.complete([1])
    outcome = ticket.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.done == (True, False)


def test_a_refused_transfer_is_an_outcome(rig: Rig, engine: Engine) -> None:
    """The daemon refuses a store: the ticket ends at once with the reason."""
    rig.core.answers[Store] = lambda event: [Reply(event.session, event.id, Refused("too much"))]
    outcome = engine.worker.store("r", keys_of(1), BLOCKS).wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.done == (False,)
    assert outcome.failed_blocks == {"full": (0, 1, 2, 3)}
    assert outcome.reason == "too much"


def test_a_wait_that_times_out_leaves_the_ticket_open(rig: Rig, engine: Engine) -> None:
    """A timer never gives blocks back; the outcome that comes later does."""
    ticket = engine.worker.store("r", keys_of(1), BLOCKS)
    assert ticket.wait(0.0) is None
    assert ticket.wait(0.01) is None
    assert ticket.outcome() is None
    assert engine.worker.state().open_tickets == 1
    rig.complete([1])
    eventually(ticket.done)
    outcome = ticket.outcome()
    assert outcome is not None
    assert outcome.done == (True,)
    assert ticket.wait(0.0) is outcome


def test_a_cancel_is_over_when_it_is_acknowledged_and_not_before(rig: Rig, engine: Engine) -> None:
    """cancel() asks; the blocks come back with the daemon's completion (field case 39, in
    part)."""
    held: list[Reply] = []

    def late(event: Request) -> list[Effect]:
        assert isinstance(event.message, Cancel)
        held.append(Reply(event.session, event.message.transfer, Completed(b"\0", cancelled=True)))
        return []

    rig.core.answers[Cancel] = late
    ticket = engine.worker.retrieve("r", keys_of(1), BLOCKS)
    ticket.cancel()
    eventually(lambda: len(held) == 1)
    assert ticket.wait(0.01) is None
    assert not ticket.done()
    rig.emit(*held)
    outcome = ticket.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.cancelled
    assert outcome.failed_blocks == {"full": (0, 1, 2, 3)}
    ticket.cancel()


def test_an_empty_transfer_ends_at_once(engine: Engine) -> None:
    """Nothing to store is nothing to wait for."""
    ticket = engine.worker.store("r", keys_of(0), {"full": []})
    assert ticket.done()
    outcome = ticket.wait(0.0)
    assert outcome is not None
    assert outcome.done == ()


def test_threads_share_a_session_and_get_their_own_answers(rig: Rig, engine: Engine) -> None:
    """One thread polls for all: lookups of many threads, and a wait that lasts through them."""

    def as_many_as_its_name(event: Request) -> list[Effect]:
        assert isinstance(event.message, Lookup)
        found = LookupReply(HitStatus.HIT, int(event.message.request))
        return [Reply(event.session, event.id, found)]

    rig.core.answers[Lookup] = as_many_as_its_name
    worker, wrong = engine.worker, []
    ticket = worker.store("r", keys_of(1), BLOCKS)

    def ask(number: int) -> None:
        for _ in range(200):
            if worker.lookup(str(number), keys_of(8)).chunks != number:
                wrong.append(number)

    waiting = threading.Thread(target=lambda: ticket.wait(DEADLINE_S))
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 7)]
    for thread in (waiting, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not ticket.settled
    rig.complete([1])
    waiting.join(DEADLINE_S)
    assert ticket.settled


def test_a_closed_client_says_so_and_its_sessions_miss(rig: Rig) -> None:
    """close() may be called again and again; what comes after is a miss or an error of use."""
    with Engine(rig.path) as engine:
        worker = engine.worker
        worker.close()
        worker.close()
        assert worker.lookup("r", keys_of(1)).status is HitStatus.MISS
        ticket = worker.store("r", keys_of(1), BLOCKS)
        assert ticket.done()
        assert not worker.state().connected
        engine.client.close()
        engine.client.close()
        with pytest.raises(SessionLostError, match="closed"):
            engine.client.attach("e1")
    eventually(lambda: rig.server.stats().sessions == ())


def test_sessions_are_context_managers(rig: Rig) -> None:
    """A script's ``with`` ends the session."""
    with Client(rig.path) as client, client.attach("e1") as session:
        assert session.lookup("r", keys_of(1)).status is HitStatus.HIT
    eventually(lambda: rig.server.stats().sessions == ())


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_a_wait_may_be_as_long_as_one_likes(rig: Rig, engine: Engine, timeout_s: float) -> None:
    """A caller that wants to wait for ever says so with a large number, and sleeps meanwhile."""
    ticket = engine.worker.store("r", keys_of(1), BLOCKS)
    outcomes: list[TransferOutcome | None] = []
    waiting = threading.Thread(target=lambda: outcomes.append(ticket.wait(timeout_s)))
    waiting.start()
    link = engine.worker._line.link()
    assert link is not None
    eventually(lambda: link.channel._polling or not waiting.is_alive())
    rig.complete([1])
    waiting.join(DEADLINE_S)
    assert outcomes == [ticket.outcome()]
    assert outcomes[0] is not None
