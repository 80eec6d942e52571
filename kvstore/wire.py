"""The engine link's framing, handshake and limits, the same on both sides.

A frame is a 4-byte little-endian length and one protobuf message. Descriptors travel as SCM_RIGHTS
with the first bytes of the frame that names them; the kernel never lets one receive run past the
data that brought descriptors, so they belong to the frame that holds the last byte received with
them. Sockets are non-blocking throughout; a reader never allocates what a length only promises.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from kvstore.core.errors import CapacityError, ConfigError, ProtocolError
from kvstore.core.keys import HASH_ALGORITHM, KEY_BYTES, golden_probe
from kvstore.core.limits import SOCKET_PATH_BYTES_MAX
from kvstore.proto_gen import engine_pb2 as pb

VERSION = "0.1.0"
"""The package's version, as in pyproject.toml."""
PROTOCOL = 1
"""Rises with every change that the other side must know of."""

KEYS_MAX = 65_536
"""Keys a message: a million tokens in chunks of 16."""
BLOCKS_BYTES_MAX = 13 << 20
"""Block IDs a message: a million tokens in three groups of one token a block, and some."""
FIELDS_BYTES_MAX = 1 << 20
"""Names, numbers and protobuf tags of a message."""
FRAME_BYTES_MAX: int = KEYS_MAX * KEY_BYTES + BLOCKS_BYTES_MAX + FIELDS_BYTES_MAX
"""16 MiB from a client; a registration of 250,000 tensors fits as well."""
REPLY_BYTES_MAX: int = KEYS_MAX + FIELDS_BYTES_MAX
"""From the daemon: a done mask, one byte a key, and a reason."""
TEXT_CHARACTERS_MAX = 1024
"""Names of requests, engines and revisions, and credentials."""
REASON_CHARACTERS_MAX = 4096
"""What a client keeps of a daemon's reason."""
DESCRIPTORS_MAX = 4
"""Descriptors held for one frame; a registration carries one, more are closed as they come."""

_HEAD = struct.Struct("<I")
_BUFFER_BYTES = 64 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_SENT_AT_ONCE = 64
"""Vectors handed to one sendmsg; the kernel takes 1,024."""


