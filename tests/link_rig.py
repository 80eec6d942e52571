"""What the tests of the engine link share: a server in a thread with scripted core and hands, and a
bare peer that speaks frames."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore import HostMemory, LayerGroup, Layout, Namespace, Shard, TensorSpan, create_host_memory
from kvstore.client_joining import Registering
from kvstore.core.messages import (
    Attach,
    Body,
    Cancel,
    Completed,
    Detach,
    Done,
    Effect,
    EngineState,
    Event,
    HitStatus,
    Lookup,
    LookupReply,
    Message,
    Move,
    Persist,
    Register,
    Release,
    Reply,
    Request,
    Retrieve,
    SessionClosed,
    SessionID,
    SetRevision,
    Store,
    Tick,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.server import EngineServer
from kvstore.wire import REPLY_BYTES_MAX, FrameReader, hello
from kvstore.wire_messages import Registration

DEADLINE_S = 30.0
"""How long a test waits for what must happen before it fails."""
CHUNK_TOKENS = 16
BLOCK_BYTES = 64
BLOCKS = 32
MEMORY_BYTES = BLOCKS * BLOCK_BYTES
SPACE = Namespace("org/model", "r1", "test/1")
DIGEST = b"\x07" * 32


def layout(blocks: int = BLOCKS) -> Layout:
    """One group, one tensor, 4 tokens a block, 4 blocks a chunk."""
    span = TensorSpan(0, BLOCK_BYTES, BLOCK_BYTES, blocks)
    return Layout("float16", CHUNK_TOKENS, (LayerGroup("full", 4, None, (span,)),))


def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until a condition holds; fails after DEADLINE_S."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, what or "it never happened"
        time.sleep(0.002)


def open_descriptors() -> list[str]:
    """What this process has open, but for what some thread reads of /proc."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(name for name in found if not name.startswith("/proc/"))


