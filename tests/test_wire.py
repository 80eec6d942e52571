"""Frames, descriptors, limits and the handshake, over real socket pairs."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import __version__, wire
from kvstore.core.errors import CapacityError, ConfigError, ProtocolError
from kvstore.proto_gen import engine_pb2 as pb
from tests.link_rig import frame, open_descriptors

LIMIT = 1 << 20
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected, non-blocking sockets."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def read_all(reader: wire.FrameReader, source: socket.socket) -> list[bytes]:
    """Every whole frame that has come."""
    frames: list[bytes] = []
    while True:
        try:
            if not reader.receive(source):
                return frames
        except BlockingIOError:
            return frames
        while (found := reader.next_frame()) is not None:
            frames.append(found)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(st.binary(max_size=3000), max_size=8), cut=st.integers(1, 700))
def test_frames_round_trip_however_they_are_cut(messages: list[bytes], cut: int) -> None:
    """A stream arrives in pieces of any size; the frames come out whole and in order."""
    stream = b"".join(frame(message) for message in messages)
    reader = wire.FrameReader(LIMIT)
    left, right = socket.socketpair()
    found = []
    with left, right:
        for start in range(0, len(stream), cut):
            left.sendall(stream[start : start + cut])
            found += read_all(reader, right)
    assert found == messages


@settings(max_examples=60, deadline=None)
@given(message=st.binary(min_size=1, max_size=500), keep=st.integers(0, 499))
def test_a_truncated_frame_never_comes_out(message: bytes, keep: int) -> None:
    """A peer dies in the middle of a frame: what came of it is no frame."""
    reader = wire.FrameReader(LIMIT)
    left, right = socket.socketpair()
    with left, right:
        left.sendall(frame(message)[: min(keep, len(message)) + 3])
        assert read_all(reader, right) == []


def test_a_lying_length_is_refused_and_costs_no_memory(pair: Pair) -> None:
    """A length beyond the limit ends the stream; one within it is only allocated as bytes come."""
    left, right = pair
    reader = wire.FrameReader(LIMIT)
    left.send((LIMIT).to_bytes(4, "little") + b"x" * 100)
    assert read_all(reader, right) == []
    assert len(reader._buffer) < LIMIT // 8
    greedy = wire.FrameReader(LIMIT)
    left.send((LIMIT + 1).to_bytes(4, "little"))
    greedy.receive(right)
    with pytest.raises(ProtocolError, match=f"frame of {LIMIT + 1} bytes; the limit is {LIMIT}"):
        greedy.next_frame()


def test_a_frame_of_the_limit_passes_and_the_buffer_shrinks_again(pair: Pair) -> None:
    """The largest frame is delivered whole, and an idle connection keeps no large buffer."""
    left, right = pair
    reader, writer = wire.FrameReader(LIMIT), wire.FrameWriter(2 * LIMIT)
    message = os.urandom(LIMIT)
    writer.send(left, message)
    found: list[bytes] = []
    while not found:
        found = read_all(reader, right)
        writer.flush(left)
    assert found == [message]
    assert reader.next_frame() is None
    assert len(reader._buffer) <= 1 << 16


def test_a_writer_sends_in_part_and_keeps_order(pair: Pair) -> None:
    """The socket takes a part of a message; what is sent after it comes after it."""
    left, right = pair
    reader, writer = wire.FrameReader(LIMIT), wire.FrameWriter(LIMIT)
    messages = [bytes([i]) * 300_000 for i in range(3)]
    for message in messages:
        writer.send(left, message)
    assert writer.pending_bytes > 0
    found: list[bytes] = []
    while len(found) < 3:
        writer.flush(left)
        found += read_all(reader, right)
    assert found == messages
    assert writer.pending_bytes == 0
    assert writer.sent_bytes == sum(len(message) + 4 for message in messages)


def test_a_writer_refuses_beyond_its_limit_and_sends_nothing_of_that(pair: Pair) -> None:
    """Nobody reads: the queue is bounded, and a refused message leaves no torn frame behind."""
    left, right = pair
    writer = wire.FrameWriter(queue_bytes_max=1000)
    writer.send(left, b"a" * 600_000)
    waiting = writer.pending_bytes
    with pytest.raises(CapacityError, match="wait to be sent"):
        writer.send(left, b"b" * 100)
    assert writer.pending_bytes == waiting
    reader = wire.FrameReader(LIMIT)
    found: list[bytes] = []
    while not found:
        writer.flush(left)
        found = read_all(reader, right)
    assert found == [b"a" * 600_000]


def test_descriptors_belong_to_the_frame_that_they_came_with(pair: Pair) -> None:
    """Three frames in one go, the middle one sent with a descriptor: only that one may take it."""
    left, right = pair
    reader = wire.FrameReader(LIMIT, descriptors=4)
    inside, outside = os.pipe()
    try:
        left.send(frame(b"one"))
        socket.send_fds(left, [frame(b"two")], [inside])
        left.send(frame(b"three"))
        taken: dict[bytes, list[int]] = {}
        while len(taken) < 3:
            reader.receive(right)
            while (found := reader.next_frame()) is not None:
                taken[found] = reader.take_descriptors()
        assert [len(taken[name]) for name in (b"one", b"two", b"three")] == [0, 1, 0]
        (got,) = taken[b"two"]
        assert os.get_inheritable(got) is False
        os.write(outside, b"!")
        assert os.read(got, 1) == b"!"
        os.close(got)
    finally:
        os.close(inside)
        os.close(outside)


def test_a_writer_sends_descriptors_with_the_first_byte_of_their_frame(pair: Pair) -> None:
    """A descriptor queued behind a message that the socket took in part still comes with its own
    frame."""
    left, right = pair
    reader = wire.FrameReader(LIMIT, descriptors=4)
    writer = wire.FrameWriter(2 * LIMIT)
    inside, outside = os.pipe()
    writer.send(left, b"a" * 500_000)
    writer.send(left, b"named", (inside,))
    found: list[tuple[int, list[int]]] = []
    while len(found) < 2:
        writer.flush(left)
        reader.receive(right)
        while (message := reader.next_frame()) is not None:
            found.append((len(message), reader.take_descriptors()))
    os.close(inside)
    os.close(outside)
    assert found[0] == (500_000, [])
    assert found[1][0] == 5
    (got,) = found[1][1]
    os.close(got)


def test_descriptors_that_nobody_takes_are_closed(pair: Pair) -> None:
    """A peer sends descriptors that no frame claims, more than a frame may have, and some in an
    unfinished frame: none stays open."""
    left, right = pair
    before = open_descriptors()
    reader = wire.FrameReader(LIMIT, descriptors=4)
    with open(os.devnull) as spare:
        for _ in range(3):
            socket.send_fds(left, [frame(b"x")], [spare.fileno()] * 9)
        read_all(reader, right)
        assert reader.next_frame() is None
        for _ in range(20):
            socket.send_fds(left, [b"\xff\0\0\0"[:1] if _ else b"\xff\0\0\0"], [spare.fileno()])
            reader.receive(right)
            assert reader.next_frame() is None
        reader.close()
        reader.close()
    assert open_descriptors() == before


def test_a_reader_without_descriptors_never_opens_any(pair: Pair) -> None:
    """The client wants none: what a peer sends along is dropped by the kernel."""
    left, right = pair
    before = open_descriptors()
    reader = wire.FrameReader(LIMIT)
    with open(os.devnull) as spare:
        socket.send_fds(left, [frame(b"x")], [spare.fileno()])
    assert read_all(reader, right) == [b"x"]
    assert open_descriptors() == before


def test_the_end_of_the_stream_is_zero_bytes_and_nothing_is_an_error(pair: Pair) -> None:
    """Nothing to read raises BlockingIOError; a closed peer reads as 0."""
    left, right = pair
    reader = wire.FrameReader(LIMIT)
    with pytest.raises(BlockingIOError):
        reader.receive(right)
    left.close()
    assert reader.receive(right) == 0


def test_hellos_that_agree_have_no_mismatch() -> None:
    """Processes differ in their ID, and daemons and engines are upgraded one after the other."""
    other = wire.hello()
    other.process = 1
    other.package = "9.9.9"
    assert wire.hello_mismatch(wire.hello(), other) == ""


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", 9, ["protocol: client 9, daemon 1"]),
        ("hash_algorithm", "md5", ["hash algorithm: client md5", "daemon sha256/chain-v1"]),
        ("golden_probe", b"\1" * 32, ["golden probe: client 0101", "daemon "]),
    ],
)
def test_a_mismatch_is_one_line_that_names_both_sides(
    field: str, value: object, words: list[str]
) -> None:
    """Each thing that the handshake compares is named with both sides' values (field cases 3 and
    59)."""
    client = wire.hello()
    setattr(client, field, value)
    line = wire.hello_mismatch(client, wire.hello())
    assert "\n" not in line
    for word in [*words, f"(packages: client {__version__}, daemon {__version__})"]:
        assert word in line


def test_a_peers_text_stays_on_one_line() -> None:
    """A peer can't write lines of its own into our log."""
    client = wire.hello()
    client.package = "1\n2" * 100
    client.protocol = 9
    line = wire.hello_mismatch(client, wire.hello())
    assert "\n" not in line
    assert len(line) < 400


