"""Daemon: the composition root. It alone sees Config, builds every object and ties them together.

Order of a start: lock the NVMe folder, reserve the arena, listen on the engines' socket; only then,
in threads, come the scan of the NVMe tier, Redis and the admin service (importing gRPC takes longer
than everything before it), so an engine that connects early is served at once, with misses. Order
of a stop: no new work, what waits for NVMe and Redis is written for at most DRAIN_S, sessions end,
Redis is left, threads end, and the NVMe folder is marked as cleanly left. A second signal ends the
process at once, as does a stop that takes longer than STOP_S.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError, InvariantError, KVStoreError
from kvstore.core.eviction import POLICIES, Policy
from kvstore.core.messages import (
    AllMoved,
    Event,
    Moved,
    Persist,
    ScanDone,
    Scanned,
    ScannedSlot,
    TierName,
)
from kvstore.core.service import Service
from kvstore.daemon_hands import Hands, open_pages
from kvstore.daemon_parts import (
    describe,
    disable_huge_pages,
    limits_of,
    nvme_tier,
    raise_open_files,
)
from kvstore.daemon_redis import DaemonRedis
from kvstore.mover import Mover, MoverThreads
from kvstore.server import EngineServer
from kvstore.sizing import Config
from kvstore.tiers.base import Tier
from kvstore.tiers.host import HostTier
from kvstore.tiers.threads import start_thread
from kvstore.units import format_duration

if TYPE_CHECKING:
    from kvstore.admin import AdminService

SWITCH_INTERVAL_S = 1e-4
"""A busy Python thread gives the loop its turn after this long; the default costs 5 ms."""
DRAIN_S = 7.0
STOP_S = 9.5
SCAN_EVENT_SLOTS = 200
"""Slots of the scan that the core takes in at a time, so that requests don't wait for thousands."""
SAMPLE_S = 1.0
LOOP_ANSWER_S = 2.0

_log = logging.getLogger(__name__)

Announce = Callable[[list[str]], None]
"""Called once, when engines and administration can connect, with lines for a person."""


