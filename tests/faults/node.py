"""Node: a daemon without its shell, in the test's process, whose hands a test can break or hold up.

Core, mover, tiers and engine link are the real ones; clients connect to it from this process or
from others. A gate is a point at which a Move waits until the test lets it go on: no time passes
that a test would have to guess.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvstore.core.layout import Layout
from kvstore.core.limits import Limits, RemoteLimits, TierLimits
from kvstore.core.messages import AllMoved, Move, Moved, Persist, ScanDone, TierName
from kvstore.core.remote_messages import RemoteEvent, RemoteState
from kvstore.core.service import Service
from kvstore.core.stats import CoreStats
from kvstore.daemon_hands import Hands, MappedPages, open_pages
from kvstore.mover import Mover, MoverThreads
from kvstore.server import EngineServer
from kvstore.testing import FaultyTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_settings import RedisSettings
from tests.link_rig import eventually
from tests.small_engine import CHUNK_BYTES, WAIT_S

STAGING = 2
NVME_SLAB_BYTES = 16 * (CHUNK_BYTES + 4096)
_Open = Callable[[int, int, Layout], MappedPages]
T = TypeVar("T")


class Gate:
    """Where a thread of the node waits for the test. ``reached`` tells that one has come."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def hold(self) -> None:
        """In the node's thread: wait until the test opens the gate."""
        self.reached.set()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        """Let all go on, now and from now on."""
        self._opened.set()


@dataclass(slots=True)
class Hooks:
    """What a test puts in the way: ``move`` is called at the begin of every Move, in the mover's
    thread; ``pages`` maps an engine's memory."""

    move: Callable[[Move], None] = lambda move: None
    pages: Callable[[Limits], _Open] = field(default=lambda limits: partial(open_pages, limits))


class Node:
    """A node with places for ``host_chunks`` chunks in host memory and ``nvme_chunks`` on NVMe (0:
    no such tier), both of SmallEngine's chunks, and the Redis at ``redis`` (empty: none). A context
    manager."""

    def __init__(
        self, folder: Path, host_chunks: int, nvme_chunks: int = 0, redis: str = ""
    ) -> None:
        self.path = str(folder / "s.sock")
        self.hooks = Hooks()
        self.nvme: FaultyTier | None = None
        slabs = -(-nvme_chunks // 16)
        if nvme_chunks:
            self._disk = NvmeTier(folder / "nvme", slabs, NVME_SLAB_BYTES)
            self.nvme = FaultyTier(self._disk)
        self.limits = Limits(
            TierLimits(1, host_chunks * CHUNK_BYTES),
            TierLimits(slabs, NVME_SLAB_BYTES) if nvme_chunks else None,
            remote=RemoteLimits(probe_s=WAIT_S) if redis else None,
            staging_slots=STAGING,
        )
        self.core = Service(self.limits)
        self._host = HostTier(1 + STAGING, host_chunks * CHUNK_BYTES)
        tiers = {} if self.nvme is None else {TierName.NVME: self.nvme}
        threads = MoverThreads(copy=2, read=2, write=1)
        self.mover = Mover(self._host, tiers, self._moved, threads, self._at, self._tell)
        self.redis: RedisTier | None = None
        if redis:
            settings = RedisSettings(redis, operation_timeout_s=WAIT_S)
            self.redis = RedisTier(settings, lambda up: self._tell(RemoteState(up)))
        self.server = EngineServer(
            socket_path=self.path,
            service=self.core,
            mover=Hands(self.mover),
            persist=self._persist,
            open_pages=lambda fd, nbytes, layout: self.hooks.pages(self.limits)(fd, nbytes, layout),
            tenants=lambda credential, user: f"uid:{user}",
        )
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def stats(self) -> CoreStats:
        """The core's figures."""
        return self.ask(lambda: self.core.stats(0.0))

    def sessions(self) -> int:
        """Sessions that are open or on their way out."""
        return len(self.ask(self.server.stats).sessions)

    def rest(self) -> None:
        """Wait until nothing is under way, nor waits for its write."""
        eventually(lambda: self.ask(self.core.idle))

    def ask(self, function: Callable[[], T]) -> T:
        """Run a function in the loop's thread."""
        answer: Future[T] = self.server.call(function)
        return answer.result(WAIT_S)

    def __enter__(self) -> Node:
        if self.nvme is not None:
            self.nvme.open()
        self._host.open()
        self.mover.open()
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        self.server.post(ScanDone(TierName.NVME))
        if self.redis is not None:
            self.mover.open_remote(self.redis)
            self.redis.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(WAIT_S)
        self._thread.join(WAIT_S)
        if self.redis is not None:
            self.redis.close()
        self.mover.close()
        self.server.close()
        self._host.close()
        if self.nvme is not None:
            self.nvme.close()
        if self.failure is not None:
            raise self.failure
        self.core.check_invariants()

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run(self._ready.set))
        except Exception as error:  # noqa: BLE001 (handed to the test's thread)
            self.failure = error
        finally:
            self._ready.set()

    def _at(self, point: str, move: Move) -> None:
        if point == "begin":
            self.hooks.move(move)

    def _moved(self, moved: Sequence[Moved]) -> None:
        self.server.post(moved[0] if len(moved) == 1 else AllMoved(tuple(moved)))

    def _tell(self, event: RemoteEvent) -> None:
        self.server.post(event)

    def _persist(self, effect: Persist) -> None:
        if self.nvme is not None:
            self._disk.save_manifest(effect.spaces)
