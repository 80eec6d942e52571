"""The engine link with the real core, mover and memory: bytes, fences, and what is left at the end.

Blocks are filled with bytes that name their place, so that any mix-up shows.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, HitStatus, Shard, WorkerSession, create_host_memory
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import Move, MoveKind
from kvstore.core.service import Service
from kvstore.daemon_hands import Hands, open_pages
from kvstore.mover import Mover, MoverThreads
from kvstore.server import EngineServer
from kvstore.tiers.host import HostTier
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
SLABS, SLAB_BYTES, STAGING = 4, 64 << 10, 2


class Node:
    """The daemon without its shell: core, mover and link in this process. ``gate`` is called in the
    mover's thread at the begin of every Move."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.gate: Callable[[Move], None] = lambda move: None
        limits = Limits(TierLimits(SLABS, SLAB_BYTES), staging_slots=STAGING)
        self.core = Service(limits)
        self.host = HostTier(SLABS + STAGING, SLAB_BYTES)
        threads = MoverThreads(copy=2, read=1, write=1)
        self.mover = Mover(self.host, {}, lambda moved: self.server.post(*moved), threads, self._at)
        self.server = EngineServer(
            socket_path=path,
            service=self.core,
            mover=Hands(self.mover),
            persist=lambda effect: None,
            open_pages=partial(open_pages, limits),
            tenants=self._tenant,
        )
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def sessions(self) -> int:
        """Sessions that are open or on their way out."""
        return len(self.server.call(self.server.stats).result(DEADLINE_S).sessions)

    def __enter__(self) -> Node:
        self.host.open()
        self.mover.open()
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        self.mover.close()
        self.server.close()
        self.host.close()
        if self.failure is not None:
            raise self.failure
        self.core.check_invariants()

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run(self._ready.set))
        except Exception as error:  # noqa: BLE001 (handed to the test's thread)
            self.failure = error
        finally:
            self._ready.set()

    def _at(self, point: str, move: Move) -> None:
        if point == "begin":
            self.gate(move)

    def _tenant(self, credential: str, user: int) -> str:
        return f"uid:{user}"


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
    with folder() as path, Node(str(path / "s.sock")) as running:
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
    begun, go_on = threading.Event(), threading.Event()

    def gate(move: Move) -> None:
        if move.kind is MoveKind.STORE:
            begun.set()
            assert go_on.wait(DEADLINE_S)

    node.gate = gate
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
    assert begun.wait(DEADLINE_S)
    engine.kill()
    engine.wait()
    maps = Path("/proc/self/maps")
    eventually(lambda: node.server.stats().sessions[0].phase == "closing")
    assert "memfd:doomed" in maps.read_text()
    go_on.set()
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
    begun, go_on = threading.Event(), threading.Event()

    def gate(move: Move) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    node.gate = gate
    ticket = worker.session.retrieve("q", keys, blocks_of(4, 5, 6, 7))
    assert begun.wait(DEADLINE_S)
    ticket.cancel()
    assert ticket.wait(0.02) is None
    go_on.set()
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
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def gate(move: Move) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        ended.set()

    node.gate = gate
    ticket = worker.session.store("r", keys[:1], blocks_of(0))
    assert begun.wait(DEADLINE_S)
    worker.session.close(timeout_s=0.01)
    assert not ticket.done()
    go_on.set()
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
