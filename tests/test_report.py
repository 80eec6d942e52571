"""The tables of ``kvstore stats``, and the documents that they are made from."""

from __future__ import annotations

import json
from typing import Any

from kvstore.admin_reply import document, stats_reply
from kvstore.admin_snapshot import InOut, ProcessFacts, Rates, Snapshot
from kvstore.core.stats import (
    CoreStats,
    EngineStats,
    LatencySummary,
    SpaceStats,
    TenantStats,
    TierStats,
)
from kvstore.proto_gen import admin_pb2
from kvstore.report import render, table

IDLE = LatencySummary(0, 0.0, 0.0, 0.0, 0.0)
GIB = 1 << 30


def snapshot(**core: Any) -> Snapshot:
    figures: dict[str, Any] = {
        "tiers": (
            TierStats("host", 3, 48, 3 << 20, GIB, 3, 10, 2, 1, 1, False, False),
            TierStats("nvme", 5, 96, 5 << 20, 2 * GIB, 5, 4, 1, 0, 0, True, True),
        ),
        "engines": (), "spaces": (), "spaces_total": 0, "sessions": 0, "leases": 0,
            "moves_in_flight": 0,
        "moves_queued": 0, "write_backlog": 0, "lookups": 0, "lookup_tokens": 0, "hit_tokens": 0,
        "stored_chunks": 0, "retrieved_chunks": 0, "store": IDLE, "retrieve": IDLE, "drops": {},
    }  # fmt: skip
    process = ProcessFacts("0.1.0", 7, 60.0, 90 << 20, 20, 9, "unix:/a", "unix:/b", "ok")
    io = {
        "host": InOut(mode="huge pages"),
        "nvme": InOut("direct I/O", 2, 4 << 20, 0.5, 3, 8 << 20, 0.5, 1, 6),
    }
    return Snapshot(process, CoreStats(**figures | core), io, IDLE, 2, {"protocol_errors": 1})


def test_json_document_has_every_field_as_plain_numbers() -> None:
    """64-bit counts stay numbers, empty fields are there, maps are maps: a script can rely on
    it."""
    figures = document(stats_reply(snapshot(drops={"host_full": 2, "cancelled": 0}), Rates()))
    again = json.loads(json.dumps(figures))
    assert again == figures
    assert set(figures) == {field.name for field in admin_pb2.StatsReply.DESCRIPTOR.fields}
    assert figures["tiers"][0]["bytes_total"] == GIB
    assert figures["tiers"][1]["io"]["read_bytes"] == 4 << 20
    assert figures["drops"] == {"host_full": 2}
    assert figures["link"] == {"connections": 2, "counters": {"protocol_errors": 1}}
    assert figures["engines"] == []


def test_hit_rate_is_by_tokens_and_zero_before_the_first_lookup() -> None:
    """hit_tokens / lookup_tokens."""
    busy = stats_reply(snapshot(lookups=2, lookup_tokens=400, hit_tokens=300), Rates())
    assert busy.traffic.hit_rate == 0.75
    assert stats_reply(snapshot(), Rates()).traffic.hit_rate == 0.0


def test_rates_are_over_the_window_and_forget_what_is_older() -> None:
    """A burst shows, and is gone when it has left the window."""
    rates = Rates()
    assert rates.of("nvme") == (0.0, 0.0)
    rates.add(0.0, {"nvme": InOut()})
    rates.add(1.0, {"nvme": InOut(read_bytes=100, write_bytes=300)})
    assert rates.of("nvme") == (100.0, 300.0)
    assert rates.of("host") == (0.0, 0.0)
    for second in range(2, 13):
        rates.add(float(second), {"nvme": InOut(read_bytes=100, write_bytes=300)})
    assert rates.of("nvme") == (0.0, 0.0)


def test_report_of_an_idle_daemon_reads_well() -> None:
    """No division by nothing, no empty tables."""
    text = render(document(stats_reply(snapshot(), Rates())))
    assert "hit rate by tokens: no lookup yet  stored 0" in text
    assert "no engine is registered" in text
    assert "dropped" not in text
    assert "scanning, full, 6 I/O errors" in text


def test_report_shows_engines_by_alias_and_spaces_by_path_and_alias() -> None:
    """field case 110: figures show the alias where there is one; the path is never lost."""
    latency = LatencySummary(3, 1e-3, 2e-3, 3e-3, 4e-3)
    engines = (EngineStats("e1", "uid:0", "org/model", "small", True, 2, 2, 3, "ab" * 32),)
    spaces = (SpaceStats("uid:0", "org/model", "small", "cd" * 32, 4, 17),)
    core = snapshot(
        engines=engines, spaces=spaces, store=latency, lookups=1, lookup_tokens=256, hit_tokens=128,
        drops={"nvme_full": 3},
    )  # fmt: skip
    text = render(document(stats_reply(core, Rates())))
    [engine] = [line for line in text.splitlines() if line.startswith("e1 ")]
    assert engine.split()[1] == "small"
    assert "org/model (small)" in text
    assert "hit rate by tokens 50.0% (128 of 256 tokens)" in text
    assert "dropped: nvme_full 3" in text
    assert "1 ms" in text
    assert max(len(line) for line in text.splitlines()) <= 180


def test_table_aligns_columns() -> None:
    """The first to the left, figures to the right."""
    assert table(("a", "bb"), [("long", "1"), ("x", "222")]) == "a      bb\nlong    1\nx     222"


def test_tenants_are_shown_where_one_has_a_quota() -> None:
    """What each holds of each tier, and may hold; nothing where there are no quotas."""
    free = TenantStats("uid:1", "host", 4096, None)
    limited = TenantStats("uid:2", "host", 1 << 20, GIB)
    text = render(document(stats_reply(snapshot(tenants=(free,)), Rates())))
    assert "quota" not in text
    text = render(document(stats_reply(snapshot(tenants=(free, limited)), Rates())))
    rows = [line.split() for line in text.splitlines() if line.startswith("uid:")]
    assert [(row[0], row[-1]) for row in rows] == [("uid:1", "all"), ("uid:2", "GiB")]
