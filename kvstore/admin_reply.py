"""How a Snapshot becomes the message that goes over the wire, and a message a plain document."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from kvstore.admin_snapshot import InOut, Rates, RedisFigures, Snapshot
from kvstore.core.messages import Cleared
from kvstore.core.stats import (
    CoreStats,
    EngineStats,
    LatencySummary,
    RemoteStats,
    SpaceStats,
    TenantStats,
    TierStats,
)
from kvstore.proto_gen import admin_pb2

SPACES_LISTED_MAX = 1000
"""Namespaces that Stats lists, those with most chunks; the rest is counted. The core may know
65,536."""


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
        tiers=[_tier(tier, snapshot.io, rates) for tier in _rows(core)],
        traffic=_traffic(core, snapshot.lookup),
        engines=[_engine(engine) for engine in core.engines],
        spaces=[_space(space) for space in spaces],
        spaces_more=len(core.spaces) - len(spaces),
        drops={reason: count for reason, count in core.drops.items() if count},
        link=admin_pb2.Link(connections=snapshot.connections, counters=snapshot.counters),
        redis=_redis(snapshot.redis, core.remote),
        tenants=[_tenant(tenant) for tenant in core.tenants],
    )


def clear_reply(cleared: Cleared) -> admin_pb2.ClearReply:
    """What a clear did, as the message that goes over the wire."""
    reply = admin_pb2.ClearReply(namespaces=cleared.namespaces, chunks=cleared.chunks)
    if cleared.remote is not None:
        reply.fleet.namespaces = cleared.remote.namespaces
        reply.fleet.error = cleared.remote.error
    return reply


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


def _rows(core: CoreStats) -> list[TierStats]:
    """The tiers, fastest first. The remote one has no slots and no chunks of this node's own."""
    rows = list(core.tiers)
    remote = core.remote
    if remote is not None:
        hits, misses = remote.hits, remote.misses
        rows.append(TierStats("redis", 0, 0, 0, 0, 0, hits, misses, 0, 0, False, False))
    return rows


def _redis(figures: RedisFigures, remote: RemoteStats | None) -> admin_pb2.Redis:
    gain = figures.raw_bytes / figures.stored_bytes if figures.stored_bytes else 0.0
    reply = admin_pb2.Redis(
        state=figures.state,
        server=figures.server,
        mode=figures.mode,
        nodes=figures.nodes,
        codec=figures.codec,
        raw_bytes=figures.raw_bytes,
        stored_bytes=figures.stored_bytes,
        codec_gain=gain,
        breaker_openings=figures.breaker_openings,
        connection_waits=figures.connection_waits,
        connection_wait_s=figures.connection_wait_s,
        splits=figures.splits,
        evicted=figures.evicted,
    )
    if remote is not None:
        reply.probes = remote.probes
        reply.probes_failed = remote.probes_failed
        reply.probes_late = remote.late
        reply.lookups_waiting = remote.waiting
        reply.lookups_timed_out = remote.timed_out
        reply.lookups_remembered = remote.remembered
        reply.write_backlog = remote.backlog
        reply.chunks_written = remote.written
        reply.chunks_present = remote.present
    return reply


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


def _tenant(tenant: TenantStats) -> admin_pb2.Tenant:
    return admin_pb2.Tenant(
        tenant=tenant.tenant,
        tier=tenant.tier,
        bytes_used=tenant.bytes_used,
        bytes_quota=tenant.bytes_quota or 0,
        has_quota=tenant.bytes_quota is not None,
    )
