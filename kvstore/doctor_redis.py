"""Doctor for Redis: what a server or Cluster is like as a tier, and what to change on it
(``kvstore doctor --redis URL``).

It connects as the tier does, by the same settings, writes one value of a chunk's size to each
server under a name of its own, reads it back and deletes it; a crash in between leaves it for a
minute. No line holds a credential.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import closing

from kvstore.core.errors import KVStoreError
from kvstore.doctor_findings import Finding, Status
from kvstore.doctor_redis_look import CHUNK_BYTES, PINGS, Info, Looked, look, plain
from kvstore.tiers.redis_errors import (
    AUTH_FAILED,
    NO_DATABASE,
    NO_NODE,
    NO_SENTINEL,
    NO_SERVER,
    NO_TLS,
)
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_settings import RedisMode, RedisSettings
from kvstore.units import format_size

VERSION_MIN = (6, 0)
"""Users of ACLs came with it."""
LATENCY_S = 0.002
SLOW_BYTES_S = 200e6
"""Below this a chunk of a small model takes longer than computing it on a GPU."""
FULL_SHARE = 0.9
LOOPBACK = ("127.", "localhost", "::1")
UNLIMITED = "set maxmemory and maxmemory-policy allkeys-lru on it, or redis.namespace_size"


def examine(settings: RedisSettings, probe_timeout_s: float) -> list[Finding]:
    """All checks. Where no server can be reached only that is found. Raises ConfigError."""
    servers = RedisServers(settings, _nothing, _nothing)
    with closing(servers):
        reason = _discover(servers)
        nodes = servers.nodes()
        looked = [look(servers, node, settings.prefix) for node in nodes]
    findings = [_address(settings), _reachable(settings, looked, reason)]
    there = [one for one in looked if not one.error]
    if not there:
        return findings
    if all(one.info for one in there):
        findings += [_version(there), _role(settings, there)]
        findings += [_policy(settings, there), _memory(there), _persistence(there)]
        findings.append(_connections(settings, there))
    else:
        advice = "to have version, role and memory checked give the user +info"
        findings.append(Finding("redis info", Status.WARN, "INFO is refused", advice))
    return [*findings, _latency(there, probe_timeout_s), _chunk(there)]


def _discover(servers: RedisServers) -> str:
    """Find the servers; why none were found, or nothing."""
    try:
        servers.discover()
    except KVStoreError as error:
        return plain(error)
    return servers.reason


def _address(settings: RedisSettings) -> Finding:
    """How it is reached."""
    address = settings.address
    secured = "TLS" if address.tls else "no TLS"
    who = f"user {address.username}" if address.username else "default user"
    detail = f"{address.mode.value}, {address.shown}, {secured}, {who}"
    outside = [host for host, _ in address.hosts if not host.startswith(LOOPBACK)]
    if address.password and outside and not address.tls:
        advice = "the password and all KV cross the network readable; use rediss://"
        return Finding("redis address", Status.WARN, detail, advice)
    return Finding("redis address", Status.OK, detail)


def _reachable(settings: RedisSettings, looked: Sequence[Looked], reason: str) -> Finding:
    name = "redis servers"
    failed = [one for one in looked if one.error]
    if not looked:
        return Finding(name, Status.FAIL, reason or "none was found", _way_out(reason, settings))
    if failed:
        detail = ", ".join(_named(one) for one in failed)
        said = f"{len(failed)} of {len(looked)} can't be used: {detail}"
        return Finding(name, Status.FAIL, said, _way_out(failed[0].error, settings))
    return Finding(name, Status.OK, f"{len(looked)} of {len(looked)} answer")


def _named(looked: Looked) -> str:
    """Its address and error; some errors name it themselves."""
    known = looked.address in looked.error
    return looked.error if known else f"{looked.address}: {looked.error}"


def _way_out(reason: str, settings: RedisSettings) -> str:
    """What to do about a server that can't be used."""
    for said, advice in _ADVICE.items():
        if said in reason:
            return advice
    if "certificate" in reason.lower() or "ssl" in reason.lower():
        return "check redis.ca, redis.cert and redis.key"
    tls = "; a TLS port needs rediss://"
    if settings.address.tls:
        tls = "; a port without TLS answers nothing to rediss://"
    return f"start it, or correct redis.url; look at firewalls{tls}"


