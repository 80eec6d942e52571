"""Engines: ranks, replicas, readiness, refusals in one line, revisions, lost workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core import spaces
from kvstore.core.keys import Namespace
from kvstore.core.layout import LayerGroup, Layout, Shard, TensorSpan
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    Attach,
    Cause,
    EngineState,
    Refused,
    Register,
    SessionID,
)
from tests.core.driver import BLOCK_BYTES, MODEL, Driver, Engine, layout, limits

GRID = Shard(tp_size=2, pp_size=2)


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


def refusal(body: EngineState | Refused, cause: Cause = Cause.LAYOUT) -> str:
    """The reason, which is one line; it was refused for this cause."""
    assert isinstance(body, Refused), body
    assert body.cause is cause
    assert "\n" not in body.reason
    return body.reason


def pushes(driver: Driver, session: SessionID) -> list[EngineState]:
    """What a session was told without asking."""
    return [body for body in driver.answers(session, 0) if isinstance(body, EngineState)]


# ---------------------------------------------------------------- ready


def test_an_engine_is_ready_with_its_last_rank() -> None:
    """2 x 2 ranks register in any order: each is told that the engine isn't ready, the last one
    that it is, and then all others are told so, with the same namespace."""
    driver = Driver(limits())
    sessions = []
    for pp_rank, tp_rank in ((1, 1), (0, 0), (1, 0)):
        session, body = register(driver, replace(GRID, pp_rank=pp_rank, tp_rank=tp_rank))
        sessions.append(session)
        assert isinstance(body, EngineState)
        assert (body.ready, body.namespace, body.tokens_per_chunk) == (False, b"", 16)
    _, last = register(driver, replace(GRID, pp_rank=0, tp_rank=1))
    assert isinstance(last, EngineState)
    assert last.ready
    assert len(last.namespace) == 32
    assert [pushes(driver, session) for session in sessions] == [[last]] * 3
    (stats,) = driver.stats().engines
    assert (stats.ready, stats.ranks_registered, stats.ranks) == (True, 4, 4)


def test_a_2x2_engine_stores_four_shards_a_chunk() -> None:
    """Each rank's part is a shard of its own; the chunk is a hit with the fourth."""
    driver = Driver(limits())
    shards = [replace(GRID, pp_rank=pp, tp_rank=tp) for pp in range(2) for tp in range(2)]
    engine = driver.engine(shards=shards)
    keys = engine.chain(1)
    for rank in range(4):
        assert engine.peek(keys) == 0
        engine.store(keys, rank)
        driver.run()
    assert engine.peek(keys) == 1
    assert driver.tier().slots_used == 4
    assert sorted(move.header.shard for move in driver.handed_out) == [0, 1, 2, 3]


def test_replicas_are_stored_once_and_must_all_be_there() -> None:
    """Four ranks, two replicas each: two shards a chunk, whichever rank of a pair stores first; the
    engine is ready with all four."""
    driver = Driver(limits())
    shape = Shard(tp_size=4, replicas=2)
    for rank in range(3):
        _, body = register(driver, replace(shape, tp_rank=rank))
        assert isinstance(body, EngineState)
        assert not body.ready
    _, body = register(driver, replace(shape, tp_rank=3))
    assert isinstance(body, EngineState)
    assert body.ready
    other = Driver(limits())
    engine = other.engine(shards=[replace(shape, tp_rank=rank) for rank in range(4)])
    assert engine.put(engine.chain(1)) == b"\1"
    assert other.tier().slots_used == 2
    assert [engine.get(engine.chain(1), rank) for rank in range(4)] == [b"\1"] * 4


def test_a_pipeline_may_have_another_layout_in_each_stage() -> None:
    """Stage 0 keeps 4 KiB a chunk, stage 1 8 KiB: slots of both sizes, one hit, and a family
    leaves as a whole."""
    driver = Driver(Limits(host=TierLimits(2, 4 * BLOCK_BYTES)))
    tensors = (TensorSpan(0, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 4096),)
    wide = Layout("float32", 16, (LayerGroup("full", 16, None, tensors),))
    engine = Engine(driver, "e1", "t1", layout())
    for rank, shape in enumerate((layout(), wide)):
        session, body = register(driver, Shard(pp_rank=rank, pp_size=2), shape)
        engine.workers.append(session)
    assert isinstance(body, EngineState)
    assert body.ready
    engine.digest, engine.scheduler = body.namespace, engine.workers[0]
    for seed in range(3):
        assert engine.put(engine.chain(1, seed)) == b"\1"
    assert [engine.peek(engine.chain(1, seed)) for seed in range(3)] == [0, 1, 1]
    assert engine.get(engine.chain(1, 2), 1) == b"\1"
    sizes = {m.header.shard: m.header.payload_bytes for m in driver.handed_out}
    assert sizes == {0: BLOCK_BYTES, 1: 2 * BLOCK_BYTES}


