"""Whatever the cache does, the tokens are right, nothing raises, and no block is touched that the
daemon may still hold."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from kvstore_transformers.engine import Engine, EngineOptions, Generation
from kvstore_transformers.link import Session
from kvstore_transformers.model import CausalModel

from kvstore.core.errors import LayoutMismatchError
from kvstore.core.layout import Layout
from kvstore.memory import OwnedHostMemory
from tests.connectors import tiny
from tests.connectors.faulty import FaultyDaemon

CHUNK = 32
PROMPT = tiny.random_tokens(5 * CHUNK + 10)
OPTIONS = EngineOptions(
    tokens_per_block=16,
    tokens_per_chunk=CHUNK,
    cache_tokens=256,
    prefill_tokens=64,
    transfer_deadline_s=0.05,
    acknowledge_deadline_s=0.05,
)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return tiny.ours(tiny.oracle("llama"))


@pytest.fixture(scope="module")
def cold(model: CausalModel) -> Generation:
    with Engine(model, OPTIONS) as engine:
        return engine.generate(PROMPT, 30)


@pytest.fixture
def daemon() -> FaultyDaemon:
    return FaultyDaemon()


def check_sound(engine: Engine, daemon: FaultyDaemon) -> None:
    """After a request: no lease, and every block free again."""
    assert daemon.leases == set()
    engine.cache.allocator.check_invariants()
    assert engine.cache.allocator.available() == engine.cache.shape.num_blocks


def test_reuse_gives_the_same_tokens(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    """The first request stores, the second loads all full chunks of the prompt and stores nothing
    twice; decoded tokens fill a chunk, which is stored too."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        assert engine.generate(PROMPT, 30).tokens == cold.tokens
        assert daemon.stored == [5, 1]
        warm = engine.generate(PROMPT, 30)
        assert (warm.tokens, warm.reused_tokens) == (cold.tokens, 5 * CHUNK)
        assert daemon.stored == [5, 1, 1]
        longer = engine.generate(PROMPT + list(cold.tokens), 4)
        assert longer.reused_tokens == 6 * CHUNK
        check_sound(engine, daemon)
        assert engine.failures == {}


def test_last_token_of_a_fully_cached_prompt_is_computed(
    model: CausalModel, daemon: FaultyDaemon
) -> None:
    """Every chunk of the prompt is there; the last one is computed all the same, for its last
    token's logits."""
    prompt = PROMPT[: 5 * CHUNK]
    with Engine(model, OPTIONS, daemon.connect) as engine:
        first = engine.generate(prompt, 30)
        warm = engine.generate(prompt, 30)
        assert (warm.tokens, warm.reused_tokens) == (first.tokens, 4 * CHUNK)


