"""A session's way to the daemon: one link after the other, and the thread that keeps it open.

A Line has at most one Link at a time. When that is lost the Line connects anew by itself, with a
growing pause between tries, and joins again under the same name. A LineWatcher is the one thread
of a client: it waits for hang-ups (not for answers, which their askers read), brings new links up,
and sends transfers whose CUDA event has completed. It starts with the first line and again, with
everything else of the parent left alone, in a forked child.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from kvstore.client_counts import LinkCounts
from kvstore.client_joining import Join
from kvstore.client_link import Link, Phase
from kvstore.client_waiters import End
from kvstore.core.errors import KVStoreError

RETRY_FIRST_S = 0.1
RETRY_LAST_S = 1.0
_READY_STEP_S = 0.0005
"""How often a CUDA event is asked whether it has completed."""
_BUSY_STEP_S = 0.01
_WIND_UP_STEP_S = 1.0
_LEAVE = 1 << 32
"""Added to the eventfd it tells that nobody is left; wakes add 1 each."""
_log = logging.getLogger(__name__)


class Joiner(Protocol):
    """Makes what each link begins with, and holds what that takes."""

    revision: str

    def join(self) -> Join:
        """The next try."""

    def close(self) -> None:
        """There will be no more tries."""


class Line:
    """A session's successive links; owns them and the joiner.

    ``reason`` says why there is no live link.
    """

    def __init__(self, path: str, name: str, joiner: Joiner, watcher: LineWatcher) -> None:
        self.closed = False
        self.reason = "never connected"
        self._path = path
        self._name = name
        self._joiner = joiner
        self._watcher = watcher
        self._counts = LinkCounts()
        self._link: Link | None = None
        self._announced = False
        self._dormant = False
        self._pause_s = RETRY_FIRST_S
        self._retry_at_s = 0.0
        self._process = os.getpid()

    def live(self) -> Link | None:
        """The link, if the daemon takes requests on it."""
        link = self.link()
        if link is not None and link.live():
            return link
        if not self.closed:
            self._watcher.ensure()
            if self._dormant:
                self._dormant = False
                self._watcher.wake()
        return None

    def set_revision(self, revision: str, until_s: float) -> bool:
        """Put this link and those to come under another revision; tells whether the daemon said
        yes in time."""
        self._joiner.revision = revision
        link = self.link()
        return link is not None and link.set_revision(revision, until_s)

    def wake(self) -> None:
        """Let the watcher look at this line now."""
        self._watcher.wake()

    def over(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.closed and self._link is None

    def link(self) -> Link | None:
        """The link there is, in whatever phase; never the parent's of a forked child.

        A child that was forked behind Python's back (no hook ran) can't safely start the thread
        that a new link needs: there the line is closed.
        """
        if self._process != os.getpid():
            self.abandon()
            self.closed = True
            self.reason = "this process was forked without Python's knowledge"
        return self._link

    def counts(self) -> LinkCounts:
        """A copy of what was counted so far."""
        return replace(self._counts)

    def open(self, timeout_s: float) -> KVStoreError | None:
        """Try to join, at most for ``timeout_s``; the answer is why the daemon refuses, if it
        does."""
        until_s = time.monotonic() + timeout_s
        while True:
            link = self._connect()
            if link is not None:
                link.wait(link.opening, until_s)
                self._announce(link)
                if link.refusal is not None:
                    self.close(until_s)
                    return link.refusal
                if link.phase is not Phase.OVER:
                    if link.phase is not Phase.LIVE:
                        self._note(f"the daemon at {self._path} hasn't answered yet")
                    return None
                link.channel.dispose()
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return None
            time.sleep(min(RETRY_FIRST_S / 2, remaining_s))

    def tend(self, now_s: float) -> float:
        """For the watcher: announce changes, drop a lost link, connect when it is time.

        Returns in how many seconds it wants to be tended again.
        """
        link = self._link
        if link is not None:
            self._announce(link)
            if not link.channel.lost:
                return _READY_STEP_S if link.send_ready() else float("inf")
            if not link.channel.dispose():
                return _BUSY_STEP_S
            self._link = None
        if self.closed or self._dormant:
            return float("inf")
        if now_s >= self._retry_at_s:
            self._retry_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_LAST_S)
            self._connect()
            if self.closed:
                self.end()
        return self._retry_at_s - now_s

    def end(self) -> None:
        """Say nothing any more; the daemon answers with the end of the stream. Idempotent."""
        self.closed = True
        link = self.link()
        if link is not None:
            link.end("the session was closed")

    def close(self, until_s: float) -> None:
        """End, and wait for the end of the stream, at most until then. Idempotent; tickets that
        are still open stay so until that end comes."""
        self.end()
        self._joiner.close()
        link = self.link()
        if link is not None:
            link.wait(End(), until_s)
            if link.channel.dispose() or (not link.open_tickets() and link.channel.close()):
                self._link = None

    def abandon(self) -> None:
        """In a forked child: leave the parent's connection alone; the next use connects anew."""
        self._process = os.getpid()
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
        self._counts = LinkCounts()
        self._announced, self._dormant = False, True
        self._retry_at_s, self._pause_s = 0.0, RETRY_FIRST_S

    def _connect(self) -> Link | None:
        peer: socket.socket | None = None
        try:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.setblocking(False)
            peer.connect(self._path)
        except OSError as error:
            if peer is not None:
                peer.close()
            self._note(f"no daemon at {self._path}: {error.strerror}")
            return None
        self._link = Link(peer, self._joiner.join, self._counts, self._watcher.wake)
        self._link.open()
        return self._link

    def _announce(self, link: Link) -> None:
        """Log a link that has become live or ended, once."""
        if link.phase is Phase.LIVE and not self._announced:
            self._announced = True
            self._pause_s = RETRY_FIRST_S
            self.reason = ""
            _log.info("%s: connected to the daemon at %s", self._name, self._path)
        elif link.phase is Phase.OVER and not self.closed:
            if self._announced:
                self._retry_at_s = 0.0
            self._announced = False
            self._note(link.channel.reason)

    def _note(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            _log.warning("%s: %s", self._name, reason)


class Hold:
    """What a client and its sessions have in common: when the last of them is gone, nobody can use
    their lines any more."""


@functools.cache
def watchers() -> weakref.WeakSet[LineWatcher]:
    """All watchers of this process, which a forked child abandons at once. One hook for all: Python
    takes none back."""
    found: weakref.WeakSet[LineWatcher] = weakref.WeakSet()

    def abandon() -> None:
        for watcher in tuple(found):
            watcher.abandon()

    os.register_at_fork(after_in_child=abandon)
    return found


class LineWatcher:
    """The client's thread. The first line starts it, ``close`` ends it, and ``leave`` as well; a
    fork leaves the child without, until ``ensure``."""

    def __init__(self) -> None:
        self._left = False
        self._lines: list[Line] = []
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    def add(self, line: Line) -> None:
        """Keep this line open from now on."""
        with self._lock:
            self._lines.append(line)
        self.ensure()
        self.wake()

    def ensure(self) -> None:
        """Start the thread if it isn't running in this process."""
        if self._process != os.getpid():
            self.abandon()
        if self._thread is not None or self._closed:
            return
        with self._lock:
            if self._thread is None:
                try:
                    self._start()
                except (OSError, RuntimeError) as error:
                    _log.warning("nothing can watch the daemon here: %s", error)

    def wake(self) -> None:
        """Let the thread look at its lines now."""
        with self._lock:
            if self._wake_fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._wake_fd, 1)

    def leave(self) -> None:
        """Have the thread end all lines, and itself: nobody is left who could use them.

        The garbage collector calls it, maybe in the middle of anything here: it takes no lock. Only
        the thread closes the descriptor from here on.
        """
        if self._wake_fd >= 0 and self._process == os.getpid():
            os.eventfd_write(self._wake_fd, _LEAVE)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._process != os.getpid():
            self.abandon()
        self._closed = True
        thread = self._thread
        if thread is not None:
            self.wake()
            thread.join()
            with self._lock:
                self._thread = None
                if self._wake_fd >= 0:
                    os.close(self._wake_fd)
                self._wake_fd = -1

    def abandon(self) -> None:
        """In a forked child: the thread isn't there, and its lock may be held for ever."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        if self._thread is not None:
            self._thread = None
            os.close(self._wake_fd)
            self._wake_fd = -1
        for line in self._lines:
            line.abandon()

    def _start(self) -> None:
        """Raises OSError where no descriptor is left, RuntimeError where no thread is."""
        if self._wake_fd < 0:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while not (self._closed or self._left):
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            found: dict[int, Link] = {}
            wait_s = float("inf")
            now_s = time.monotonic()
            for line in tuple(self._lines):
                wait_s = min(wait_s, line.tend(now_s))
                if line.over():
                    with self._lock:
                        self._lines.remove(line)
                link = line.link()
                if link is not None and not link.channel.lost:
                    fd, events = link.channel.interest(reading=link.phase is not Phase.LIVE)
                    if fd >= 0:
                        poller.register(fd, events)
                        found[fd] = link
            self._attend(poller, found, wait_s)
        if self._left:
            self._wind_up()

    def _wind_up(self) -> None:
        """End every line; one whose blocks are still the daemon's is waited for."""
        lines = self._lines
        while lines:
            for line in lines:
                line.end()
            for line in lines:
                line.close(time.monotonic() + _WIND_UP_STEP_S)
            lines = self._lines = [line for line in lines if not line.over()]
        with self._lock:
            fd, self._wake_fd, self._thread = self._wake_fd, -1, None
            os.close(fd)

    def _attend(self, poller: select.poll, found: dict[int, Link], wait_s: float) -> None:
        """Wait for what the poller watches, then let each link that is due take in what came."""
        timeout_ms = None if wait_s == float("inf") else max(0.0, wait_s * 1000)
        busy = False
        for fd, _ in poller.poll(timeout_ms):
            if fd == self._wake_fd:
                with suppress(BlockingIOError):
                    self._left = os.eventfd_read(fd) >= _LEAVE
            elif not found[fd].channel.attend():
                busy = True
        if busy:
            time.sleep(_BUSY_STEP_S)
