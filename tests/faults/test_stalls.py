"""A disk that stands still: every system call on slab files hangs, and so does the manifest's. It
holds up what needs it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.messages import Clear, Cleared
from kvstore.tiers.block_io import BlockIO
from tests.faults.conftest import StartEngine, StartNode
from tests.faults.node import Gate, Node
from tests.link_rig import eventually
from tests.small_engine import WAIT_S, SmallEngine, tokens

HOST_CHUNKS, NVME_CHUNKS = 24, 64


class StalledIO(BlockIO):
    """System calls that don't return before the gate opens."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        self.gate.hold()
        return super().preadv(fd, buffers, offset)

    def pwritev(
        self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int, flags: int = 0
    ) -> int:
        self.gate.hold()
        return super().pwritev(fd, buffers, offset, flags)

    def allocate(self, fd: int, nbytes: int) -> None:
        self.gate.hold()
        super().allocate(fd, nbytes)


def stall(node: Node, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the node's disk stand still."""
    save = node._disk.save_manifest

    def stalled_save(spaces: object) -> None:
        gate.hold()
        save(spaces)  # type: ignore[arg-type]

    monkeypatch.setattr(node._disk._files, "io", StalledIO(gate))
    monkeypatch.setattr(node._disk, "save_manifest", stalled_save)


def store(engine: SmallEngine, chunks: int, seed: int) -> None:
    """Store a prompt, which is acknowledged and there at once."""
    keys = engine.keys(tokens(chunks, seed))
    engine.fill(keys)
    assert engine.store(keys).leading_chunks == chunks
    assert engine.hits(keys) == chunks


def works(engine: SmallEngine, seed: int) -> None:
    """A prompt of four chunks is stored, hit, retrieved, and right."""
    store(engine, 4, seed)
    keys = engine.keys(tokens(4, seed))
    engine.wipe()
    assert engine.retrieve(keys).leading_chunks == 4
    assert engine.right_chunks(keys) == 4


@pytest.mark.parametrize("needs", ["reads", "writes", "clear", "reads writes clear"])
def test_a_disk_that_stands_still_delays_what_needs_it_only(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate],
    monkeypatch: pytest.MonkeyPatch, needs: str,
) -> None:  # fmt: skip
    """Field case 68, one level further down. Meanwhile host hits, lookups, stores that evict others
    and their acknowledgements go on; an engine that waits for the disk can leave at once; and when
    the disk goes on, so does what waited."""
    node = start_node(HOST_CHUNKS, NVME_CHUNKS)
    slow = start_engine(node, HOST_CHUNKS, "slow")
    fast = start_engine(node, 4, "fast")
    with SmallEngine(node.path, 4, "org/gone", name="gone") as gone:
        for engine, chunks, seed in ((gone, 4, 0), (slow, 8, 0), (slow, HOST_CHUNKS, 1)):
            store(engine, chunks, seed)
            node.rest()
        gate = hold()
        stall(node, gate, monkeypatch)
        tickets, cleared = [], None
        if "reads" in needs:
            tickets.append(slow.begin_retrieve(slow.keys(tokens(8))))
        if "writes" in needs:
            store(fast, 4, 50)
        if "clear" in needs:
            cleared = node.server.admin(Clear(tenant=None, model="org/gone"))
        for seed in range(100, 120):
            works(fast, seed)
        assert gate.reached.wait(WAIT_S)
        if cleared is not None:
            assert gone.hits(gone.keys(tokens(4))) == 0
            works(gone, 1)
        check_that_leaving_takes_no_disk(node)
        assert not any(ticket.done() for ticket in tickets)
        assert cleared is None or not cleared.done()
        gate.open()
        for ticket in tickets:
            outcome = ticket.wait(WAIT_S)
            assert outcome is not None
            assert outcome.leading_chunks == 8
        assert cleared is None or cleared.result(WAIT_S) == Cleared(1, 4)
        node.rest()
        assert slow.hits(slow.keys(tokens(8))) == 8
        for seed in range(100, 120):
            keys = fast.keys(tokens(4, seed))
            found = fast.hits(keys)
            assert fast.retrieve(keys[:found]).leading_chunks == found
            assert fast.right_chunks(keys[:found]) == found


def check_that_leaving_takes_no_disk(node: Node) -> None:
    """An engine that waits for chunks on NVMe goes away, and is gone."""
    sessions = len(node.ask(node.server.stats).sessions)
    with SmallEngine(node.path, 8, name="leaver") as leaver:
        leaver.begin_retrieve(leaver.keys(tokens(8)))
    eventually(lambda: len(node.ask(node.server.stats).sessions) == sessions)
