"""A draft model's KV: restored where it is registered, told where it isn't."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import (
    Client,
    HitStatus,
    LayerGroup,
    Layout,
    Namespace,
    Shard,
    TensorSpan,
    create_host_memory,
)
from tests.conftest import RunningDaemon, StartDaemon

WAIT_S = 60.0
BLOCKS = 8
TARGET_BYTES = 4096
DRAFT_BYTES = 512
TARGET_LAYERS = 32
TOTAL_BYTES = BLOCKS * (TARGET_LAYERS * TARGET_BYTES + DRAFT_BYTES)
DRAFT_OFFSET = BLOCKS * TARGET_LAYERS * TARGET_BYTES
SPACE = Namespace("org/target", "r1", "test/1")


def target_layers() -> tuple[TensorSpan, ...]:
    """32 layers of the target model."""
    return tuple(
        TensorSpan(i * BLOCKS * TARGET_BYTES, TARGET_BYTES, TARGET_BYTES, BLOCKS)
        for i in range(TARGET_LAYERS)
    )


def test_a_registered_draft_layer_comes_back_byte_equal(daemon: RunningDaemon) -> None:
    """Field case 36: 32 target layers and one draft layer of another size in one group; after a
    store the memory is wiped, and a retrieve to other blocks brings all 33 back."""
    draft = TensorSpan(DRAFT_OFFSET, DRAFT_BYTES, DRAFT_BYTES, BLOCKS)
    group = LayerGroup("full", 16, None, (*target_layers(), draft))
    with create_host_memory("engine", TOTAL_BYTES) as memory, Client(daemon.socket) as client:
        array = np.frombuffer(memory.buffer, np.uint8)
        array[:] = np.random.default_rng(1).integers(0, 256, TOTAL_BYTES, np.uint8)
        before = array.copy()
        worker = client.register(
            "e1", SPACE, Layout("float16", 16, (group,)), memory.describe(), Shard()
        )
        assert worker.wait_ready(WAIT_S)
        keys = worker.keys(range(65))
        assert worker.store("r", keys, {"full": [0, 1, 2, 3]}).wait(WAIT_S) is not None
        array[:] = 0
        outcome = worker.retrieve("r", keys, {"full": [7, 6, 5, 4]}).wait(WAIT_S)
        assert outcome is not None
        assert all(outcome.done)
        for offset, size in [
            *((span.offset_bytes, TARGET_BYTES) for span in target_layers()),
            (DRAFT_OFFSET, DRAFT_BYTES),
        ]:
            there = array[offset : offset + BLOCKS * size].reshape(BLOCKS, size)
            was = before[offset : offset + BLOCKS * size].reshape(BLOCKS, size)
            assert np.array_equal(there[[7, 6, 5, 4]], was[[0, 1, 2, 3]])
        del array
        client.close()


@pytest.mark.parametrize("partial", ["serve", "miss"])
def test_an_unregistered_draft_is_told_and_may_be_a_miss(
    start_daemon: StartDaemon, partial: str
) -> None:
    """Field case 36: the engine says that it keeps its draft model's KV to itself. stats says so,
    and session.partial=miss turns its hits into misses."""
    daemon = start_daemon(KVSTORE_SESSION_PARTIAL=partial)
    layout = Layout("float16", 16, (LayerGroup("full", 16, None, target_layers()),), ("draft",))
    with create_host_memory("engine", TOTAL_BYTES) as memory, Client(daemon.socket) as client:
        worker = client.register("e1", SPACE, layout, memory.describe(), Shard())
        assert worker.wait_ready(WAIT_S)
        keys = worker.keys(range(65))
        assert worker.store("r", keys, {"full": [0, 1, 2, 3]}).wait(WAIT_S) is not None
        expected = HitStatus.HIT if partial == "serve" else HitStatus.MISS
        assert worker.lookup("r", keys).status is expected
        assert daemon.stats()["engines"][0]["uncached"] == ["draft"]
        shown = daemon.kvstore("stats").stdout
        assert "draft KV not cached" in shown
        client.close()
