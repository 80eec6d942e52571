"""What the crash tests share: a crowded daemon, and an engine that survives all others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from tests.conftest import RunningDaemon, StartDaemon
from tests.crash.watch import Watch
from tests.small_engine import SmallEngine, tokens

POINTS = int(os.environ.get("KILL_POINTS", "20"))
"""Random moments of each test, half as many around a clear; ``make soak`` takes more."""
CHUNKS = 48
OLD_PROMPTS = 16
"""So many prompts as the crowded host tier can't hold at once: some of their chunks are on NVMe
only."""
NVME_MIB = 256 + 8 * POINTS
"""Room for what all points store: nothing that a test relies on is evicted there."""
OLD = tuple(range(OLD_PROMPTS))


@pytest.fixture
def crowded(start_daemon: StartDaemon) -> RunningDaemon:
    """A daemon whose host tier holds a few prompts only."""
    return start_daemon(
        KVSTORE_HOST_SIZE="16MiB",
        KVSTORE_HOST_SLAB_SIZE="2MiB",
        KVSTORE_NVME_SIZE=f"{NVME_MIB}MiB",
    )


@pytest.fixture
def observer(crowded: RunningDaemon) -> Iterator[SmallEngine]:
    """An engine that stays, and has stored the prompts OLD, which are on NVMe."""
    with SmallEngine(crowded.socket, CHUNKS, name="observer") as engine:
        watch = Watch(crowded)
        for seed in OLD:
            keys = engine.keys(tokens(CHUNKS, seed))
            engine.fill(keys)
            assert engine.store(keys).leading_chunks == CHUNKS
            watch.written()
        yield engine


def check_hits(engine: SmallEngine, seeds: Sequence[int], what: str, chunks: int = CHUNKS) -> int:
    """Every hit on these prompts is retrieved and right; tells how many there were."""
    hits = 0
    for seed in seeds:
        keys = engine.keys(tokens(chunks, seed))
        found = engine.hits(keys)
        engine.wipe()
        outcome = engine.retrieve(keys[:found])
        assert all(outcome.done), f"{what} prompt {seed}: {outcome}"
        assert engine.right_chunks(keys[:found]) == found, f"{what} prompt {seed}"
        hits += found
    return hits
