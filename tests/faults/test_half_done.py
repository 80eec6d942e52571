"""Faults that other services were seen to have: what is half done when somebody dies or fails."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.core.layout import Layout
from kvstore.core.limits import Limits
from kvstore.daemon_hands import MappedPages, open_pages
from kvstore.device.base import Blocks
from tests.crash.engine_process import STORE, EngineProcess, Life
from tests.faults.conftest import StartEngine, StartNode
from tests.faults.node import Gate
from tests.link_rig import eventually
from tests.small_engine import BLOCKS_PER_CHUNK, WAIT_S, tokens

CHUNKS = 8
WHOLE = 3
"""Chunks before the one that stops half way."""


class HalfwayPages(MappedPages):
    """Pages of which all chunks are gathered but number WHOLE, which stops at the gate when half of
    it has been copied."""

    def __init__(self, real: MappedPages, gate: Gate) -> None:
        self._real = real
        self._gate = gate

    def gather(self, blocks: Blocks, out: NDArray[np.uint8]) -> None:
        """Half of the bytes, the gate, then the rest."""
        whole = np.empty_like(out)
        self._real.gather(blocks, whole)
        half = out.nbytes // 2
        out[:half] = whole[:half]
        (first_block,) = struct.unpack_from("<I", blocks[0][1])
        if first_block == WHOLE * BLOCKS_PER_CHUNK:
            self._gate.hold()
        out[half:] = whole[half:]

    def close(self) -> None:
        """Unmap the memory."""
        self._real.close()


def test_nobody_gets_a_hit_on_what_an_engine_half_stored_and_died(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate]
) -> None:
    """Three chunks of a prompt are there; an engine reserves the other five, has half of the next
    one written when it is killed. Another engine hits the three, before the copy has ended, after
    it, and at any later time; what it stores itself under the same keys is hit and right."""
    node = start_node(2 * CHUNKS)
    observer = start_engine(node, CHUNKS, "observer")
    keys = observer.keys(tokens(CHUNKS))
    observer.fill(keys)
    assert observer.store(keys[:WHOLE]).leading_chunks == WHOLE
    gate = hold()

    def halfway_pages(limits: Limits, fd: int, nbytes: int, layout: Layout) -> MappedPages:
        return HalfwayPages(open_pages(limits, fd, nbytes, layout), gate)

    node.hooks.pages = lambda limits: partial(halfway_pages, limits)
    with EngineProcess(Life(node.path, STORE, (0,), CHUNKS)) as doomed:
        assert gate.reached.wait(WAIT_S)
        assert observer.hits(keys) == WHOLE
        doomed.end()
    eventually(lambda: node.stats().drops.get("session_lost", 0) == CHUNKS - WHOLE)
    observer.wipe()
    assert observer.hits(keys) == WHOLE
    assert observer.retrieve(keys).leading_chunks == WHOLE
    assert observer.right_chunks(keys) == WHOLE
    gate.open()
    eventually(lambda: node.stats().sessions == 1)
    assert observer.hits(keys) == WHOLE
    assert observer.retrieve(keys).leading_chunks == WHOLE
    observer.fill(keys)
    assert observer.store(keys).leading_chunks == CHUNKS
    observer.wipe()
    assert observer.hits(keys) == CHUNKS
    assert observer.retrieve(keys).leading_chunks == CHUNKS
    assert observer.right_chunks(keys) == CHUNKS
    other = observer.keys(tokens(CHUNKS, seed=1))
    assert observer.store(other).leading_chunks == CHUNKS, "every slot is usable again"
    assert node.stats().tiers[0].pinned == 0
