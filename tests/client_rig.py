"""What the tests of the client share: an engine's sessions at a scripted server, and a bare daemon
that says whatever the test wants."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from kvstore import (
    ChunkKeys,
    Client,
    OwnedHostMemory,
    SchedulerSession,
    Shard,
    WorkerSession,
    create_host_memory,
)
from kvstore.core.messages import EngineState
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import FRAME_BYTES_MAX, FrameReader, hello
from kvstore.wire_messages import write_hello, write_reply
from tests.link_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    DIGEST,
    MEMORY_BYTES,
    SPACE,
    folder,
    frame,
    layout,
)

BLOCKS = {"full": [0, 1, 2, 3]}
"""The blocks of one chunk."""


def keys_of(chunks: int) -> ChunkKeys:
    """Some keys."""
    return ChunkKeys(
        b"".join(bytes([i]) * 32 for i in range(1, chunks + 1)), CHUNK_TOKENS, chunks * CHUNK_TOKENS
    )


class Engine:
    """A worker and a scheduler session of one engine, and its memory. A context manager."""

    def __init__(self, path: str, lookup_timeout_s: float = DEADLINE_S) -> None:
        self.client = Client(f"unix:{path}", lookup_timeout_s=lookup_timeout_s)
        self.memory: OwnedHostMemory = create_host_memory("engine", MEMORY_BYTES)
        self._worker: WorkerSession | None = None
        self._scheduler: SchedulerSession | None = None

    @property
    def worker(self) -> WorkerSession:
        """Registered with the first use."""
        if self._worker is None:
            self._worker = self.client.register(
                "e1", SPACE, layout(), self.memory.describe(), Shard()
            )
        return self._worker

    @property
    def scheduler(self) -> SchedulerSession:
        """Attached with the first use."""
        if self._scheduler is None:
            self._scheduler = self.client.attach("e1")
        return self._scheduler

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self.memory.close()


class BareDaemon:
    """Listens, and speaks frames with one client at a time. A context manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(DEADLINE_S)
        self._peer: socket.socket | None = None
        self._reader = FrameReader(FRAME_BYTES_MAX, 4)

    @property
    def peer(self) -> socket.socket:
        """The connection."""
        assert self._peer is not None
        return self._peer

    def accept(self) -> None:
        """Take the next connection."""
        self.hang_up()
        self._peer, _ = self._listener.accept()
        self._peer.settimeout(DEADLINE_S)
        self._reader = FrameReader(FRAME_BYTES_MAX, 4)

    def receive(self) -> pb.ClientMessage:
        """The next message."""
        until_s = time.monotonic() + DEADLINE_S
        while (found := self._reader.next_frame()) is None:
            assert time.monotonic() < until_s
            assert self._reader.receive(self.peer), "the client hung up"
        return pb.ClientMessage.FromString(found)

    def send(self, message: bytes) -> None:
        """Send a message."""
        self.peer.sendall(frame(message))

    def welcome(self, ready: bool = True) -> pb.ClientMessage:
        """Take a connection through HELLO and REGISTER or ATTACH; gives the latter."""
        self.accept()
        self.send(write_hello(self.receive().id, hello()))
        joined = self.receive()
        state = EngineState("e1", ready, DIGEST if ready else b"", CHUNK_TOKENS)
        self.send(write_reply(joined.id, state))
        return joined

    def hang_up(self) -> None:
        """Close the connection."""
        self._reader.close()
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def __enter__(self) -> BareDaemon:
        self._listener.bind(self.path)
        self._listener.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hang_up()
        self._listener.close()


@contextmanager
def bare_daemon() -> Iterator[BareDaemon]:
    """A listening bare daemon in a folder of its own."""
    with folder() as path, BareDaemon(str(path / "s.sock")) as daemon:
        yield daemon
