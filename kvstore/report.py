"""Report: the tables that ``kvstore stats`` prints, made from the document that ``--json``
prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.units import format_duration, format_size

Document = Mapping[str, Any]
"""A StatsReply as plain dicts, lists and numbers, with the field names of admin.proto."""


def render(document: Document) -> str:
    """The whole report, without a newline at its end."""
    sections = [
        _process(document["process"]),
        _tiers(document["tiers"], document["redis"]),
        _traffic(document["traffic"]),
        _redis(document["redis"]),
        _engines(document["engines"]),
        _spaces(document["spaces"], document["spaces_more"]),
        _tenants(document["tenants"]),
        _counts("dropped", document["drops"]),
        _counts("link", document["link"]["counters"]),
    ]
    return "\n\n".join(section for section in sections if section)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _process(process: Document) -> str:
    return (
        f"kvstore {process['version']}  pid {process['pid']}  "
        f"up {format_duration(process['uptime_s'])}  "
        f"resident {format_size(process['resident_bytes'])}  {process['state']}\n"
        f"engines {process['socket']}  admin {process['admin']}"
    )


def _tiers(tiers: Sequence[Document], redis: Document) -> str:
    head = ("tier", "slots", "bytes", "chunks", "hits", "misses", "evicted", "read", "written",
            "read/s", "written/s", "mode")  # fmt: skip
    rows = []
    for tier in tiers:
        shared = tier["name"] == "redis"
        rows.append(_tier_row(tier, _redis_mode(redis) if shared else tier["mode"], shared))
    return table(head, rows)


def _tier_row(tier: Document, mode: str, shared: bool) -> tuple[str, ...]:
    """A tier's row; a ``shared`` one's room and chunks aren't this node's to count."""
    io = tier["io"]
    notes = [mode] + ["scanning"] * tier["scanning"] + ["full"] * tier["full"]
    errors = io["errors"]
    if errors:
        notes.append(f"{errors} failed or gone" if shared else f"{errors} I/O errors")
    return (
        tier["name"],
        "-" if shared else f"{tier['slots_used']}/{tier['slots_total']}",
        "-" if shared else f"{format_size(tier['bytes_used'])}/{format_size(tier['bytes_total'])}",
        "-" if shared else str(tier["chunks"]),
        str(tier["hits"]),
        str(tier["misses"]),
        str(tier["evictions"]),
        format_size(io["read_bytes"]),
        format_size(io["write_bytes"]),
        format_size(io["read_bytes_s"]),
        format_size(io["write_bytes_s"]),
        ", ".join(note for note in notes if note),
    )


def _redis_mode(redis: Document) -> str:
    """Its state and, once something was written, what the codec saves."""
    gain = f", {redis['codec']} {redis['codec_gain']:.2f}x" if redis["codec_gain"] else ""
    return f"{redis['state']}{gain}"


def _redis(redis: Document) -> str:
    """The tier that nodes share, in two lines; nothing where there is none."""
    if redis["state"] == "off":
        return ""
    waits = ""
    if redis["connection_waits"]:
        average = format_duration(redis["connection_wait_s"] / redis["connection_waits"])
        waits = f"  waits for a connection {redis['connection_waits']}, {average} each"
    return (
        f"redis {redis['state']}  {redis['server'] or 'server unknown'}, {redis['mode']}, "
        f"nodes {redis['nodes']}, breaker opened {redis['breaker_openings']} times{waits}\n"
        f"lookups probed {redis['probes']}, {redis['probes_failed']} failed, "
        f"{redis['lookups_timed_out']} timed out, {redis['lookups_remembered']} remembered  "
        f"parts written {redis['chunks_written']}, there already {redis['chunks_present']}, "
        f"waiting {redis['write_backlog']}  "
        f"split {redis['splits']}, evicted {redis['evicted']}"
    )


def _traffic(traffic: Document) -> str:
    share = ": no lookup yet"
    if traffic["lookup_tokens"]:
        share = (
            f" {traffic['hit_rate']:.1%} "
            f"({traffic['hit_tokens']} of {traffic['lookup_tokens']} tokens)"
        )
    lines = [
        f"hit rate by tokens{share}  stored {traffic['stored_chunks']} chunks  "
        f"retrieved {traffic['retrieved_chunks']}",
        f"sessions {traffic['sessions']}  leases {traffic['leases']}  moves "
        f"{traffic['moves_in_flight']} in flight, {traffic['moves_queued']} queued  "
        f"waiting for NVMe {traffic['write_backlog']}",
    ]
    rows = [_latency_row(name, traffic[name]) for name in ("lookup", "store", "retrieve")]
    latencies = table(("latency", "count", "p50", "p90", "p99", "max"), rows)
    return "\n".join(lines) + "\n\n" + latencies


def _latency_row(name: str, latency: Document) -> tuple[str, ...]:
    if not latency["count"]:
        return (name, "0", "-", "-", "-", "-")
    figures = (format_duration(latency[mark]) for mark in ("p50_s", "p90_s", "p99_s", "max_s"))
    return (name, str(latency["count"]), *figures)


def _engines(engines: Sequence[Document]) -> str:
    if not engines:
        return "no engine is registered"
    rows = [
        (
            engine["engine"],
            engine["alias"] or engine["model"],
            engine["tenant"],
            _engine_state(engine),
            f"{engine['ranks_registered']}/{engine['ranks']}",
            str(engine["sessions"]),
            engine["namespace"][:16],
        )
        for engine in engines
    ]
    head = ("engine", "model", "tenant", "state", "ranks", "sessions", "namespace")
    return table(head, rows)


def _engine_state(engine: Document) -> str:
    state = "ready" if engine["ready"] else "waiting for ranks"
    return ", ".join([state, *(f"{name} KV not cached" for name in engine["uncached"])])


def _spaces(spaces: Sequence[Document], more: int) -> str:
    if not spaces:
        return ""
    rows = [
        (
            f"{space['model']} ({space['alias']})" if space["alias"] else space["model"],
            space["tenant"],
            space["namespace"][:16],
            str(space["epoch"]),
            str(space["chunks"]),
        )
        for space in spaces
    ]
    rest = f"\nand {more} namespaces more" if more else ""
    return table(("model", "tenant", "namespace", "epoch", "chunks"), rows) + rest


def _tenants(tenants: Sequence[Document]) -> str:
    """Where no tenant has a quota there is nothing to see that tiers don't tell."""
    if not any(tenant["has_quota"] for tenant in tenants):
        return ""
    rows = [
        (
            tenant["tenant"],
            tenant["tier"],
            format_size(tenant["bytes_used"]),
            format_size(tenant["bytes_quota"]) if tenant["has_quota"] else "all",
        )
        for tenant in tenants
    ]
    return table(("tenant", "tier", "bytes", "quota"), rows)


def _counts(title: str, counts: Mapping[str, int]) -> str:
    shown = {name: count for name, count in counts.items() if count}
    if not shown:
        return ""
    return f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(shown.items()))