class ScriptedCore:
    """Stands in for the core: answers at once, except that transfers stay open until the test
    completes them, and that ``busy`` sessions aren't detached until the test says so.

    ``answers`` replaces how a kind of message is answered. ``queued`` effects leave with the next
    event.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.queued: list[Effect] = []
        self.busy: set[SessionID] = set()
        self.transfers: dict[tuple[SessionID, int], int] = {}
        self.answers: dict[type[Message], Callable[[Request], list[Effect]]] = {}
        self.moves = 0
        self.error: Exception | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The core's one verb."""
        if not isinstance(event, Tick):
            self.events.append(event)
        if self.error is not None and not isinstance(event, Tick):
            error, self.error = self.error, None
            raise error
        effects = []
        if isinstance(event, Request):
            answer = self.answers.get(type(event.message), self._answer)
            effects = answer(event)
        elif isinstance(event, SessionClosed) and event.session not in self.busy:
            effects = [Detach(event.session)]
        queued, self.queued = self.queued, []
        return effects + queued

    def idle(self) -> bool:
        """Whether no Move is under way."""
        return self.moves == 0

    def next_tick_s(self, now: float) -> float:
        """Ticks often, so that queued effects leave soon."""
        return 0.005

    def requests(self, kind: type[Message]) -> list[Request]:
        """Requests with this kind of message so far."""
        found = [e for e in self.events if isinstance(e, Request)]
        return [e for e in found if isinstance(e.message, kind)]

    def closed(self) -> list[SessionID]:
        """Sessions whose end was told, as often as it was."""
        return [e.session for e in self.events if isinstance(e, SessionClosed)]

    def _answer(self, event: Request) -> list[Effect]:
        message = event.message
        body: Body = Done()
        if isinstance(message, Register | Attach):
            body = EngineState(message.engine, True, DIGEST, CHUNK_TOKENS)
        elif isinstance(message, SetRevision):
            body = EngineState("e1", True, message.revision.encode().ljust(32), CHUNK_TOKENS)
        elif isinstance(message, Lookup):
            body = LookupReply(HitStatus.HIT, len(message.keys) // 32)
        elif isinstance(message, Store | Retrieve):
            self.transfers[event.session, event.id] = len(message.keys) // 32
            return []
        elif isinstance(message, Cancel):
            chunks = self.transfers.pop((event.session, message.transfer))
            completed = Completed(bytes(chunks), cancelled=True)
            return [
                Reply(event.session, event.id, Done()),
                Reply(event.session, message.transfer, completed),
            ]
        else:
            assert isinstance(message, Release), message
        return [Reply(event.session, event.id, body)]


class ScriptedMover:
    """Stands in for the mover: notes what it is told."""

    def __init__(self) -> None:
        self.attached: dict[SessionID, object] = {}
        self.moves: list[Move] = []

    def attach(self, session: SessionID, pages: object) -> None:
        """A session's pages are known."""
        self.attached[session] = pages

    def detach(self, session: SessionID) -> None:
        """A session's pages are forgotten."""
        del self.attached[session]

    def submit(self, *moves: Move) -> None:
        """Moves are to be done."""
        self.moves.extend(moves)


class ScriptedPages:
    """An engine's memory, as far as the server knows: it can be closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        """Unmap."""
        self.closed += 1


class Rig:
    """A server in a thread of its own. A context manager; at its end the server must have stopped
    without an error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.core = ScriptedCore()
        self.mover = ScriptedMover()
        self.pages: list[ScriptedPages] = []
        self.opening: Callable[[], None] = lambda: None
        self.persisting: Callable[[Persist], None] = lambda effect: None
        self.failure: BaseException | None = None
        self.server = EngineServer(
            path, self.core, self.mover, self._persist, self._open, self._tenant
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> Rig:
        """Listen."""
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def stop(self, drain_s: float = DEADLINE_S) -> None:
        """Stop as a daemon does, and wait for it. Idempotent."""
        self.server.stop(drain_s)
        self.join()

    def join(self) -> None:
        """Wait for the server's end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.server.close()

    def emit(self, *effects: Effect) -> None:
        """Let the core say something by itself."""
        self.server.call(lambda: self.core.queued.extend(effects)).result(DEADLINE_S)

    def complete(self, done: Sequence[int], reason: str = "") -> None:
        """Complete the oldest transfer."""
        eventually(lambda: bool(self.core.transfers), "no transfer came")
        session, number = next(iter(self.core.transfers))
        del self.core.transfers[session, number]
        self.emit(Reply(session, number, Completed(bytes(done), reason=reason)))

    def __enter__(self) -> Rig:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run(self._ready.set))
        except Exception as error:  # noqa: BLE001 (handed to the test's thread)
            self.failure = error
        finally:
            self._ready.set()

    def _persist(self, effect: Persist) -> None:
        self.persisting(effect)

    def _open(self, fd: int, nbytes: int, shape: Layout) -> ScriptedPages:
        self.opening()
        os.fstat(fd)
        pages = ScriptedPages()
        self.pages.append(pages)
        return pages

    def _tenant(self, credential: str, user: int) -> str:
        return credential or f"uid:{user}"


@contextmanager
def folder() -> Iterator[Path]:
    """A folder whose sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as path:
        yield Path(path)


@contextmanager
def running_rig() -> Iterator[Rig]:
    """A running server in a folder of its own."""
    with folder() as path, Rig(str(path / "d" / "s.sock")) as running:
        yield running


@contextmanager
def engine_memory() -> Iterator[int]:
    """The descriptor of an engine's memory."""
    with create_host_memory("engine", MEMORY_BYTES) as owned:
        yield owned.fd


class Peer:
    """A bare client that says whatever the test wants."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)
        self._reader = FrameReader(REPLY_BYTES_MAX)
        self._last_id = 0

    def send(self, message: pb.ClientMessage, descriptors: Sequence[int] = ()) -> int:
        """Number and send a message; gives its ID."""
        self._last_id += 1
        message.id = self._last_id
        self.send_bytes(frame(message.SerializeToString()), descriptors)
        return self._last_id

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send bytes as they are."""
        sent = socket.send_fds(self.socket, [data], list(descriptors)) if descriptors else 0
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def receive(self) -> pb.DaemonMessage | None:
        """The next message, None at the end of the stream."""
        until_s = time.monotonic() + DEADLINE_S
        while (found := self._reader.next_frame()) is None:
            assert time.monotonic() < until_s, "no message came"
            try:
                if not self._reader.receive(self.socket):
                    return None
            except BlockingIOError:
                time.sleep(0.001)
            except ConnectionResetError:
                return None
        return pb.DaemonMessage.FromString(found)

    def answer(self) -> pb.DaemonMessage:
        """The next message, which must come."""
        message = self.receive()
        assert message is not None, "the stream ended"
        return message

    def greet(self) -> None:
        """Shake hands."""
        self.send(pb.ClientMessage(kind=pb.ClientMessage.HELLO, hello=hello()))
        assert self.answer().kind == pb.DaemonMessage.HELLO

    def attach(self, engine: str = "e1") -> None:
        """Shake hands and attach."""
        self.greet()
        self.send(pb.ClientMessage(kind=pb.ClientMessage.ATTACH, engine=engine))
        assert self.answer().kind == pb.DaemonMessage.ENGINE

    def register(self, descriptors: Sequence[int], shape: Layout | None = None) -> None:
        """Send a REGISTER, without waiting for its answer."""
        self.send(register_message(shape or layout()), descriptors)

    def refusal(self) -> str:
        """The next message is a refusal: its line."""
        message = self.answer()
        assert message.kind == pb.DaemonMessage.REFUSED
        assert "\n" not in message.reason
        return str(message.reason)

    def is_quiet(self) -> bool:
        """Whether nothing has come, not even the end of the stream."""
        return not select.select([self.socket], [], [], 0)[0]

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lookup_message() -> pb.ClientMessage:
    """A LOOKUP of two keys."""
    return pb.ClientMessage(kind=pb.ClientMessage.LOOKUP, request="r", keys=b"k" * 64)


def store_message() -> pb.ClientMessage:
    """A STORE of one chunk."""
    return pb.ClientMessage(
        kind=pb.ClientMessage.STORE, request="r", keys=b"k" * 32, blocks=[bytes(16)]
    )


def register_message(shape: Layout) -> pb.ClientMessage:
    """A REGISTER of engine e1, rank 0."""
    registration = Registration("e1", SPACE, shape, Shard(), MEMORY_BYTES)
    return Registering(registration, HostMemory(0, MEMORY_BYTES), "").join().message


def frame(message: bytes) -> bytes:
    """A frame around a message."""
    return struct.pack("<I", len(message)) + message


def admin_answer(rig: Rig, message: Message) -> Body:
    """What the administration is answered."""
    return rig.server.admin(message).result(DEADLINE_S)