def test_a_pipelines_namespace_names_each_stages_layout_in_the_order_of_the_stages() -> None:
    """Whichever stage registers first, the namespace is the same; with the layouts exchanged, or
    with one for both, it is another: their chunks never mix."""
    tensors = (TensorSpan(0, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 4096),)
    wide = Layout("float32", 16, (LayerGroup("full", 16, None, tensors),))
    found = []
    for stages in (
        ((0, layout()), (1, wide)),
        ((1, wide), (0, layout())),
        ((0, wide), (1, layout())),
        ((0, layout()), (1, layout())),
    ):
        driver = Driver(limits(host_slots=8))
        for rank, shape in stages:
            _, body = register(driver, Shard(pp_rank=rank, pp_size=2), shape)
        assert isinstance(body, EngineState)
        found.append(body.namespace)
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_eight_ranks_share_one_limit() -> None:
    """Field case 62: the tier's limit is a total, not a rank's: eight ranks and room for two chunks
    of all of them."""
    driver = Driver(limits(host_slots=16, nvme_slots=16))
    driver.scanned()
    engine = driver.engine(shards=[Shard(tp_rank=rank, tp_size=8) for rank in range(8)])
    for seed in range(4):
        assert engine.put(engine.chain(1, seed)) == b"\1"
        for tier in driver.stats().tiers:
            assert tier.slots_used <= 16
            assert tier.bytes_used <= tier.bytes_total
    assert [engine.peek(engine.chain(1, seed)) for seed in range(4)] == [0, 0, 1, 1]


def test_a_scheduler_may_attach_before_any_worker() -> None:
    """It learns that there is nothing yet, and is told when there is."""
    driver = Driver(limits())
    scheduler = driver.session()
    before = driver.ask(scheduler, Attach("e1", "t1"))
    assert before == EngineState("e1", False, b"", 0)
    _, state = register(driver, Shard())
    assert pushes(driver, scheduler) == [state]
    late = driver.session()
    assert driver.ask(late, Attach("e1", "t1")) == state


def test_engines_of_two_tenants_share_a_name_and_nothing_else() -> None:
    """Field case 125, the core's part: tenant 2's scheduler doesn't see tenant 1's engine, and its
    chunks aren't hits there."""
    driver = Driver(limits())
    one = driver.engine("e1", tenant="t1")
    session = driver.session()
    assert driver.ask(session, Attach("e1", "t2")) == EngineState("e1", False, b"", 0)
    two = driver.engine("e1", tenant="t2")
    one.put(one.chain(2))
    assert one.digest == two.digest
    assert (one.peek(one.chain(2)), two.peek(one.chain(2))) == (2, 0)
    assert two.put(two.chain(2)) == b"\1\1"
    assert driver.tier().slots_used == 4


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("shard", "shape", "namespace", "words"),
    [
        (Shard(1, 4), layout(), MODEL, ("4", "2")),
        (Shard(1, 2, pp_size=2), layout(), MODEL, ("2, 2", "2, 1")),
        (Shard(1, 2, replicas=2), layout(), MODEL, ("2, 1, 2", "2, 1, 1")),
        (Shard(1, 2), layout(), replace(MODEL, revision="r9"), ("r9", "r1")),
        (Shard(1, 2), layout(2), MODEL, ("32", "16")),
        (Shard(1, 2), layout(1, window=64), MODEL, ("4", "0")),
        (Shard(1, 2), layout(dtype="float16"), MODEL, ("float16", "float32")),
        (Shard(0, 2), layout(), MODEL, ("rank 0", "live session")),
    ],
    ids=["tp", "pp", "replicas", "namespace", "chunk", "window", "dtype", "rank"],
)
def test_a_worker_that_does_not_fit_is_refused_in_one_line_that_names_both(
    shard: Shard, shape: Layout, namespace: Namespace, words: tuple[str, ...]
) -> None:
    """Rank 0 of 2 is registered; the misfit is refused and everything stays as it was: the right
    rank 1 makes the engine ready."""
    driver = Driver(limits())
    register(driver, Shard(0, 2))
    session, body = register(driver, shard, shape, namespace)
    reason = refusal(body)
    for word in ("'e1'", *words):
        assert word in reason
    assert driver.stats().sessions == 1
    right = driver.ask(session, Register("e1", "t1", MODEL, layout(), Shard(1, 2)))
    assert isinstance(right, EngineState)
    assert right.ready