def test_decoded_chunks_are_stored_only_when_asked(
    model: CausalModel, daemon: FaultyDaemon
) -> None:
    options = EngineOptions(16, CHUNK, 256, 64, store_decoded=False)
    with Engine(model, options, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
    assert daemon.stored == [5]


@pytest.mark.parametrize("broken", [{0}, {2}, {4}, {1, 3}, {0, 1, 2, 3, 4}], ids=str)
def test_failed_chunks_are_recomputed_from_the_first(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon, broken: set[int]
) -> None:
    """field case 22: chunks fail to load (their blocks hold garbage then); the engine recomputes
    from the first failed one, and stores them again."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
        daemon.corrupt = broken
        warm = engine.generate(PROMPT, 30)
        assert warm.tokens == cold.tokens
        assert warm.reused_tokens == min(broken) * CHUNK
        daemon.corrupt = set()
        assert engine.generate(PROMPT, 30).reused_tokens == 5 * CHUNK
        check_sound(engine, daemon)


@pytest.mark.parametrize("verb", ["keys", "lookup", "retrieve", "store", "release"])
def test_raising_client_is_a_miss(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon, verb: str
) -> None:
    """field case 55: every call to the client raising; the request goes on and a counter tells."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
        daemon.raising = {verb}
        for _ in range(2):
            assert engine.generate(PROMPT, 30).tokens == cold.tokens
        assert list(engine.failures) == [verb]
        daemon.raising = set()
        assert engine.generate(PROMPT, 30).reused_tokens == 5 * CHUNK


def test_pending_lookup_is_asked_again(model: CausalModel, daemon: FaultyDaemon) -> None:
    """While a remote probe is out the lookup is pending; its answer counts once it is there."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 1)
        daemon.pending = 3
        assert engine.generate(PROMPT, 1).reused_tokens == 5 * CHUNK


def test_pending_lookup_doesnt_hang(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    daemon.pending = 10_000_000
    with Engine(model, OPTIONS, daemon.connect) as engine:
        assert engine.generate(PROMPT, 30).tokens == cold.tokens


def test_late_load_is_cancelled_and_recomputed(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    """A load that isn't done at its deadline is cancelled; after the acknowledgement its blocks
    are computed, in the same memory."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
        daemon.ends = {"retrieve": "at cancel"}
        late = engine.generate(PROMPT, 30)
        assert (late.tokens, late.reused_tokens) == (cold.tokens, 0)
        assert len(daemon.sessions) == 1
        assert daemon.tickets[-2].cancelled or daemon.tickets[-3].cancelled
        check_sound(engine, daemon)


def test_load_without_acknowledgement_costs_the_memory_not_the_engine(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    """field case 52: the daemon stops in the middle of a scatter and never acknowledges; the
    engine goes on in new memory, and what the daemon writes when it wakes hurts nobody."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
        daemon.ends = {"retrieve": "never"}
        stopped = daemon.sessions[0]
        assert engine.generate(PROMPT, 30).tokens == cold.tokens
        assert stopped.closed
        assert len(daemon.sessions) == 2
        daemon.ends = {}
        warm = engine.generate(PROMPT, 30)
        assert (warm.tokens, warm.reused_tokens) == (cold.tokens, 5 * CHUNK)
        check_sound(engine, daemon)


def test_blocks_come_back_only_when_their_stores_have_ended(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    """Stores that stay open keep their request's blocks; a request that needs them cancels, waits
    for the acknowledgement and goes on."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        daemon.ends = {"store": "at cancel"}
        engine.generate(PROMPT, 30)
        held = engine.cache.shape.blocks_for(len(PROMPT) + 30)
        assert engine.cache.allocator.available() == engine.cache.shape.num_blocks - held
        assert not any(ticket.cancelled for ticket in daemon.tickets)
        assert engine.generate(PROMPT, 30).tokens == cold.tokens
        assert all(ticket.cancelled for ticket in daemon.tickets[:2])
        assert len(daemon.sessions) == 1
        assert engine.flush(0.0)
        check_sound(engine, daemon)


def test_stores_without_acknowledgement_cost_the_memory_not_the_engine(
    model: CausalModel, cold: Generation, daemon: FaultyDaemon
) -> None:
    """Blocks that a silent daemon may still read are never given to the next request."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        daemon.ends = {"store": "never"}
        for _ in range(3):
            assert engine.generate(PROMPT, 30).tokens == cold.tokens
        assert len(daemon.sessions) == 3


def test_interrupted_request_returns_its_blocks(model: CausalModel, daemon: FaultyDaemon) -> None:
    """field case 47: a request that ends by an exception in the middle of decoding leaves neither
    a lease nor a block behind."""
    with Engine(model, OPTIONS, daemon.connect) as engine:
        engine.generate(PROMPT, 1)
        forward = interrupting(model.forward, after=3)
        model.forward = forward  # type: ignore[method-assign]
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT, 30)
        finally:
            del model.forward
        check_sound(engine, daemon)


def interrupting(forward: Callable[..., torch.Tensor], after: int) -> Callable[..., torch.Tensor]:
    calls = iter(range(after))

    def interrupted(*arguments: object) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return forward(*arguments)

    return interrupted


def test_refused_registration_is_told_and_leaves_nothing_open(model: CausalModel) -> None:
    """What the daemon refuses at registration is an error of use, which the engine's owner must
    see; the memory made for it is gone."""
    made: list[OwnedHostMemory] = []

    def refuse(memory: OwnedHostMemory, layout: Layout) -> Session:
        made.append(memory)
        raise LayoutMismatchError("layout: not today")

    engine = Engine(model, OPTIONS, refuse)
    with pytest.raises(LayoutMismatchError, match="not today"):
        engine.open()
    with pytest.raises(ValueError, match="closed"):
        _ = made[0].buffer
    engine.close()


def test_settle_waits_no_longer_than_its_deadlines(daemon: FaultyDaemon) -> None:
    """Never hang the engine: a transfer that never ends costs both deadlines once, not each
    ticket."""
    options = EngineOptions(
        16, CHUNK, 256, 64, transfer_deadline_s=0.02, acknowledge_deadline_s=0.02
    )
    model = tiny.ours(tiny.oracle("qwen3"))
    daemon.ends = {"store": "never"}
    with Engine(model, options, daemon.connect) as engine:
        engine.generate(PROMPT, 30)
        started = time.monotonic()
        assert not engine.flush(0.02)
        assert time.monotonic() - started < 5.0
