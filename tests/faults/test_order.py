"""Who may touch a block, and when: events of the engine, and copies that aren't acknowledged."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import (
    Client,
    LayerGroup,
    Layout,
    Namespace,
    Shard,
    TensorSpan,
    create_host_memory,
)
from kvstore.core.messages import Move, MoveKind
from tests.faults.conftest import StartEngine, StartNode
from tests.faults.node import Gate
from tests.link_rig import eventually
from tests.small_engine import WAIT_S, tokens

TRIES = 300


class FakeEvent:
    """A CUDA event on a fake stream."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        """Whether the stream has come so far."""
        return self.happened.is_set()


class FakeStream:
    """A device stream: a thread that runs kernels in order, whenever it gets to them."""

    def __init__(self) -> None:
        self._kernels: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def launch(self, kernel: Callable[[], None]) -> FakeEvent:
        """Enqueue a kernel and the event behind it; returns at once."""
        event = FakeEvent()
        self._kernels.put(kernel)
        self._kernels.put(event.happened.set)
        return event

    def close(self) -> None:
        """Run what is enqueued, and end."""
        self._kernels.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (kernel := self._kernels.get()) is not None:
            kernel()


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    """A stream."""
    made = FakeStream()
    yield made
    made.close()


def test_a_store_reads_what_its_kernel_wrote(
    start_node: StartNode, start_engine: StartEngine, stream: FakeStream
) -> None:
    """Field case 14: the store is asked for right behind the launch of the kernel that writes its
    blocks, with the kernel's event: what is stored is the kernel's bytes, in every try."""
    node = start_node(8)
    engine = start_engine(node, 4)
    for seed in range(TRIES):
        keys = engine.keys(tokens(1, seed))
        engine.wipe()
        event = stream.launch(lambda keys=keys: engine.fill(keys))  # type: ignore[misc]
        outcome = engine.begin_store(keys, 0, event).wait(WAIT_S)
        assert outcome is not None
        assert outcome.done == (True,)
        assert engine.retrieve(keys, 2).done == (True,)
        assert engine.right_chunks(keys, 2) == 1, seed


def test_a_store_whose_event_is_withheld_reads_nothing(
    start_node: StartNode, start_engine: StartEngine
) -> None:
    """Field case 14: the kernel hasn't run. The daemon is never asked, so it can't read; other
    requests of the session pass by. Then it runs, and its bytes are what is stored."""
    node = start_node(8)
    moves: list[Move] = []
    node.hooks.move = moves.append
    engine = start_engine(node, 4)
    keys, event = engine.keys(tokens(2)), FakeEvent()
    ticket = engine.begin_store(keys, 0, event)
    for _ in range(50):
        assert engine.hits(keys) == 0
        assert not ticket.done()
    assert not moves
    engine.fill(keys)
    event.happened.set()
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    assert outcome.leading_chunks == 2
    assert engine.retrieve(keys, 2).leading_chunks == 2
    assert engine.right_chunks(keys, 2) == 2


def test_a_retrieve_leaves_blocks_alone_that_a_kernel_still_reads(
    start_node: StartNode, start_engine: StartEngine
) -> None:
    """Field case 15: request X's blocks were given to Y while X's kernel reads them. The load waits
    for X's event: X's bytes don't change before, and Y's are there afterwards."""
    node = start_node(8)
    engine = start_engine(node, 4)
    mine, theirs = engine.keys(tokens(2, 1)), engine.keys(tokens(2, 2))
    engine.fill(mine)
    assert engine.store(mine).leading_chunks == 2
    engine.fill(theirs)
    event = FakeEvent()
    ticket = engine.begin_retrieve(mine, 0, event)
    for _ in range(50):
        assert engine.hits(mine) == 2
        assert engine.right_chunks(theirs) == 2
        assert not ticket.done()
    event.happened.set()
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    assert outcome.leading_chunks == 2
    assert engine.right_chunks(mine) == 2


def test_an_event_that_hangs_holds_its_own_transfer_only(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate]
) -> None:
    """Field case 40: the driver doesn't return from a query. Lookups and transfers of the same
    session go on, and the one that hangs can be cancelled."""
    node = start_node(8)
    engine = start_engine(node, 4)
    keys, others = engine.keys(tokens(1, 1)), engine.keys(tokens(1, 2))
    gate = hold()

    class HangingEvent:
        asked = 0

        def query(self) -> bool:
            """Not yet, and then for ever."""
            self.asked += 1
            if self.asked > 1:
                gate.hold()
            return False

    ticket = engine.begin_store(keys, 0, HangingEvent())
    assert gate.reached.wait(WAIT_S)
    engine.fill(others)
    assert engine.store(others).done == (True,)
    assert engine.hits(others) == 1
    assert engine.hits(keys) == 0
    ticket.cancel()
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    assert outcome.cancelled
    gate.open()
    assert engine.hits(keys) == 0


def test_a_chunk_stays_until_its_load_is_acknowledged(
    start_node: StartNode, start_engine: StartEngine, hold: Callable[[], Gate]
) -> None:
    """Field case 27: a load has been handed out and stands still; everything evictable is evicted,
    twice over. The chunk that it reads from stays and arrives whole; afterwards it can leave."""
    node = start_node(8)
    engine = start_engine(node, 4)
    keys = engine.keys(tokens(1))
    engine.fill(keys)
    assert engine.store(keys).done == (True,)
    gate = hold()
    node.hooks.move = lambda move: gate.hold() if move.kind is MoveKind.LOAD else None
    ticket = engine.begin_retrieve(keys, 2)
    assert gate.reached.wait(WAIT_S)
    for seed in range(1, 17):
        other = engine.keys(tokens(1, seed))
        engine.fill(other)
        assert engine.store(other).done == (True,)
        assert engine.hits(keys) == 1
    gate.open()
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    assert outcome.done == (True,)
    assert engine.right_chunks(keys, 2) == 1
    eventually(lambda: node.stats().moves_in_flight == 0)
    for seed in range(1, 9):
        other = engine.keys(tokens(1, 100 + seed))
        assert engine.store(other).done == (True,)
    assert engine.hits(keys) == 0


LAYERS, BLOCKS = 8, 8
BUFFERS = {"K": 4096, "V": 4096, "index": 4 * 132}
"""Bytes a block of 4 tokens."""


def test_a_retrieve_that_has_ended_has_filled_every_buffer_of_every_layer(
    start_node: StartNode,
) -> None:
    """Field case 28: three buffers a layer, the third of another size. When the ticket is done each
    of them holds what was stored, so whichever an engine reads first is there."""
    node = start_node(64)
    spans, offset = [], 0
    for _ in range(LAYERS):
        for size in BUFFERS.values():
            spans.append(TensorSpan(offset, size, size, BLOCKS))
            offset += size * BLOCKS
    layout = Layout("uint8", 16, (LayerGroup("full", 4, None, tuple(spans)),))
    with Client(node.path) as client, create_host_memory("layers", offset) as memory:
        worker = client.register(
            engine_id="e1",
            namespace=Namespace(model="org/layers", revision="r1", format="test/1"),
            layout=layout,
            memory=memory.describe(),
            shard=Shard(),
        )
        assert worker.wait_ready(WAIT_S)
        array = np.frombuffer(memory.buffer, np.uint8)
        array[:] = np.random.default_rng(1).integers(0, 256, offset, np.uint8)
        before = array.copy()
        keys = worker.keys(range(33))
        blocks = {"full": list(range(8))}
        stored = worker.store("r", keys, blocks).wait(WAIT_S)
        assert stored is not None
        assert stored.leading_chunks == 2
        array[:] = 0
        back = worker.retrieve("r", keys, blocks).wait(WAIT_S)
        assert back is not None
        assert back.leading_chunks == 2
        assert np.array_equal(array, before)
        del array