def test_a_socket_path_that_is_too_long_is_refused_with_both_lengths() -> None:
    """The kernel would cut it off or fail with a bare EINVAL."""
    path = "/tmp/" + "x" * 200
    with pytest.raises(ConfigError, match="socket path of 205 bytes; the kernel's limit is 107"):
        wire.socket_path(f"unix:{path}")
    assert wire.socket_path("/" + "x" * 106) == "/" + "x" * 106


@pytest.mark.parametrize(
    ("address", "path"),
    [("unix:/a/b", "/a/b"), ("unix:///a/b", "/a/b"), ("/a/b", "/a/b"), ("a/b", "a/b")],
)
def test_an_address_is_a_path(address: str, path: str) -> None:
    """With the scheme or without."""
    assert wire.socket_path(address) == path


@pytest.mark.parametrize("address", ["", "unix:", "tcp://host:1", "http://x"])
def test_another_address_is_refused(address: str) -> None:
    """The engine link is a Unix socket."""
    with pytest.raises(ConfigError, match="valid are unix:/path"):
        wire.socket_path(address)


def test_limits_are_the_sums_that_they_say() -> None:
    """A frame holds the keys, the blocks and the fields that messages may have."""
    assert wire.FRAME_BYTES_MAX == 16 << 20
    assert wire.KEYS_MAX * 32 + wire.BLOCKS_BYTES_MAX + wire.FIELDS_BYTES_MAX == 16 << 20


def test_the_version_is_that_of_the_package() -> None:
    """The handshake names what pyproject.toml releases."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == wire.VERSION == __version__


def test_bytes_that_are_no_message_are_a_protocol_error() -> None:
    """Both sides say so with the frame's size."""
    for read in (wire.read_client_message, wire.read_daemon_message):
        with pytest.raises(ProtocolError, match="a frame of 3 bytes that is no message"):
            read(b"\xff\xff\xff")


def test_a_daemons_reason_is_one_line_however_it_was_sent() -> None:
    """It goes into the engine's log: nothing in it may drive a terminal, forge a line or fill the
    disk."""
    sent = pb.DaemonMessage(kind=pb.DaemonMessage.REFUSED, reason="a\n b\x1b[2J" + "x" * 10_000)
    reason = wire.read_daemon_message(sent.SerializeToString()).reason
    assert reason.startswith("a b?[2Jxxx")
    assert len(reason) == wire.REASON_CHARACTERS_MAX