_ADVICE = {
    AUTH_FAILED: "check redis.username and redis.password, which are taken as they are; in an "
    "address they are percent-encoded",
    NO_SERVER: "correct the host or port of redis.url; a TLS port needs rediss://",
    NO_TLS: "use redis:// for it, or its TLS port",
    NO_NODE: "use redis:// for a single server",
    NO_SENTINEL: "a Sentinel mostly listens on port 26379; use redis:// for the server itself",
    NO_DATABASE: "correct the end of redis.url; a server has databases 0 to 15, mostly",
}


def _version(looked: Sequence[Looked]) -> Finding:
    name = "redis version"
    kinds = sorted({_kind(one.info) for one in looked})
    detail = ", ".join(kinds)
    if min(_numbers(one.info.get("redis_version", "")) for one in looked) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        return Finding(name, Status.FAIL, detail, f"below {wanted}: update it")
    if len(kinds) > 1:
        return Finding(name, Status.WARN, detail, "run the same version everywhere")
    return Finding(name, Status.OK, detail)


def _role(settings: RedisSettings, looked: Sequence[Looked]) -> Finding:
    """What kind of server it is fits the address."""
    name, mode = "redis role", settings.address.mode
    replicas = [one.address for one in looked if one.info.get("role") == "slave"]
    clustered = [one for one in looked if one.cluster]
    if replicas:
        advice = "it refuses writes: name its master, or use redis+sentinel://"
        return Finding(name, Status.FAIL, f"{', '.join(replicas)}: a replica", advice)
    if mode is not RedisMode.CLUSTER and clustered:
        return Finding(name, Status.FAIL, "a Cluster's node", "use redis+cluster://")
    if mode is not RedisMode.CLUSTER:
        return Finding(name, Status.OK, "takes writes")
    served = min(int(one.cluster.get("cluster_slots_ok", "0")) for one in looked)
    if served < 16384:
        advice = "keys of the others are misses; see CLUSTER NODES on any node"
        return Finding(name, Status.FAIL, f"{served} of 16384 slots are served", advice)
    return Finding(name, Status.OK, f"{len(looked)} masters serve all slots")


def _policy(settings: RedisSettings, looked: Sequence[Looked]) -> Finding:
    """What happens when its memory is full."""
    name = "redis maxmemory"
    unlimited = [one for one in looked if not one.number("maxmemory")]
    if unlimited and settings.namespace_bytes:
        detail = f"no maxmemory; {format_size(settings.namespace_bytes)} a namespace"
        return Finding(name, Status.OK, detail)
    if unlimited:
        detail = "no maxmemory: it grows until it is killed"
        return Finding(name, Status.WARN, detail, UNLIMITED)
    policies = sorted({one.info.get("maxmemory_policy", "unknown") for one in looked})
    limits = sorted({format_size(one.number("maxmemory")) for one in looked})
    detail = f"{', '.join(limits)} each, {', '.join(policies)}"
    advice = " ".join(filter(None, (_advice(policy, settings) for policy in policies)))
    return Finding(name, Status.WARN if advice else Status.OK, detail, advice)


def _advice(policy: str, settings: RedisSettings) -> str:
    """Why a policy isn't right for a cache."""
    if policy in ("allkeys-lru", "allkeys-lfu"):
        return ""
    if policy == "allkeys-random":
        return "it drops hot chunks as well as cold ones: set maxmemory-policy allkeys-lru"
    if policy.startswith("volatile-") and settings.ttl_s:
        return ""
    return "when it is full new chunks are refused: set maxmemory-policy allkeys-lru"


def _memory(looked: Sequence[Looked]) -> Finding:
    name = "redis memory"
    used = sum(one.number("used_memory") for one in looked)
    limit = sum(one.number("maxmemory") for one in looked)
    evicted = sum(one.number("evicted_keys") for one in looked)
    detail = f"{format_size(used)} used"
    detail += f" of {format_size(limit)}" if limit else ""
    detail += f", {evicted} values evicted so far" if evicted else ""
    tight = [o for o in looked if 0 < o.number("total_system_memory") < o.number("maxmemory")]
    if tight:
        advice = "set maxmemory below the machine's memory"
        return Finding(name, Status.WARN, f"{detail}; more than {tight[0].address} has", advice)
    refuses = any(one.info.get("maxmemory_policy") == "noeviction" for one in looked)
    if limit and used > FULL_SHARE * limit and refuses:
        advice = "nearly full, and nothing leaves by itself: set maxmemory-policy allkeys-lru"
        return Finding(name, Status.WARN, detail, advice)
    return Finding(name, Status.OK, detail)


