"""A client beside a daemon that is none: it floods, answers what nobody asked, or tells nonsense.

Whatever comes, calls return and nothing but KVStoreError reaches the engine.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from kvstore.core.messages import Done, EngineState
from kvstore.wire_messages import write_reply
from tests.client_rig import BLOCKS, BareDaemon, Engine, bare_daemon, keys_of
from tests.link_rig import CHUNK_TOKENS, DEADLINE_S, DIGEST, eventually, frame

SHORT_S = 0.05
FLOOD_S = 15.0


@pytest.fixture
def bare() -> Iterator[BareDaemon]:
    """A bare daemon."""
    with bare_daemon() as daemon:
        yield daemon


@contextmanager
def joined(bare: BareDaemon, state: EngineState | None = None) -> Iterator[Engine]:
    """An engine whose worker and scheduler are made; the bare daemon speaks with the worker.

    With ``state`` that is what the worker is told of its engine after it has joined.
    """
    with Engine(bare.path, lookup_timeout_s=SHORT_S) as engine:
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        assert engine.worker
        welcome.join()
        if state is not None:
            bare.send(write_reply(0, state))
        try:
            yield engine
        finally:
            bare.hang_up()


FLOOD = """
import socket, sys, time
data = bytes.fromhex(sys.argv[2]) * 200_000
until_s = time.monotonic() + float(sys.argv[3])
with socket.socket(fileno=int(sys.argv[1])) as peer:
    while time.monotonic() < until_s:
        peer.sendall(data)
    print("over", flush=True)
    sys.stdin.read()
"""
"""A process that sends argv[2] without pause to the socket argv[1], for argv[3] seconds, and then
says so."""


def test_flood_holds_no_call(bare: BareDaemon) -> None:
    """The daemon answers without pause what was asked once: every call returns while it does."""
    with joined(bare) as engine:
        worker, fd = engine.worker, bare.peer.fileno()
        arguments = [str(fd), frame(write_reply(1, Done())).hex(), str(FLOOD_S)]
        command = [sys.executable, "-c", FLOOD, *arguments]
        bare.peer.setblocking(True)
        with subprocess.Popen(command, pass_fds=[fd], stdin=PIPE, stdout=PIPE) as flooding:
            ticket = worker.store("r", keys_of(1), BLOCKS)
            select.select([_socket_of(engine)], [], [], DEADLINE_S)
            for _ in range(20):
                assert ticket.wait(SHORT_S) is None
            ticket.cancel()
            worker.lookup("r", keys_of(1))
            worker.release("r")
            assert not worker.set_revision("r2", SHORT_S)
            assert worker.state().connected
            over = select.select([flooding.stdout], [], [], 0)[0]
            flooding.kill()
            assert not over, "the calls returned only when the flood was over"


def _socket_of(engine: Engine) -> int:
    link = engine.worker._line.link()
    assert link is not None
    return link.channel._peer.fileno()


def test_answer_to_what_was_never_sent_breaks_the_protocol(bare: BareDaemon) -> None:
    """A peer that loses count isn't understood: nothing it says is taken any more."""
    with joined(bare) as engine:
        bare.send(write_reply(77, Done()))
        eventually(lambda: engine.worker.lookup("r", keys_of(1)).chunks == 0)
        eventually(lambda: not engine.worker.state().connected)
        bare.hang_up()
        eventually(lambda: "message 77, which was never sent" in engine.worker.state().reason)


@pytest.mark.parametrize(
    "state",
    [
        EngineState("e1", True, b"short", CHUNK_TOKENS),
        EngineState("e1", True, DIGEST, 0),
        EngineState("e1", True, DIGEST, 2 * CHUNK_TOKENS),
    ],
)
def test_engine_that_cannot_be_is_not_believed(bare: BareDaemon, state: EngineState) -> None:
    """A namespace of other than 32 bytes, chunks of no tokens or of another size than the worker
    registered: no key is made of it, and the engine sees misses."""
    with joined(bare, state) as engine:
        eventually(lambda: not _ready(engine))
        assert len(engine.worker.keys(range(64))) == 0
        bare.hang_up()
        eventually(lambda: "what it says of engine" in engine.worker.state().reason)


def _ready(engine: Engine) -> bool:
    engine.worker.keys(range(64))
    engine.worker.lookup("r", keys_of(1))
    return engine.worker.state().ready
