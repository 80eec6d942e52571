"""DaemonSource: what the admin service may ask of the daemon, each question put to the loop."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvstore import machine
from kvstore.admin_snapshot import InOut, ProcessFacts, Snapshot
from kvstore.core.errors import KVStoreError
from kvstore.core.messages import Clear, Cleared, Refused
from kvstore.core.stats import CoreStats
from kvstore.server import ServerStats
from kvstore.tiers.base import TierIOStats
from kvstore.units import format_size

if TYPE_CHECKING:
    from kvstore.daemon import Daemon

T = TypeVar("T")


class DaemonSource:
    """The running daemon, as ``kvstore.admin.Source`` describes it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def snapshot(self, deadline_s: float) -> Snapshot:
        """All figures; those of core and link are taken at one moment between two events."""
        service, server = self._daemon.service, self._daemon.server
        assert service is not None, "the daemon is open"
        assert server is not None, "the daemon is open"

        def figures() -> tuple[CoreStats, ServerStats]:
            return service.stats(time.monotonic()), server.stats()

        until_s = time.monotonic() + deadline_s
        core, link = _wait(server.call(figures), deadline_s)
        spaces = list(core.spaces)
        while len(spaces) < core.spaces_total:
            # Page by page, so that no engine waits for tens of thousands of namespaces.
            turn = functools.partial(service.spaces, len(spaces))
            page = _wait(server.call(turn), max(0.0, until_s - time.monotonic()))
            if not page:
                break
            spaces += page
        core = replace(core, spaces=tuple(spaces))
        return Snapshot(
            process=self._process(),
            core=core,
            io=self.io(),
            lookup=link.lookup,
            connections=len(link.sessions),
            counters={
                "connections_total": link.connections_total,
                "connections_refused": link.connections_refused,
                "protocol_errors": link.protocol_errors,
                "requests_refused": link.requests_refused,
                "internal_errors": link.internal_errors,
                "sessions_ended": link.sessions_ended,
                "joins_overdue": link.joins_overdue,
            },
            redis=self._daemon.redis.figures(),
        )

    def clear(self, model: str | None, tenant: str | None, deadline_s: float) -> Cleared:
        """Forget chunks; the answer comes when that is durable."""
        server = self._daemon.server
        assert server is not None, "the daemon is open"
        body = _wait(server.admin(Clear(tenant=tenant, model=model)), deadline_s)
        if isinstance(body, Refused):
            raise KVStoreError(body.reason)
        if not isinstance(body, Cleared):
            raise KVStoreError(f"the core answered a clear with {type(body).__name__}")
        return body

    def io(self) -> Mapping[str, InOut]:
        """Each tier's input and output."""
        daemon = self._daemon
        host = daemon.hands.traffic()
        figures = {
            "host": InOut(
                mode=daemon.host.stats().mode,
                reads=host.reads,
                read_bytes=host.read_bytes,
                writes=host.writes,
                write_bytes=host.write_bytes,
            )
        }
        if daemon.nvme is not None:
            nvme = daemon.nvme.stats()
            ahead = f"{nvme.mode} I/O, {format_size(nvme.ahead_bytes)} written ahead"
            figures["nvme"] = _in_out(nvme, ahead)
        redis = daemon.redis.io()
        if redis is not None:
            figures["redis"] = _in_out(redis, redis.mode)
        return figures

    def state(self) -> str:
        """ "ok", or what is degraded."""
        return self._daemon.state()

    def _process(self) -> ProcessFacts:
        daemon = self._daemon
        return ProcessFacts(
            version=daemon.version,
            pid=os.getpid(),
            uptime_s=time.monotonic() - daemon.started_s,
            resident_bytes=machine.resident_bytes(),
            open_files=machine.open_files(),
            threads=threading.active_count(),
            socket=f"unix:{daemon.config.socket}",
            admin=daemon.config.admin.address,
            state=self.state(),
        )


def _in_out(stats: TierIOStats, mode: str) -> InOut:
    return InOut(
        mode=mode,
        reads=stats.reads,
        read_bytes=stats.bytes_read,
        read_busy_s=stats.read_s,
        writes=stats.writes,
        write_bytes=stats.bytes_written,
        write_busy_s=stats.write_s,
        erases=stats.erases,
        errors=stats.errors,
    )


def _wait(future: Future[T], deadline_s: float) -> T:
    """The loop's answer, or one line that says it didn't come in time."""
    try:
        return future.result(deadline_s)
    except TimeoutError as error:
        future.cancel()
        raise KVStoreError(f"the daemon's loop didn't answer within {deadline_s:.1f} s") from error
