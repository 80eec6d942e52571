"""AdminService: the daemon's administration over gRPC: statistics, clear, health and reflection.

It never touches the core: what it needs of it comes through Source, whose calls run on the loop's
thread and have a deadline. Nothing here evaluates anything; the service has two calls of its own.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.admin_reflection import STREAMS_MAX, BoundedReflection
from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.core.messages import Cleared
from kvstore.core.stats import CoreStats, EngineStats, LatencySummary, SpaceStats, TierStats
from kvstore.proto_gen import admin_pb2

SERVICE = "kvstore.admin.v1.Admin"
THREADS = 4 + STREAMS_MAX
CALLS_MAX = 64
"""Calls and streams at a time; beyond it they are refused rather than queued."""
RATE_WINDOW_S = 10
"""Throughput is averaged over this many seconds, one sample each."""
STOP_GRACE_S, STOP_S = 0.5, 1.0
SPACES_LISTED_MAX = 1000
"""Namespaces that Stats lists, those with most chunks; the rest is counted. The core may know
65,536."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InOut:
    """What one tier has read and written so far; ``mode`` says how it works on this machine."""

    mode: str = ""
    reads: int = 0
    read_bytes: int = 0
    read_busy_s: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_busy_s: float = 0.0
    erases: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts of the daemon's process. ``state`` is "ok" or one line that says what is degraded."""

    version: str
    pid: int
    uptime_s: float
    resident_bytes: int
    open_files: int
    threads: int
    socket: str
    admin: str
    state: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that Stats tells, at one moment."""

    process: ProcessFacts
    core: CoreStats
    io: Mapping[str, InOut]
    lookup: LatencySummary
    connections: int
    counters: Mapping[str, int] = field(default_factory=dict)


class Source(Protocol):
    """The daemon, as administration sees it. Each call may be made from any thread, waits for the
    loop at most ``deadline_s`` and raises KVStoreError with one line for a person."""

    def snapshot(self, deadline_s: float) -> Snapshot:
        """All figures."""

    def clear(self, model: str | None, tenant: str | None, deadline_s: float) -> Cleared:
        """Forget chunks, durably."""

    def io(self) -> Mapping[str, InOut]:
        """Each tier's input and output; never waits."""

    def state(self) -> str:
        """ "ok", or one line that says what is degraded; never waits."""


class Rates:
    """Throughput of each tier over the last RATE_WINDOW_S seconds, from one sample a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, InOut]]] = deque(maxlen=RATE_WINDOW_S + 1)

    def add(self, now_s: float, io: Mapping[str, InOut]) -> None:
        """Take a sample."""
        self._samples.append((now_s, io))

    def of(self, tier: str) -> tuple[float, float]:
        """(bytes read, bytes written) a second."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (then, old), (now, new) = self._samples[0], self._samples[-1]
        if tier not in old or tier not in new or now <= then:
            return 0.0, 0.0
        elapsed = now - then
        read = (new[tier].read_bytes - old[tier].read_bytes) / elapsed
        written = (new[tier].write_bytes - old[tier].write_bytes) / elapsed
        return read, written


