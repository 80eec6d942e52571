"""The bytes and threads of a client's connection: a socket that its users read themselves.

There is no reader thread. Whoever waits for an answer polls the socket and hands out whatever it
meets on the way. When several threads wait, one of them polls, without the lock, and the others
sleep on a condition until it has read something; nobody else reads meanwhile, since the poller
would sleep on beside an answer that was taken from under it. Sends never block: what the socket
doesn't take is queued.

A channel is lost only at the end of the stream. That is a fence: the daemon closes a socket when no
Move uses the session's memory any more. A channel that finds the daemon's bytes senseless, or is
closed by its user, therefore shuts down its own direction and awaits the daemon's.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.client_waiters import Waiter
from kvstore.core.errors import ProtocolError
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import (
    FRAME_BYTES_MAX,
    REPLY_BYTES_MAX,
    FrameReader,
    FrameWriter,
    read_daemon_message,
)

WAITING_BYTES_MAX = 1 << 20
"""A burst of transfers, beyond what the socket holds; where more waits the daemon isn't reading."""
_SMALL_MESSAGES_BYTES_MAX = 1 << 20
OUTGOING_BYTES_MAX = WAITING_BYTES_MAX + FRAME_BYTES_MAX + _SMALL_MESSAGES_BYTES_MAX
"""What may wait, the message that goes beyond that, and releases and cancels behind it."""
_FLUSH_STEP_S = 0.005
_DRAIN_S = 0.005
STEP_MAX_S = 3600.0
"""A wait sleeps this long at a time at most: polling takes no more than some days."""
_IN, _OUT, _GONE = select.POLLIN, select.POLLOUT, select.POLLRDHUP


class Channel:
    """A connected, non-blocking socket shared by threads; owns it.

    ``dispatch`` is called, under the lock, with each message that comes, ``on_lost`` once at the
    end of the stream, and ``on_queued`` when a send had to queue something: whoever watches the
    channel is to send it, as nobody may wait for anything. ``condition`` is the lock: methods that
    say so expect it held. ``reason`` says in one line why the channel ended. A wait looks at its
    waiter every ``step_s`` at least, for waiters that something else than a message may settle.
    """

    def __init__(
        self,
        peer: socket.socket,
        dispatch: Callable[[pb.DaemonMessage], None],
        on_lost: Callable[[], None],
        on_queued: Callable[[], None],
    ) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.lost = False
        self.ending = False
        self.reason = ""
        self.step_s = STEP_MAX_S
        self._peer = peer
        self._dispatch = dispatch
        self._on_lost = on_lost
        self._on_queued = on_queued
        self._reader = FrameReader(REPLY_BYTES_MAX)
        self._writer = FrameWriter(OUTGOING_BYTES_MAX)
        self._deaf = False
        self._poller = select.poll()
        self._polled_events = 0
        self._polling = False

    def send(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send or queue a message; with the lock. A broken connection isn't an error here: it is
        found at its end. Raises CapacityError where the queue is full."""
        if self.ending or self.lost:
            return
        try:
            self._writer.send(self._peer, message, descriptors)
        except OSError:
            self._broken()
        if self._writer.pending_bytes:
            self._on_queued()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; with the lock. Tells whether nothing
        waits any more."""
        if self._writer.pending_bytes:
            try:
                return self._writer.flush(self._peer)
            except OSError:
                self._broken()
        return True

    def full(self) -> bool:
        """Whether so much waits to be sent that nothing is to be added; with the lock."""
        self.flush()
        return self._writer.pending_bytes > WAITING_BYTES_MAX

    def drain(self) -> None:
        """Take in what has come, unless another thread is about to; with the lock. A daemon that
        never stops sending is left for the next call after a turn's time."""
        until_s = time.monotonic() + _DRAIN_S
        while not (self._polling or self.lost) and self._receive():
            if time.monotonic() > until_s:
                return

    def wait(self, waiter: Waiter, until_s: float) -> None:
        """Take in what comes until the waiter is settled or the channel lost, at most until then.

        With the lock, which is released while the thread sleeps.
        """
        while not waiter.settled and not self.lost:
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                self.drain()
                return
            flushed = self.flush()
            step_s = min(self.step_s, remaining_s)
            if not self._polling:
                self._poll(step_s, flushed)
            else:
                self.condition.wait(step_s if flushed else min(step_s, _FLUSH_STEP_S))

    def end(self, reason: str) -> None:
        """Send nothing any more and await the end of the stream; with the lock. Idempotent."""
        if not self.ending and not self.lost:
            self.ending = True
            self.reason = reason
            self._writer.drop()
            with suppress(OSError):
                self._peer.shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------ for the thread that watches

    def interest(self, reading: bool) -> tuple[int, int]:
        """The descriptor and the poll events at which ``attend`` is to be called; without
        ``reading`` only the hang-up, as answers are for their askers to read."""
        with self.condition:
            events = _GONE | _IN if reading or self.ending else _GONE
            if self._writer.pending_bytes:
                events |= _OUT
            return self._peer.fileno(), events

    def attend(self) -> bool:
        """Send what waits and take in what has come; False where another thread is about to take it
        in. That one polls without a look at what was queued since."""
        with self.condition:
            self.flush()
            if self._polling:
                return False
            self.drain()
            self.condition.notify_all()
            return True

    def dispose(self) -> bool:
        """Close a lost channel's socket; False while a thread still polls it."""
        with self.condition:
            if self._polling or not self.lost:
                return False
            self._peer.close()
            return True

    def close(self) -> bool:
        """Close the socket without the end of the stream; False while a thread still polls it. Only
        where nothing of the engine is the daemon's: what is under way counts as lost."""
        with self.condition:
            if self._polling:
                return False
            if not self.lost:
                self._lose("the session was closed")
            self._peer.close()
            return True

    def abandon(self) -> None:
        """In a forked child: close the copy of the parent's socket, unread. The parent's stream
        hasn't ended, so ``on_lost`` isn't called. Takes no lock, for its holder may not exist
        here."""
        self.condition = threading.Condition(threading.Lock())
        self._polling = False
        self._peer.close()
        if not self.lost:
            self.lost = True
            self.reason = "this process was forked"

    # ------------------------------------------------------------ private

    def _poll(self, timeout_s: float, flushed: bool) -> None:
        events = _IN if flushed else _IN | _OUT
        if events != self._polled_events:
            self._poller.register(self._peer.fileno(), events)
            self._polled_events = events
        condition = self.condition
        self._polling = True
        condition.release()
        try:
            ready = self._poller.poll(timeout_s * 1000)
        finally:
            condition.acquire()
            self._polling = False
            condition.notify_all()
        if ready and not self.lost:
            self._receive()

    def _receive(self) -> bool:
        """Read once and act on what came; False where nothing had."""
        try:
            count = self._reader.receive(self._peer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror}")
            return True
        if not count:
            self._lose("the daemon closed the connection")
            return True
        try:
            if self._deaf:
                self._reader.discard()
                return True
            while (frame := self._reader.next_frame()) is not None:
                self._dispatch(read_daemon_message(frame))
        except ProtocolError as error:
            self._deaf = True
            self.end(f"the daemon broke the protocol: {error}")
        return True

    def _broken(self) -> None:
        """A send failed, so the daemon has closed: take in what it said last, up to the end."""
        self._writer.drop()
        self.drain()
        self.end("the daemon takes nothing any more")

    def _lose(self, reason: str) -> None:
        self.lost = True
        self.reason = self.reason or reason
        self._writer.drop()
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._on_lost()
        self.condition.notify_all()
