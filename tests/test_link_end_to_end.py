"""The engine link with the real core, mover and memory: bytes, fences, and what is left at the end.

Blocks are filled with bytes that name their place, so that any mix-up shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, HitStatus, Shard, WorkerSession, create_host_memory
from kvstore.core.messages import Move
from tests.faults.node import Gate, Node
from tests.link_rig import (
    BLOCK_BYTES,
    BLOCKS,
    CHUNK_TOKENS,
    DEADLINE_S,
    MEMORY_BYTES,
    SPACE,
    eventually,
    folder,
    layout,
    open_descriptors,
)

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """An engine with one rank, whose memory the test sees as [blocks, bytes]."""

    def __init__(self, path: str, name: str) -> None:
        self.client = Client(path)
        self._memory = create_host_memory(name, MEMORY_BYTES)
        array = np.frombuffer(self._memory.buffer, np.uint8)
        self.blocks = array.reshape(BLOCKS, BLOCK_BYTES)
        self.session: WorkerSession = self.client.register(
            name, SPACE, layout(), self._memory.describe(), Shard()
        )
        assert self.session.wait_ready(DEADLINE_S)

    def fill(self, seed: int) -> None:
        """Every block gets bytes of its own."""
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, np.uint8)

    def close(self) -> None:
        """Leave."""
        self.client.close()
        del self.blocks
        self._memory.close()


@pytest.fixture
def node() -> Iterator[Node]:
    """A running node."""
    with folder() as path, Node(path, host_chunks=8) as running:
        yield running


@pytest.fixture
def start(node: Node) -> Iterator[Callable[[str], Worker]]:
    """Starts workers, which leave after the test."""
    workers: list[Worker] = []

    def begin(name: str) -> Worker:
        workers.append(Worker(node.path, name))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def blocks_of(*chunks: int) -> dict[str, list[int]]:
    """The blocks of whole chunks, chunk i in blocks [4i, 4i+4)."""
    return {"full": [4 * chunk + block for chunk in chunks for block in range(4)]}


TOKENS = list(range(4 * CHUNK_TOKENS))


def test_what_one_engine_stores_another_gets_back_byte_for_byte(
    start: Callable[[str], Worker],
) -> None:
    """Two engines of one namespace: the second's lookup hits, and its blocks, in another order and
    place, hold the first one's bytes and no other block changes."""
    one, two = start("e1"), start("e2")
    one.fill(1)
    two.fill(2)
    keys = one.session.keys(TOKENS)
    stored = one.session.store("r", keys, blocks_of(3, 1, 0, 2)).wait(DEADLINE_S)
    assert stored is not None
    assert stored.done == (True,) * 4
    hit = two.session.lookup("q", two.session.keys(TOKENS))
    assert (hit.status, hit.chunks, hit.tokens) == (HitStatus.HIT, 4, 4 * CHUNK_TOKENS - 1)
    before = two.blocks.copy()
    back = two.session.retrieve("q", keys[:3], blocks_of(7, 5, 6)).wait(DEADLINE_S)
    assert back is not None
    assert back.done == (True,) * 3
    for source, target in ((3, 7), (1, 5), (0, 6)):
        assert (two.blocks[4 * target : 4 * target + 4] == one.blocks[4 * source :][:4]).all()
    assert (two.blocks[: 4 * 5] == before[: 4 * 5]).all()


def test_a_retrieve_of_what_is_not_there_names_every_block(start: Callable[[str], Worker]) -> None:
    """A stale hit is at worst a miss: nothing is written, and the engine learns what to compute."""
    worker = start("e1")
    worker.fill(1)
    before = worker.blocks.copy()
    keys = worker.session.keys(TOKENS)
    outcome = worker.session.retrieve("r", keys[:2], blocks_of(0, 1)).wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.done == (False, False)
    assert outcome.failed_blocks == {"full": tuple(range(8))}
    assert (worker.blocks == before).all()


def test_blocks_that_the_layout_does_not_have_are_refused(start: Callable[[str], Worker]) -> None:
    """An ID beyond the memory never reaches the mover."""
    worker = start("e1")
    keys = worker.session.keys(TOKENS)
    outcome = worker.session.store("r", keys[:1], {"full": [0, 1, 2, BLOCKS]}).wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.done == (False,)
    assert f"block ID {BLOCKS}" in outcome.reason