def _persistence(looked: Sequence[Looked]) -> Finding:
    """A cache that is written to disk is slower, and may refuse writes when that fails."""
    name = "redis disk"
    if any(one.info.get("rdb_last_bgsave_status", "ok") != "ok" for one in looked):
        advice = 'it may refuse writes for that: CONFIG SET save "", or make room on its disk'
        return Finding(name, Status.WARN, "its last snapshot failed", advice)
    if any(one.info.get("aof_enabled") == "1" for one in looked):
        advice = "each chunk is written to its disk, too: CONFIG SET appendonly no"
        return Finding(name, Status.WARN, "an append-only file is on", advice)
    return Finding(name, Status.OK, "no append-only file")


def _connections(settings: RedisSettings, looked: Sequence[Looked]) -> Finding:
    name = "redis connections"
    left = min(_left(one) for one in looked)
    detail = f"room for {left} more; a daemon uses {settings.connections} at most"
    if left < settings.connections:
        return Finding(
            name, Status.WARN, detail, "raise its maxclients, or lower redis.connections"
        )
    return Finding(name, Status.OK, detail)


def _left(looked: Looked) -> int:
    most = looked.number("maxclients") or 10_000
    return max(0, most - looked.number("connected_clients"))


def _latency(looked: Sequence[Looked], probe_timeout_s: float) -> Finding:
    name = "redis latency"
    middle_s = max(statistics.median(one.ping_s) for one in looked)
    slow_s = max(sorted(one.ping_s)[int(0.99 * PINGS)] for one in looked)
    detail = f"PING p50 {middle_s * 1e3:.2f} ms, p99 {slow_s * 1e3:.2f} ms"
    if middle_s > probe_timeout_s / 2:
        advice = (
            f"lookups wait {probe_timeout_s * 1e3:.0f} ms for it at most (redis.probe_timeout): "
            "most will miss it; use a nearer server"
        )
        return Finding(name, Status.WARN, detail, advice)
    if middle_s > LATENCY_S:
        return Finding(name, Status.WARN, detail, "each lookup waits so long: use a nearer server")
    return Finding(name, Status.OK, detail)


def _chunk(looked: Sequence[Looked]) -> Finding:
    """Whether a chunk goes there and comes back, and how fast."""
    name = "redis chunk"
    size = format_size(CHUNK_BYTES)
    refused = [
        one.refused if one.address in one.refused else f"{one.address}: {one.refused}"
        for one in looked
        if one.refused
    ]
    if refused:
        advice = "give the user +get +set +unlink on its prefix (ACL SETUSER)"
        if "READONLY" in refused[0]:
            advice = "name its master, or use redis+sentinel://"
        if "full" in refused[0]:
            advice = "raise maxmemory, or set maxmemory-policy allkeys-lru"
        return Finding(name, Status.FAIL, f"{size} can't be kept: {', '.join(refused)}", advice)
    if any(one.wrong for one in looked):
        advice = "something between changes bytes; the tier would treat all of it as misses"
        return Finding(name, Status.FAIL, f"{size} came back changed", advice)
    writes = min(CHUNK_BYTES / one.set_s for one in looked)
    reads = min(CHUNK_BYTES / one.get_s for one in looked)
    detail = f"{size}: SET {writes / 1e6:,.0f} MB/s, GET {reads / 1e6:,.0f} MB/s, one connection"
    if min(writes, reads) < SLOW_BYTES_S:
        advice = "a faster network, or redis.codec zstd where it is the network that is slow"
        return Finding(name, Status.WARN, detail, advice)
    return Finding(name, Status.OK, detail)


def _kind(info: Info) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'of an unknown version')}"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    # A server that hides its version is given the benefit of the doubt.
    return tuple(int(p) for p in parts if p.isdigit()) or VERSION_MIN


def _nothing() -> None:
    """Nobody is told of changes."""