def test_replicas_with_different_fingerprints_are_refused() -> None:
    """They say that they hold the same KV, but pack it differently."""
    driver = Driver(limits())
    register(driver, Shard(0, 2, replicas=2))
    tensors = (TensorSpan(0, 2048, 2048, 64), TensorSpan(1 << 20, 2048, 2048, 64))
    split = Layout("float32", 16, (LayerGroup("full", 16, None, tensors),))
    reason = refusal(register(driver, Shard(1, 2, replicas=2), split)[1])
    assert layout().fingerprint().hex() in reason
    assert split.fingerprint().hex() in reason


def test_a_second_live_registration_of_a_rank_is_refused_and_harms_nobody() -> None:
    """The first one goes on; the second one gets the place when the first is gone."""
    driver = Driver(limits())
    engine = driver.engine()
    session, body = register(driver, Shard())
    assert "live session" in refusal(body)
    assert engine.put(engine.chain(1)) == b"\1"
    driver.close(engine.workers[0])
    state = driver.ask(session, Register("e1", "t1", MODEL, layout(), Shard()))
    assert isinstance(state, EngineState)
    assert state.ready
    assert engine.peek(engine.chain(1)) == 1


def test_a_session_registers_or_attaches_once() -> None:
    """A second time is refused, whatever it asks."""
    driver = Driver(limits())
    session, _ = register(driver, Shard())
    for message in (Attach("e2", "t1"), Register("e2", "t1", MODEL, layout(), Shard())):
        body = driver.ask(session, message)
        assert isinstance(body, Refused)
        assert body.cause is Cause.PROTOCOL
        assert "another connection" in body.reason
    assert len(driver.stats().engines) == 1


def test_sessions_are_limited() -> None:
    """Two at most: the third is refused with the limit; when one has gone there is room."""
    driver = Driver(limits(sessions_max=2))
    engine = driver.engine()
    session = driver.session()
    body = driver.ask(session, Attach("e1", "t1"))
    assert isinstance(body, Refused)
    assert body.cause is Cause.LIMIT
    assert "2 sessions" in body.reason
    driver.close(engine.scheduler)
    assert isinstance(driver.ask(session, Attach("e1", "t1")), EngineState)


@pytest.mark.parametrize("nvme_slots", [0, 2])
def test_a_layout_whose_chunk_fits_no_slab_is_refused(nvme_slots: int) -> None:
    """Four blocks are the host's whole slab; five fit nowhere. With NVMe of two slots of 8 KiB (one
    slab of 16 KiB) four blocks and a header don't either."""
    driver = Driver(limits(nvme_slots=nvme_slots))
    body = register(driver, Shard(), layout(4))[1]
    assert isinstance(body, Refused if nvme_slots else EngineState)
    driver = Driver(limits(nvme_slots=nvme_slots))
    reason = refusal(register(driver, Shard(), layout(5))[1])
    assert str(5 * BLOCK_BYTES) in reason
    assert str(4 * BLOCK_BYTES) in reason


def test_too_many_namespaces_are_refused_and_leave_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two namespaces are the most here: a third model is refused; a known one registers."""
    monkeypatch.setattr(spaces, "SPACES_MAX", 2)
    driver = Driver(limits())
    for name in ("r1", "r2"):
        driver.engine(name, namespace=replace(MODEL, revision=name))
    session = driver.session()
    third = Register("e3", "t1", replace(MODEL, revision="r3"), layout(), Shard())
    body = driver.ask(session, third)
    assert isinstance(body, Refused)
    assert "2" in body.reason
    assert len(driver.stats().engines) == 2
    known = replace(third, namespace=replace(MODEL, revision="r2"))
    state = driver.ask(session, known)
    assert isinstance(state, EngineState)
    assert state.ready
