"""One prompt whose chunks lie in three tiers: they are read at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore import ChunkKeys
from kvstore.core.messages import Move, MoveKind, TierName
from tests.faults.node import Node
from tests.link_rig import eventually
from tests.redis_rig import standalone
from tests.small_engine import WAIT_S, SmallEngine, tokens

THIRD = 4
CHUNKS = 3 * THIRD


class Meeting:
    """The first Move of the prompt that reads from each tier waits until all three have begun."""

    def __init__(self) -> None:
        self.met: list[TierName] = []
        self._all = threading.Barrier(3)
        self._seen: set[TierName] = set()
        self._lock = threading.Lock()

    def at(self, move: Move) -> None:
        """At the begin of a Move, in the mover's thread."""
        source = move.source
        if source is None or move.kind not in (MoveKind.LOAD, MoveKind.READ):
            return
        with self._lock:
            first = source.tier not in self._seen
            self._seen.add(source.tier)
        if first:
            self._all.wait(WAIT_S)
            self.met.append(source.tier)


def share(folder: Path, url: str) -> None:
    """Another node stores all of the prompt, and it gets to Redis."""
    folder.mkdir()
    with Node(folder, 2 * CHUNKS, redis=url) as node, SmallEngine(node.path, CHUNKS) as engine:
        eventually(lambda: remote(node).up)
        keys = engine.keys(tokens(CHUNKS))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == CHUNKS
        eventually(lambda: remote(node).written == CHUNKS)


def remote(node: Node):  # type: ignore[no-untyped-def]
    """The core's figures of the remote tier."""
    stats = node.stats().remote
    assert stats is not None
    return stats


def spread(node: Node, engine: SmallEngine) -> ChunkKeys:
    """A third of the prompt in host memory, one on NVMe only, and one in Redis only; host memory
    has places for two."""
    keys = engine.keys(tokens(CHUNKS))
    local, others = keys[: 2 * THIRD], engine.keys(tokens(THIRD, seed=1))
    for stored in (local, others):
        engine.fill(stored)
        assert engine.store(stored).leading_chunks == len(stored)
        node.rest()
    host, nvme = node.stats().tiers
    assert (host.chunks, nvme.chunks) == (2 * THIRD, 3 * THIRD)
    assert host.evictions == THIRD
    return keys


def test_three_tiers_are_read_at_the_same_time(private_folder: Path) -> None:
    """A third of a prompt in each tier: a Move from each has begun before any of them is done,
    and every chunk arrives. One after the other they would never meet."""
    with standalone(private_folder / "v") as server:
        share(private_folder / "a", server.url)
        (private_folder / "b").mkdir()
        with (
            Node(private_folder / "b", 2 * THIRD, 2 * CHUNKS, server.url) as node,
            SmallEngine(node.path, CHUNKS) as engine,
        ):
            eventually(lambda: remote(node).up)
            keys = spread(node, engine)
            meeting = Meeting()
            node.hooks.move = meeting.at
            engine.wipe()
            assert engine.load(keys) == CHUNKS
            assert engine.right_chunks(keys) == CHUNKS
            assert set(meeting.met) == {TierName.HOST, TierName.NVME, TierName.REDIS}
            assert node.redis is not None
            assert node.redis.stats().reads == THIRD
            node.hooks.move = lambda move: None
