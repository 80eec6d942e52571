"""RedisWatch: the tier's own thread. It finds the servers, tries those that are down, and deletes
what a clear left behind; nothing that an operation waits for is done here.

A round is due every ``round_s``: each server is asked what it is, over a fresh connection where its
breaker is open, which closes it. The map of servers is asked for again when one is down or an
answer showed it to be out of date, at most once in DISCOVERY_S, and every REFRESH_S anyhow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvstore.core.errors import CapacityError, ChunkCorruptError, TierUnavailableError
from kvstore.tiers.redis_epochs import RedisEpochs, Space
from kvstore.tiers.redis_errors import REPLICA
from kvstore.tiers.redis_lane import Lane, Reply, ReplyError
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_node import RedisNode
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_settings import RedisMode, RedisSettings

DISCOVERY_S = 1.0
REFRESH_S = 30.0
SWEEP_NAMES = 1000
"""Names that a step of a sweep looks at."""
SWEEP_STEPS_MAX = 1_000_000
"""At one server; a cursor that never ends is a server that lies."""
SWEEPS_MAX = 1000
"""Clears that wait for their sweep; the values of others leave by TTL, eviction or a later one."""
STOP_S = 0.5
"""How long ``close`` waits for the thread: not for a connect that is under way."""

_ENDED = object()
_ELSEWHERE = ("MOVED", "ASK")
_REFUSED = (CapacityError, ChunkCorruptError, TierUnavailableError)


class RedisWatch:
    """The thread ``kvstore-redis`` with what it looks after: ``servers`` and ``epochs``.

    ``changed`` is called without any lock held whenever a server goes up or down, or isn't one of
    ours any more.
    """

    def __init__(
        self, settings: RedisSettings, names: RedisNames, changed: Callable[[], None]
    ) -> None:
        self.servers = RedisServers(settings, changed, self._outdated)
        self.epochs = RedisEpochs(self.servers, names)
        self.server = ""
        """Kind and version, once one was reached."""
        self._names = names
        self._round_s = settings.round_s
        self._due = threading.Event()
        self._closed = threading.Event()
        self._is_outdated = True
        self._discovered_s = 0.0
        self._sweeping: Iterator[None] | None = None
        self._sweeps: deque[Space] = deque(maxlen=SWEEPS_MAX)
        self._thread = threading.Thread(target=self._run, name="kvstore-redis", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End everything; idempotent. A connect that is under way may outlive it by its timeout."""
        self._closed.set()
        self._due.set()
        self.servers.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def sweep(self, space: Space) -> None:
        """Delete the chunks of a namespace's former epochs, some time."""
        self._sweeps.append(space)
        self._due.set()

    def _outdated(self) -> None:
        self._is_outdated = True
        self._due.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            is_busy = False
            try:
                self._round()
                is_busy = self._go_on_sweeping(time.monotonic() + self._round_s)
            except _REFUSED:
                # Said by the breakers and the state; the next round tries again.
                self._sweeping = None
            if not is_busy:
                self._due.wait(self._round_s)
            self._due.clear()

    def _go_on_sweeping(self, until_s: float) -> bool:
        """Steps of sweeps until it's time for the next round; whether there is more to do."""
        while time.monotonic() < until_s and not self._closed.is_set():
            if self._sweeping is None:
                if not self._sweeps:
                    return False
                self._sweeping = self._sweep(self._sweeps.popleft())
            if next(self._sweeping, _ENDED) is _ENDED:
                self._sweeping = None
        return True

    def _round(self) -> None:
        nodes = self.servers.nodes()
        age_s = time.monotonic() - self._discovered_s
        if not nodes or self._is_outdated or age_s > REFRESH_S or not all(n.is_up for n in nodes):
            self._closed.wait(max(0.0, DISCOVERY_S - age_s))
            self._is_outdated = False
            self._discovered_s = time.monotonic()
            self.servers.discover()
        for node in self.servers.nodes():
            if self._closed.is_set():
                return
            self._look_at(node)
        if self._is_lost():
            self.epochs.enter_again()

    def _look_at(self, node: RedisNode) -> None:
        if not node.is_up:
            node.check(self._test)
            return
        try:
            with node.lane() as lane:
                self._test(lane)
        except (ReplyError, TierUnavailableError):
            # Counted by the node's breaker.
            return

    def _test(self, lane: Lane) -> None:
        """Whether the server serves: it answers, and we may look at names. Raises ReplyError."""
        commands = [
            (b"PING",), (b"EXISTS", self._names.spaces),
            (b"INFO", b"server"), (b"INFO", b"replication"),
        ]  # fmt: skip
        pong, exists, info, replication = lane.call(commands)
        for reply in (pong, exists):
            if isinstance(reply, ReplyError) and reply.code not in _ELSEWHERE:
                raise reply
        fields = _fields(info)
        # Valkey's name for it, then Redis's.
        mode = fields.get("server_mode") or fields.get("redis_mode")
        if mode == "cluster" and self.servers.mode is not RedisMode.CLUSTER:
            raise ReplyError("it is a node of a Cluster; its address begins with redis+cluster://")
        is_replica = _fields(replication).get("role", "").strip() == "slave"
        if is_replica and self.servers.mode is not RedisMode.CLUSTER:
            raise ReplyError(f"it {REPLICA}")
        self.server = _kind(fields) or self.server

    def _is_lost(self) -> bool:
        """Whether the registry lacks what was entered."""
        return self.epochs.registered() < self.epochs.entered

    def _sweep(self, space: Space) -> Iterator[None]:
        """Walk over every server's names once, and unlink those of former epochs, in steps."""
        epoch = self.epochs.read(space)
        before = self._names.space(space)
        for node in self.servers.nodes():
            cursor = b"0"
            for _ in range(SWEEP_STEPS_MAX):
                yield
                try:
                    with node.lane() as lane:
                        cursor = self._step(lane, cursor, before, epoch)
                except (ReplyError, TierUnavailableError):
                    # No right to SCAN, or gone; what is left leaves by TTL or eviction.
                    break
                if cursor == b"0":
                    break

    @staticmethod
    def _step(lane: Lane, cursor: bytes, before: bytes, epoch: int) -> bytes:
        """One SCAN and one UNLINK; gives the next cursor."""
        reply = lane.ask((b"SCAN", cursor, b"MATCH", before + b"*", b"COUNT", SWEEP_NAMES))
        if not (isinstance(reply, list) and len(reply) == 2 and isinstance(reply[0], bytes)):
            return b"0"
        names = reply[1] if isinstance(reply[1], list) else []
        old = [n for n in names if isinstance(n, bytes) and _epoch(n, before) < epoch]
        lane.call([(b"UNLINK", name) for name in old])
        return reply[0]


def _epoch(name: bytes, before: bytes) -> int:
    """The epoch in a chunk's name. Another name that matches has none, and isn't old."""
    digits = name[len(before) :].partition(b":")[0]
    return int(digits) if digits.isdigit() and len(digits) < 20 else 1 << 64


def _fields(info: Reply) -> dict[str, str]:
    """INFO's text, where we may have it."""
    lines = info.decode("utf-8", "replace").splitlines() if isinstance(info, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _kind(fields: dict[str, str]) -> str:
    """``Valkey 9.1.2`` from INFO."""
    for name, kind in (("valkey_version", "Valkey"), ("redis_version", "Redis")):
        if name in fields:
            return f"{kind} {fields[name]}"
    return ""