class Daemon:
    """Everything that one ``kvstore serve`` is made of. ``run`` opens it, serves and closes it."""

    def __init__(self, config: Config, version: str, announce: Announce) -> None:
        self.config = config
        self.version = version
        self.started_s = time.monotonic()
        self.problem = ""
        self._stalled = ""
        self._failure = ""
        self._bug = ""
        self._policy = policy(config.eviction)
        self.host = HostTier(config.host.slabs() + config.host.staging_slots, config.host.slab_size)
        self.nvme = nvme_tier(config.nvme)
        tiers: dict[TierName, Tier] = {} if self.nvme is None else {TierName.NVME: self.nvme}
        threads = config.threads
        self.mover = Mover(
            self.host,
            tiers,
            report=self._moved,
            threads=MoverThreads(copy=threads.copy, read=threads.read, write=threads.write),
            answer=self._post,
        )
        self.redis = DaemonRedis(config.redis, self.mover, self._post)
        self.hands = Hands(self.mover)
        self.service: Service | None = None
        self.server: EngineServer | None = None
        self.admin: AdminService | None = None
        self._announce = announce
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Serve until a signal. Raises KVStoreError where the daemon can't start, InvariantError
        where a bug stopped it."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.disable()
        threading.excepthook = self._thread_died
        if self.config.host.huge_pages == "off":
            disable_huge_pages()
        os.umask(0o077)  # gRPC binds its socket before its mode can be set
        raise_open_files()
        sound = True
        try:
            self._open()
            asyncio.run(self._serve())
            if self._bug:
                raise InvariantError(self._bug)
        except InvariantError:
            # A bug: nothing is known to be right, so the folder isn't marked as cleanly left.
            sound = False
            raise
        finally:
            if sound:
                self._close()
        if self._failure:
            raise KVStoreError(self._failure)

    def stop(self) -> None:
        """A signal: the first ends the daemon in order, the second at once."""
        if self._stop.is_set():
            _log.warning("a second signal: stopping at once")
            _exit_now()
        _log.info("stopping: what waits for its write is given %.0f s", DRAIN_S)
        self._stop.set()
        watchdog = threading.Timer(STOP_S, _exit_late)
        watchdog.daemon = True
        watchdog.start()
        if self.server is not None:
            self.server.stop(DRAIN_S)

    def state(self) -> str:
        """ "ok", or one line that says what is degraded."""
        if self._stop.is_set():
            return "stopping"
        failing = self.nvme.stats().failing if self.nvme is not None else ""
        tier = f"the NVMe tier fails: {failing}" if failing else ""
        return self.problem or self._stalled or self.mover.stats().degraded or tier or "ok"

    def _open(self) -> None:
        """Everything up to the server; what was opened is closed by ``_close``."""
        if self.nvme is not None:
            self.nvme.open()
        self.host.open()
        self.mover.open()
        spaces = self.nvme.load_manifest() if self.nvme is not None else ()
        limits = limits_of(self.config)
        self.service = Service(limits, spaces, self._policy)
        self.server = EngineServer(
            socket_path=str(self.config.socket),
            service=self.service,
            mover=self.hands,
            persist=self._persist,
            open_pages=functools.partial(open_pages, limits),
            tenants=_tenant,
        )

    async def _serve(self) -> None:
        assert self.server is not None, "open first"
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.server.run(self._listening)

    def _listening(self) -> None:
        """Engines can connect; everything else happens beside them."""
        self._start("start", self._finish_start)
        if self.nvme is not None:
            self._start("scan", self._scan)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(start_thread(name, target))

    def _finish_start(self) -> None:
        """In a thread: Redis, the admin service, then the lines that say how to connect, then
        samples."""
        try:
            self.redis.open()
            self._open_admin()
        except KVStoreError as error:
            self._fail(str(error))
            return
        gc.freeze()
        took = format_duration(time.monotonic() - self.started_s)
        self._announce([*describe(self), f"ready in {took}"])
        while not self._stop.wait(SAMPLE_S):
            self._sample()
        self._admin_service().sample(time.monotonic())

    def _fail(self, reason: str) -> None:
        """From any thread: stop, and have ``run`` raise the reason."""
        self._failure = self._failure or reason
        if not self._stop.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def _thread_died(self, hook: threading.ExceptHookArgs) -> None:
        """A thread of this process ended by an error that nobody expected: that is a bug."""
        name = hook.thread.name if hook.thread is not None else "a thread"
        _log.critical("%s died", name, exc_info=hook.exc_value)
        self._bug = f"{name} died: {hook.exc_value!r}"
        self._fail(self._bug)

    def _admin_service(self) -> AdminService:
        """The admin service, once it is open."""
        assert self.admin is not None, "open"
        return self.admin

    def _open_admin(self) -> None:
        from kvstore.admin import AdminService
        from kvstore.daemon_admin import DaemonSource

        admin = AdminService(self.config.admin.address, DaemonSource(self))
        admin.open()
        self.admin = admin

    def _sample(self) -> None:
        assert self.server is not None, "open"
        answered = self.server.call(lambda: None)
        try:
            answered.result(LOOP_ANSWER_S)
            self._stalled = ""
        except TimeoutError:
            self._stalled = f"the loop hasn't answered for {LOOP_ANSWER_S:.0f} s"
            _log.error("%s", self._stalled)
        except KVStoreError:
            return
        self._admin_service().sample(time.monotonic())

    def _scan(self) -> None:
        """In a thread: what the NVMe tier holds from before."""
        assert self.nvme is not None, "open"
        start_s = time.monotonic()
        try:
            self.nvme.scan(self._scanned, self._stop)
        except KVStoreError as error:
            self.problem = f"the NVMe tier wasn't read in whole: {error}"
            _log.error("%s", self.problem)
        if not self._stop.is_set():
            self._post(ScanDone(TierName.NVME))
            _log.info("nvme: scanned in %s", format_duration(time.monotonic() - start_s))

    def _scanned(self, slots: tuple[ScannedSlot, ...]) -> None:
        """Hand slots to the core in small steps, each when it has taken in the one before."""
        assert self.server is not None, "open"
        for first in range(0, len(slots), SCAN_EVENT_SLOTS):
            self._post(Scanned(slots[first : first + SCAN_EVENT_SLOTS]))
            taken = self.server.call(lambda: None)
            while not self._stop.is_set():
                try:
                    taken.result(0.2)
                    break
                except TimeoutError:
                    continue
                except KVStoreError:
                    return

    def _moved(self, moved: Sequence[Moved]) -> None:
        """In the mover's threads: Moves have ended."""
        self._post(moved[0] if len(moved) == 1 else AllMoved(tuple(moved)))

    def _post(self, *events: Event) -> None:
        assert self.server is not None, "open"
        self.server.post(*events)

    def _persist(self, effect: Persist) -> None:
        """In the server's thread for it: make the namespaces durable, where there is a disk."""
        if self.nvme is not None:
            self.nvme.save_manifest(effect.spaces)

    def _close(self) -> None:
        """Close whatever is open, in the order that loses nothing."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.redis.close()  # or the mover would wait for a server that doesn't answer
        self.mover.close()
        if self.server is not None:
            self.server.close()
        if self.nvme is not None:
            self.nvme.close()
        # Behind what must not be lost: whoever asks for figures decides nothing about the folder.
        if self.admin is not None:
            self.admin.close()
        self.host.close()


def policy(name: str) -> Callable[[], Policy]:
    """The eviction policy of this name: one of ours, or an entry point of the group
    ``kvstore.policies``. Raises ConfigError for any other name."""
    if name in POLICIES:
        return POLICIES[name]
    found = {entry.name: entry for entry in entry_points(group="kvstore.policies")}
    if name not in found:
        valid = ", ".join([*POLICIES, *found])
        raise ConfigError(f"eviction={name}: no such policy is installed; valid are {valid}")
    loaded: Callable[[], Policy] = found[name].load()
    return loaded


def _tenant(credential: str, user: int) -> str:
    """The tenant of a peer: its user. Credentials come with a later version, and one that can't be
    checked is refused rather than ignored."""
    if credential:
        raise ConfigError(
            "credential: this daemon knows none; give none, and the tenant is the peer's user"
        )
    return f"uid:{user}"


def _exit_late() -> None:
    _log.error("the stop took longer than %.1f s: leaving without a clean mark", STOP_S)
    _exit_now()


def _exit_now() -> None:
    """End the process without waiting for anything; what is committed is on disk already."""
    logging.shutdown()
    os._exit(1)
