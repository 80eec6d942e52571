"""RedisNode: one server as the tier sees it: a bounded pool of lanes, and a circuit breaker.

Three failures in a row open the breaker: from then on nobody waits for this server; whoever asks
for a lane is refused at once. The tier's own thread tries a fresh lane every few seconds, and one
whole answer closes it. Credentials that are refused open it at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.redis_errors import AUTH_FAILED, AuthFailedError, is_sick, of_lane, of_reply
from kvstore.tiers.redis_lane import Lane, ReplyError
from kvstore.tiers.redis_settings import host_text

FAILURES_MAX = 3
CONNECTING = "not connected yet"


@dataclass(frozen=True, slots=True)
class NodeStats:
    """``reason`` is empty while the breaker is closed. Waits are for a free connection."""

    reason: str
    openings: int
    waits: int
    wait_s: float
    lanes: int


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """The most lanes to a server, and how long an exchange waits for one of them."""

    connections: int
    wait_s: float


class RedisNode:
    """A server by host and port (a Unix socket's path and 0). Starts with an open
    breaker, CONNECTING. Thread-safe.

    ``connect`` gives a new lane or raises TierUnavailableError, and ``find`` does where the server
    may be elsewhere by now: it may block for long, and only ``check`` does it. ``changed`` is
    called, without any lock held, whenever the breaker opens or closes.
    """

    def __init__(
        self,
        server: tuple[str, int],
        connect: Callable[[], Lane],
        find: Callable[[], Lane],
        limits: NodeLimits,
        changed: Callable[[], None],
    ) -> None:
        self.host, self.port = server
        self.address = host_text(*server) if self.port else self.host
        self._connect = connect
        self._find = find
        self._limits = limits
        self._changed = changed
        self._free = threading.Condition()
        self._idle: list[Lane] = []
        self._used: set[Lane] = set()
        self._connecting = 0
        self._failures = 0
        self._reason = CONNECTING
        self._openings = 0
        self._waits = 0
        self._wait_s = 0.0
        self._closed = False

    @property
    def is_up(self) -> bool:
        """Whether the breaker is closed."""
        return not self._reason

    def trust(self) -> None:
        """A server that works named this one: it may be used before the tier's thread tried it."""
        with self._free:
            if self._reason == CONNECTING:
                self._reason = ""

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for one exchange. What breaks it in between closes it: its next reply could be
        another question's.

        Raises TierUnavailableError: the breaker is open, no lane was free in time, or the server
        failed meanwhile; and the ReplyErrors of whoever uses it.
        """
        lane = self.take()
        whole = False
        try:
            yield lane
            whole = True
        except ReplyError as error:
            whole = True
            self._judge([error])
            raise
        except OSError as error:
            raise self._broken(error) from error
        finally:
            self._give_back(lane, whole)
        self._judge([])

    def broke(self, lane: Lane, error: OSError) -> TierUnavailableError:
        """End a lane that was taken and broke; gives the error to raise."""
        self._give_back(lane, whole=False)
        return self._broken(error)

    def done(self, lane: Lane, errors: Sequence[ReplyError]) -> None:
        """End a lane that was taken; all its replies are there, these errors among them."""
        self._give_back(lane, whole=True)
        self._judge(errors)

    def check(self, test: Callable[[Lane], None]) -> None:
        """Find the server and try a fresh lane; if ``test`` goes well the breaker is closed."""
        try:
            lane = self._find()
        except TierUnavailableError as error:
            self._open(_reason(error))
            return
        try:
            test(lane)
        except ReplyError as error:
            lane.close()
            self._open(_reason(of_reply(error, self.address)))
            return
        except OSError as error:
            lane.close()
            self._open(_reason(of_lane(error, self.address)))
            return
        with self._free:
            keep = not self._closed and len(self._idle) + len(self._used) < self._limits.connections
            if keep:
                self._idle.append(lane)
            was = self._reason
            if not self._closed:
                self._reason, self._failures = "", 0
            self._free.notify()
        if not keep:
            lane.close()
        if was != self._reason:
            self._changed()

    def close(self) -> None:
        """Close all lanes; those in use end at once with an error. Idempotent."""
        with self._free:
            self._closed = True
            self._reason = "closed"
            idle, self._idle = self._idle, []
            for lane in self._used:
                lane.cut()
            self._free.notify_all()
        for lane in idle:
            lane.close()

    def stats(self) -> NodeStats:
        """A snapshot."""
        with self._free:
            lanes = len(self._idle) + len(self._used)
            return NodeStats(self._reason, self._openings, self._waits, self._wait_s, lanes)

    def take(self) -> Lane:
        """A lane, idle or new, which must be ended by ``broke`` or ``done``. Raises
        TierUnavailableError: the breaker is open, or no lane was free in time, or none can be
        made."""
        stale: list[Lane] = []
        try:
            with self._free:
                lane = self._idle_or_room(stale)
        finally:
            for one in stale:
                one.close()
        if lane is not None:
            lane.begin()
            return lane
        try:
            lane = self._connect()
        except TierUnavailableError as error:
            with self._free:
                self._connecting -= 1
                self._free.notify()
            self._fail(error)
            raise
        with self._free:
            self._connecting -= 1
            self._used.add(lane)
            if self._closed:
                lane.cut()
        return lane

    def _idle_or_room(self, stale: list[Lane]) -> Lane | None:
        """Under the lock. None: the caller makes a lane, whose room is reserved."""
        deadline_s = None
        while True:
            if self._reason:
                raise TierUnavailableError(f"redis: {self.address} is down: {self._reason}")
            while self._idle:
                lane = self._idle.pop()
                if lane.is_quiet():
                    self._used.add(lane)
                    return lane
                stale.append(lane)
            if len(self._used) + self._connecting < self._limits.connections:
                self._connecting += 1
                return None
            now_s = time.monotonic()
            if deadline_s is None:
                deadline_s = now_s + self._limits.wait_s
                self._waits += 1
            if now_s >= deadline_s:
                raise TierUnavailableError(
                    f"redis: none of {self._limits.connections} connections to {self.address} was "
                    "free in time"
                )
            self._free.wait(deadline_s - now_s)
            after_s = time.monotonic()
            self._wait_s += after_s - now_s

    def _give_back(self, lane: Lane, whole: bool) -> None:
        with self._free:
            self._used.discard(lane)
            keep = whole and not self._reason
            if keep:
                self._idle.append(lane)
            self._free.notify()
        if not keep:
            lane.close()

    def _judge(self, errors: Sequence[ReplyError]) -> None:
        """What the replies of a whole exchange mean to the breaker."""
        sick = next(filter(is_sick, errors), None)
        if sick is not None:
            self._fail(of_reply(sick, self.address))
        elif self._failures:
            with self._free:
                self._failures = 0

    def _broken(self, error: OSError) -> TierUnavailableError:
        failed = of_lane(error, self.address)
        self._fail(failed)
        return failed

    def _fail(self, error: Exception) -> None:
        with self._free:
            self._failures += 1
            due = self._failures >= FAILURES_MAX or isinstance(error, AuthFailedError)
        if due:
            self._open(_reason(error))

    def _open(self, reason: str) -> None:
        with self._free:
            if self._closed:
                return
            was, self._reason = self._reason, reason
            idle, self._idle = self._idle, []
            if not was:
                self._openings += 1
            self._free.notify_all()
        for lane in idle:
            lane.close()
        if was != reason:
            self._changed()


def _reason(error: Exception) -> str:
    return AUTH_FAILED if isinstance(error, AuthFailedError) else str(error).removeprefix("redis: ")
