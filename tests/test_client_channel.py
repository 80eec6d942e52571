"""What several threads of a client use at once: channel, watcher, and descriptors."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstore import Shard, create_host_memory
from kvstore.client_channel import Channel
from kvstore.client_joining import Registering
from kvstore.client_line import LineWatcher
from kvstore.client_waiters import Answer
from kvstore.wire import FRAME_BYTES_MAX
from kvstore.wire_messages import Registration
from tests.link_rig import DEADLINE_S, MEMORY_BYTES, SPACE, eventually, layout


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the daemon's end of it."""
    daemon, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    with daemon:
        channel = Channel(peer, lambda message: None, lambda: None, lambda: None)
        yield channel, daemon
    with channel.condition:
        channel.wait(Answer(), time.monotonic() + DEADLINE_S)
    assert channel.dispose()


def test_what_waits_to_be_sent_is_sent_while_another_thread_waits_for_an_answer(
    ends: tuple[Channel, socket.socket],
) -> None:
    """One thread waits long for its answer; meanwhile another's store doesn't fit into the socket,
    and nobody waits for that one. Once the daemon reads, the client's thread sends the rest."""
    channel, daemon = ends
    message = bytes(FRAME_BYTES_MAX)

    def wait() -> None:
        with channel.condition:
            channel.wait(Answer(), time.monotonic() + DEADLINE_S)

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: channel._polling)
    with channel.condition:
        channel.send(message)
        assert channel._writer.pending_bytes
    left = 4 + len(message)
    daemon.setblocking(False)
    until_s = time.monotonic() + DEADLINE_S / 2
    while left:
        assert time.monotonic() < until_s, f"{left} bytes were never sent"
        with suppress(BlockingIOError):
            left -= len(daemon.recv(left))
        channel.attend()
    daemon.shutdown(socket.SHUT_WR)
    waiting.join(DEADLINE_S)
    assert channel.lost


def test_a_watcher_closes_its_descriptor_while_nobody_can_wake_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that wakes the client's thread writes 8 bytes to a descriptor. Closed meanwhile, its
    number might be that of any file of the engine by then; so both take the lock."""
    watcher = LineWatcher()
    watcher.ensure()
    fd, real = watcher._wake_fd, os.close
    closed: list[tuple[int, bool]] = []

    def close(number: int) -> None:
        closed.append((number, watcher._lock.locked()))
        real(number)

    monkeypatch.setattr("kvstore.client_line.os.close", close)
    watcher.close()
    assert closed == [(fd, True)]
    watcher.wake()


def test_memory_is_let_go_once_however_many_threads_close() -> None:
    """Two threads close a session: the second close of one descriptor would hit another file's."""
    with create_host_memory("engine", MEMORY_BYTES) as memory:
        registration = Registration("e1", SPACE, layout(), Shard(), MEMORY_BYTES)
        joiner = Registering(registration, memory.describe(), "")
        joiner.open()
        fd = joiner._fd
        assert fd is not None
        real, closed = os.close, []

        def close(number: int) -> None:
            closed.append(number)
            if len(closed) == 1:
                joiner.close()
            real(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.client_joining.os.close", close)
            joiner.close()
        assert closed == [fd]