def test_an_engine_killed_in_the_middle_of_a_move_keeps_its_mapping_until_the_move_ends(
    node: Node,
) -> None:
    """SIGKILL an engine while its blocks are being copied: the daemon unmaps them only when the
    copy has ended, and then nothing of the engine is left."""
    gate = Gate()
    node.hooks.move = lambda move: gate.hold()
    before = open_descriptors()
    script = (
        "import sys, time\n"
        "from tests.test_link_end_to_end import TOKENS, Worker, blocks_of\n"
        "worker = Worker(sys.argv[1], 'doomed')\n"
        "session = worker.session\n"
        "session.store('r', session.keys(TOKENS), blocks_of(0, 1, 2, 3))\n"
        "time.sleep(300)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", script, node.path], cwd=ROOT)
    assert gate.reached.wait(DEADLINE_S)
    engine.kill()
    engine.wait()
    maps = Path("/proc/self/maps")
    eventually(lambda: node.server.stats().sessions[0].phase == "closing")
    assert "memfd:doomed" in maps.read_text()
    gate.open()
    eventually(lambda: node.sessions() == 0)
    assert "memfd:doomed" not in maps.read_text()
    eventually(lambda: open_descriptors() == before)


def test_a_cancel_is_acknowledged_only_when_the_copy_has_ended(
    node: Node, start: Callable[[str], Worker]
) -> None:
    """The engine cancels a retrieve whose copy runs: its blocks aren't its own before the
    acknowledgement, and nothing is written after it (field cases 39 and 52, in part)."""
    worker = start("e1")
    worker.fill(1)
    keys = worker.session.keys(TOKENS)
    stored = worker.session.store("r", keys, blocks_of(0, 1, 2, 3)).wait(DEADLINE_S)
    assert stored is not None
    gate = Gate()
    node.hooks.move = lambda move: gate.hold()
    ticket = worker.session.retrieve("q", keys, blocks_of(4, 5, 6, 7))
    assert gate.reached.wait(DEADLINE_S)
    ticket.cancel()
    assert ticket.wait(0.02) is None
    gate.open()
    outcome = ticket.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.cancelled
    worker.blocks[16:] = 7
    assert worker.session.lookup("r", keys).chunks == 4
    assert (worker.blocks[16:] == 7).all()


def test_a_closed_session_has_a_fence(node: Node, start: Callable[[str], Worker]) -> None:
    """close() in the middle of a copy: the ticket ends with the stream, which ends with the
    copy."""
    worker = start("e1")
    keys = worker.session.keys(TOKENS)
    gate, ended = Gate(), threading.Event()

    def hold(move: Move) -> None:
        gate.hold()
        ended.set()

    node.hooks.move = hold
    ticket = worker.session.store("r", keys[:1], blocks_of(0))
    assert gate.reached.wait(DEADLINE_S)
    worker.session.close(timeout_s=0.01)
    assert not ticket.done()
    gate.open()
    assert ticket.wait(DEADLINE_S) is not None
    assert ended.is_set()


def test_a_second_live_registration_of_a_shard_is_refused(
    node: Node, start: Callable[[str], Worker]
) -> None:
    """Two processes claim one rank: the second is refused in one line, the first goes on."""
    first = start("e1")
    with pytest.raises(Exception, match="registered by a live session already"):
        start("e1")
    assert first.session.lookup("r", first.session.keys(TOKENS)).status is HitStatus.MISS
    assert node.sessions() == 1


def test_an_engine_is_ready_with_its_last_rank_and_unready_with_the_first_loss(node: Node) -> None:
    """Two ranks: the scheduler has keys only while both are registered."""
    with Client(node.path) as client, create_host_memory("m", 2 * MEMORY_BYTES) as memory:
        scheduler = client.attach("e1")
        ranks = []
        for rank in range(2):
            assert not scheduler.wait_ready(0.0)
            assert len(scheduler.keys(TOKENS)) == 0
            shard = Shard(tp_rank=rank, tp_size=2)
            ranks.append(client.register("e1", SPACE, layout(), memory.describe(), shard))
        assert scheduler.wait_ready(DEADLINE_S)
        assert len(scheduler.keys(TOKENS)) == 4
        ranks[1].close()
        eventually(lambda: len(scheduler.keys(TOKENS)) == 0)


def test_memory_that_is_not_sealed_is_refused_in_one_line(node: Node) -> None:
    """An engine could cut it off while the daemon copies, which would kill the daemon."""
    from kvstore import HostMemory, LayoutMismatchError

    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, MEMORY_BYTES)
    with Client(node.path) as client:
        with pytest.raises(LayoutMismatchError, match="F_SEAL_SHRINK"):
            client.register("e1", SPACE, layout(), HostMemory(fd, MEMORY_BYTES), Shard())
        os.close(fd)
    assert node.sessions() == 0