class FrameReader:
    """Cuts what a non-blocking socket delivers into frames, one peer's, in order.

    ``descriptors`` says how many a frame may bring; with 0 the kernel drops them unseen. Owns the
    descriptors that nobody took: they are closed at the next frame and by ``close``.
    ``descriptors_lost`` says that some could not be had, as this process may open no more.
    """

    def __init__(self, frame_bytes_max: int, descriptors: int = 0) -> None:
        self._frame_bytes_max = frame_bytes_max
        self.descriptors_lost = False
        self._descriptors_max = descriptors
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._received_bytes = 0
        self._arrived: deque[tuple[int, int]] = deque()
        self._current: list[int] = []

    def receive(self, source: socket.socket) -> int:
        """Read once and return the bytes read, 0 at the end of the stream.

        Raises BlockingIOError where nothing has come, OSError where the connection is broken.
        """
        if self._end == len(self._buffer):
            self._make_room()
        room = self._view[self._end :]
        if self._descriptors_max:
            count = self._receive_with_descriptors(source, room)
        else:
            count = source.recv_into(room, 0, socket.MSG_DONTWAIT)
            self._received_bytes += count
        self._end += count
        return count

    def next_frame(self) -> bytes | None:
        """The next whole frame's message, or None; raises ProtocolError for a length beyond the
        limit, after which the stream has no meaning any more."""
        if self._current:
            _close_all(self._current)
        start, have = self._start, self._end - self._start
        if have < 4:
            if not have:
                self._rewind()
            return None
        (length,) = _HEAD.unpack_from(self._buffer, start)
        if length > self._frame_bytes_max:
            raise ProtocolError(
                f"frame of {length} bytes; the limit is {self._frame_bytes_max} bytes"
            )
        if have < 4 + length:
            return None
        self._start = start + 4 + length
        if self._arrived:
            position = self._received_bytes - (self._end - self._start)
            while self._arrived and self._arrived[0][0] <= position:
                self._current.append(self._arrived.popleft()[1])
        return bytes(self._view[start + 4 : self._start])

    def take_descriptors(self) -> list[int]:
        """Descriptors that came with the frame returned last; the caller owns them now."""
        taken, self._current = self._current, []
        return taken

    def discard(self) -> None:
        """Forget what was received and not returned, of a stream without meaning."""
        self._rewind()

    def close(self) -> None:
        """Close all descriptors that nobody took. Idempotent."""
        _close_all(self._current)
        while self._arrived:
            os.close(self._arrived.popleft()[1])

    def _receive_with_descriptors(self, source: socket.socket, room: memoryview) -> int:
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        count, ancillary, told, _ = source.recvmsg_into([room], _ANCILLARY_BYTES, flags)
        self._received_bytes += count
        if told & socket.MSG_CTRUNC:
            came = sum(len(data) // 4 for _, _, data in ancillary)
            self.descriptors_lost |= came < DESCRIPTORS_MAX
        for level, kind, data in ancillary:
            if level != socket.SOL_SOCKET or kind != socket.SCM_RIGHTS:
                continue
            for fd in array("i", data[: len(data) // 4 * 4]):
                if len(self._arrived) < self._descriptors_max:
                    self._arrived.append((self._received_bytes, fd))
                else:
                    os.close(fd)
        return count

    def _rewind(self) -> None:
        self._start = self._end = 0
        if len(self._buffer) > _BUFFER_BYTES:
            self._replace(_BUFFER_BYTES)

    def _make_room(self) -> None:
        """Move the unfinished frame to the front; double the buffer where it already lies there."""
        have = self._end - self._start
        grown = min(2 * len(self._buffer), self._frame_bytes_max + 4)
        self._replace(len(self._buffer) if self._start else max(grown, have + 1))

    def _replace(self, capacity_bytes: int) -> None:
        fresh = bytearray(capacity_bytes)
        have = self._end - self._start
        fresh[:have] = self._view[self._start : self._end]
        self._buffer, self._view = fresh, memoryview(fresh)
        self._start, self._end = 0, have


class FrameWriter:
    """Sends frames to a non-blocking socket and keeps what didn't fit, up to a limit."""

    def __init__(self, queue_bytes_max: int) -> None:
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.pending_bytes = 0
        self.sent_bytes = 0

    def send(self, target: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one message as a frame, or queue it behind what waits already.

        ``descriptors`` stay the caller's and must stay open until ``pending_bytes`` is 0. Raises
        CapacityError, with nothing sent of this frame, where it would have to wait behind others
        and the queue would exceed its limit, and OSError where the connection is broken.
        """
        frame = _HEAD.pack(len(message)) + message
        if not self.pending_bytes and not descriptors:
            try:
                sent = target.send(frame, _SEND_FLAGS)
            except BlockingIOError:
                sent = 0
            self.sent_bytes += sent
            if sent < len(frame):
                self._queue.append((memoryview(frame)[sent:], ()))
                self.pending_bytes = len(frame) - sent
            return
        if self.pending_bytes + len(frame) > self._queue_bytes_max:
            raise CapacityError(
                f"{self.pending_bytes} bytes wait to be sent; the limit is "
                f"{self._queue_bytes_max} bytes"
            )
        self._queue.append((memoryview(frame), tuple(descriptors)))
        self.pending_bytes += len(frame)
        self.flush(target)

    def flush(self, target: socket.socket) -> bool:
        """Send what waits; True when nothing does any more. Raises OSError where the connection is
        broken."""
        while self._queue:
            try:
                sent = self._send_front(target)
            except BlockingIOError:
                return False
            self.pending_bytes -= sent
            self.sent_bytes += sent
            self._drop_front(sent)
        return True

    def drop(self) -> None:
        """Forget what waits: nothing more goes to this peer."""
        self._queue.clear()
        self.pending_bytes = 0

    def _send_front(self, target: socket.socket) -> int:
        """Send some of the queue in one call; descriptors go with the first byte of their frame."""
        _, descriptors = self._queue[0]
        ancillary = []
        if descriptors:
            data = array("i", descriptors)
            ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, data))
        parts: list[memoryview] = []
        for view, others in self._queue:
            if parts and (others or len(parts) == _SENT_AT_ONCE):
                break
            parts.append(view)
            if others:
                break
        return target.sendmsg(parts, ancillary, _SEND_FLAGS)

    def _drop_front(self, count: int) -> None:
        while count:
            view, _ = self._queue[0]
            if count < len(view):
                self._queue[0] = (view[count:], ())
                return
            count -= len(view)
            self._queue.popleft()


def socket_path(address: str) -> str:
    """The path in an address, "unix:/path" or the path itself; raises ConfigError for another form
    and for a path that the kernel can't take."""
    path = address.removeprefix("unix://").removeprefix("unix:")
    if "://" in path or not path:
        raise ConfigError(f"address: {address!r}; valid are unix:/path/to/socket and a path")
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path of {length} bytes; the kernel's limit is {SOCKET_PATH_BYTES_MAX}: {path}"
        )
    return path


def read_client_message(frame: bytes) -> pb.ClientMessage:
    """Parse what a client sent; raises ProtocolError for bytes that are no message."""
    try:
        return pb.ClientMessage.FromString(frame)
    except DecodeError as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes that is no message") from error


def read_daemon_message(frame: bytes) -> pb.DaemonMessage:
    """Parse what the daemon sent; raises ProtocolError for bytes that are no message. A reason is
    made safe for a log: one line of bounded length."""
    try:
        message = pb.DaemonMessage.FromString(frame)
    except DecodeError as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes that is no message") from error
    reason = message.reason
    if len(reason) > REASON_CHARACTERS_MAX or not reason.isprintable():
        line = "".join(one if one.isprintable() else "?" for one in " ".join(reason.split()))
        message.reason = line[:REASON_CHARACTERS_MAX]
    return message


def hello() -> pb.Hello:
    """What this side is, for the handshake."""
    return pb.Hello(
        protocol=PROTOCOL,
        package=VERSION,
        hash_algorithm=HASH_ALGORITHM,
        golden_probe=golden_probe(),
        process=os.getpid(),
    )


def hello_mismatch(client: pb.Hello, daemon: pb.Hello) -> str:
    """One line that names both sides' values of everything that differs, and their packages; empty
    where they understand each other. Another package alone is no reason to refuse: daemons and
    engines are upgraded one after the other."""
    pairs = (
        ("protocol", client.protocol, daemon.protocol),
        ("hash algorithm", client.hash_algorithm, daemon.hash_algorithm),
        ("golden probe", client.golden_probe.hex(), daemon.golden_probe.hex()),
    )
    differences = [
        f"{name}: client {_one_line(ours)}, daemon {_one_line(theirs)}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    if not differences:
        return ""
    packages = f"client {_one_line(client.package)}, daemon {_one_line(daemon.package)}"
    return f"kvstore client and daemon differ in {'; '.join(differences)} (packages: {packages})"


def _one_line(value: object) -> str:
    """A peer's value, made safe for one line of a log."""
    return str(value)[:64].encode("unicode_escape").decode("ascii") or "none"


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        with suppress(OSError):
            os.close(descriptors.pop())