class AdminService:
    """The gRPC server at ``address`` (``unix:/path`` or a loopback ``host:port``)."""

    def __init__(self, address: str, source: Source) -> None:
        self.address = address
        self._source = source
        self._rates = Rates()
        self._health = health.HealthServicer()
        self._server: grpc.Server | None = None

    def open(self) -> None:
        """Listen. Raises TierUnavailableError where the address can't be had."""
        _check_free(self.address)
        server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="admin"),
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        streams: Any = BoundedReflection(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(streams, server)
        try:
            server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise TierUnavailableError(
                f"admin.address={self.address} can't be had (in use or not allowed); choose another"
            ) from error
        if self.address.startswith("unix:"):
            os.chmod(self.address.removeprefix("unix:"), 0o600)
        self.sample(0.0)
        server.start()
        self._server = server

    def sample(self, now_s: float) -> None:
        """Take a sample of throughput and health; the daemon calls it once a second."""
        self._rates.add(now_s, self._source.io())
        serving = self._source.state() == "ok"
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            self._health.set(name, status)

    def close(self) -> None:
        """Refuse new calls, let those that run end within STOP_GRACE_S, and stop; nothing that a
        caller does makes it take longer than STOP_S. Idempotent."""
        if self._server is not None:
            self._health.enter_graceful_shutdown()
            self._server.stop(STOP_GRACE_S).wait(STOP_S)
            self._server = None

    def _handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Stats": grpc.unary_unary_rpc_method_handler(
                    self._stats,
                    request_deserializer=admin_pb2.StatsRequest.FromString,
                    response_serializer=admin_pb2.StatsReply.SerializeToString,
                ),
                "Clear": grpc.unary_unary_rpc_method_handler(
                    self._clear,
                    request_deserializer=admin_pb2.ClearRequest.FromString,
                    response_serializer=admin_pb2.ClearReply.SerializeToString,
                ),
            },
        )

    def _stats(
        self, request: admin_pb2.StatsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.StatsReply:
        try:
            snapshot = self._source.snapshot(_deadline(context, 5.0))
        except KVStoreError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        return stats_reply(snapshot, self._rates)

    def _clear(
        self, request: admin_pb2.ClearRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ClearReply:
        try:
            cleared = self._source.clear(
                request.model or None, request.tenant or None, _deadline(context, 30.0)
            )
        except KVStoreError as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        _log.info(
            "cleared model=%.200r tenant=%.200r: %d chunks in %d namespaces",
            request.model, request.tenant, cleared.chunks, cleared.namespaces,
        )  # fmt: skip
        return admin_pb2.ClearReply(namespaces=cleared.namespaces, chunks=cleared.chunks)


def stats_reply(snapshot: Snapshot, rates: Rates) -> admin_pb2.StatsReply:
    """A snapshot as the message that goes over the wire."""
    process, core = snapshot.process, snapshot.core
    spaces = heapq.nlargest(SPACES_LISTED_MAX, core.spaces, key=lambda space: space.chunks)
    return admin_pb2.StatsReply(
        process=admin_pb2.Process(
            version=process.version,
            pid=process.pid,
            uptime_s=process.uptime_s,
            resident_bytes=process.resident_bytes,
            open_files=process.open_files,
            threads=process.threads,
            socket=process.socket,
            admin=process.admin,
            state=process.state,
        ),
        tiers=[_tier(tier, snapshot.io, rates) for tier in core.tiers],
        traffic=_traffic(core, snapshot.lookup),
        engines=[_engine(engine) for engine in core.engines],
        spaces=[_space(space) for space in spaces],
        spaces_more=len(core.spaces) - len(spaces),
        drops={reason: count for reason, count in core.drops.items() if count},
        link=admin_pb2.Link(connections=snapshot.connections, counters=snapshot.counters),
    )


def document(message: Message) -> dict[str, Any]:
    """A message as plain dicts, lists and numbers, every field present, by its name in the
    schema."""
    return {field.name: _plain(message, field) for field in message.DESCRIPTOR.fields}


def _plain(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    return [document(item) for item in value] if field.is_repeated else document(value)


def _tier(tier: TierStats, io: Mapping[str, InOut], rates: Rates) -> admin_pb2.Tier:
    figures = io.get(tier.name, InOut())
    read_bytes_s, write_bytes_s = rates.of(tier.name)
    return admin_pb2.Tier(
        name=tier.name,
        slots_used=tier.slots_used,
        slots_total=tier.slots_total,
        bytes_used=tier.bytes_used,
        bytes_total=tier.bytes_total,
        chunks=tier.chunks,
        hits=tier.hits,
        misses=tier.misses,
        evictions=tier.evictions,
        pinned=tier.pinned,
        scanning=tier.scanning,
        full=tier.full,
        mode=figures.mode,
        io=admin_pb2.InOut(
            reads=figures.reads,
            read_bytes=figures.read_bytes,
            read_bytes_s=read_bytes_s,
            read_busy_s=figures.read_busy_s,
            writes=figures.writes,
            write_bytes=figures.write_bytes,
            write_bytes_s=write_bytes_s,
            write_busy_s=figures.write_busy_s,
            erases=figures.erases,
            errors=figures.errors,
        ),
    )


def _traffic(core: CoreStats, lookup: LatencySummary) -> admin_pb2.Traffic:
    return admin_pb2.Traffic(
        sessions=core.sessions,
        leases=core.leases,
        moves_in_flight=core.moves_in_flight,
        moves_queued=core.moves_queued,
        write_backlog=core.write_backlog,
        lookups=core.lookups,
        lookup_tokens=core.lookup_tokens,
        hit_tokens=core.hit_tokens,
        hit_rate=core.hit_tokens / core.lookup_tokens if core.lookup_tokens else 0.0,
        stored_chunks=core.stored_chunks,
        retrieved_chunks=core.retrieved_chunks,
        lookup=_latency(lookup),
        store=_latency(core.store),
        retrieve=_latency(core.retrieve),
        watchers=core.watchers,
        changes_dropped=core.changes_dropped,
    )


def _latency(summary: LatencySummary) -> admin_pb2.Latency:
    return admin_pb2.Latency(
        count=summary.count,
        p50_s=summary.p50_s,
        p90_s=summary.p90_s,
        p99_s=summary.p99_s,
        max_s=summary.max_s,
    )


def _engine(engine: EngineStats) -> admin_pb2.Engine:
    return admin_pb2.Engine(
        engine=engine.engine,
        tenant=engine.tenant,
        model=engine.model,
        alias=engine.alias,
        ready=engine.ready,
        ranks_registered=engine.ranks_registered,
        ranks=engine.ranks,
        sessions=engine.sessions,
        namespace=engine.namespace,
        uncached=engine.uncached,
    )


def _space(space: SpaceStats) -> admin_pb2.Space:
    return admin_pb2.Space(
        tenant=space.tenant,
        model=space.model,
        alias=space.alias,
        namespace=space.namespace,
        epoch=space.epoch,
        chunks=space.chunks,
    )


def _check_free(address: str) -> None:
    """Refuse a Unix path that a living service listens on, or that is no socket: gRPC would replace
    either. A dead socket is fine."""
    path = address.removeprefix("unix:")
    if path == address:
        return
    if not os.path.isdir(os.path.dirname(path)):
        raise TierUnavailableError(
            f"admin.address={address}: its folder doesn't exist; make it, or choose another address"
        )
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise TierUnavailableError(f"admin.address={address}: the path exists and isn't a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener that is stopped may have its queue full
        if probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise TierUnavailableError(
                f"admin.address={address}: another daemon listens there; choose another address"
            )


def _deadline(context: grpc.ServicerContext, most_s: float) -> float:
    """Seconds that a call may wait for the loop: what its caller allows, and no more than
    most_s."""
    remaining = context.time_remaining()
    return most_s if remaining is None else min(most_s, max(0.0, remaining - 0.1))
