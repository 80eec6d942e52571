"""KV events of the external cache, as a router that listens to vLLM gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import StartDaemon
from tests.vllm.conftest import BIG, CHUNK, StartEngine, prompt, whole
from tests.vllm.test_kinds import tiny

Event = dict[str, Any]


def external(events: list[Event], kind: str, medium: str) -> list[Event]:
    """Those of one kind and medium."""
    return [e for e in events if (e["kind"], e["medium"]) == (kind, medium)]


def hashes(events: list[Event]) -> set[str]:
    """All block hashes that they name."""
    return {each for event in events for each in event["block_hashes"]}


def test_a_router_hears_what_the_external_cache_gained_and_lost(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """Each chunk that is stored is told twice, for host memory and for NVMe, in the words that vLLM
    uses for its own blocks, chained by the same hashes; a clear takes all of it back, and nothing
    of vLLM's own. Another engine that loads what it hasn't stored tells of it as well. A daemon
    that dies takes back what it had. (vLLM publishes when it steps: for a short prompt.)"""
    short = {"prompt": prompt("short", 1), "max_tokens": 1}
    daemon = start_daemon(**BIG)
    engine = start_engine({"socket": daemon.socket}, module="listening")
    assert engine.call("wait_ready")["ready"]
    text = prompt("events", 40)
    chunks = whole(engine, text) // CHUNK
    assert chunks >= 4
    engine.run(short)
    engine.run({"prompt": text, "max_tokens": 1})
    told = engine.call("events", count=2 * chunks)["events"]
    own = external(told, "BlockStored", "GPU")
    for medium in ("CPU", "STORAGE"):
        found = external(told, "BlockStored", medium)
        assert len(found) == chunks, [(e["kind"], e["medium"]) for e in told]
        assert hashes(found) <= hashes(own)
        assert {e["parent_block_hash"] for e in found} == {None} | (
            hashes(found) - {found[-1]["block_hashes"][-1]}
        )
        tokens = [token for event in found for token in event["token_ids"]]
        assert tokens == engine.call("encode", prompt=text)["tokens"][: chunks * CHUNK]
        assert {(e["group_idx"], e["kv_cache_spec_kind"], e["locality"]) for e in found} == {
            (0, "full_attention", "LOCAL")
        }
        assert {e["block_size"] for e in found} == {own[-1]["block_size"]}
    kept = hashes(external(told, "BlockStored", "CPU"))
    other = start_engine({"socket": daemon.socket}, module="listening")
    assert other.call("wait_ready")["ready"]
    assert other.run({"prompt": text, "max_tokens": 1})[0]["cached"] == chunks * CHUNK
    heard = other.call("events", count=2 * chunks)["events"]
    assert hashes(external(heard, "BlockStored", "CPU")) == kept
    other.close()
    assert daemon.kvstore("clear", "--all", "--yes").returncode == 0
    engine.run(short)
    told = engine.call("events", count=2)["events"]
    for medium in ("CPU", "STORAGE"):
        assert hashes(external(told, "BlockRemoved", medium)) == kept
    assert not external(told, "BlockRemoved", "GPU")
    engine.fresh()
    engine.run({"prompt": text, "max_tokens": 1})
    again = engine.call("events", count=2 * chunks)["events"]
    assert hashes(external(again, "BlockStored", "CPU")) == kept
    daemon.kill()
    engine.run(short)
    told = engine.call("events", count=2)["events"]
    assert hashes(external(told, "BlockRemoved", "STORAGE")) == kept


def test_a_router_hears_of_windows_by_their_own_groups(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """Sliding windows beside full attention: every group's blocks are told for both tiers, by
    vLLM's own hashes and with what vLLM itself says of the group, and a clear takes all back."""
    daemon = start_daemon(**BIG)
    model = tiny("hybrid", private_folder)
    engine = start_engine({"socket": daemon.socket}, module="listening", model=model)
    assert engine.call("wait_ready")["ready"]
    short = {"prompt": prompt("short", 1), "max_tokens": 1}
    text = prompt("windows", 60)
    chunks = whole(engine, text) // CHUNK
    engine.run(short)
    engine.run({"prompt": text, "max_tokens": 1})
    told = engine.call("events", count=2 * 3 * chunks)["events"]
    own = {facts_of(event): event for event in external(told, "BlockStored", "GPU")}
    assert [kind for _, kind, _ in own].count("sliding_window") == 2
    wanted = next(hashes([e]) for e in own.values() if e["kv_cache_spec_kind"] == "full_attention")
    assert len(wanted) == chunks
    for medium in ("CPU", "STORAGE"):
        found = external(told, "BlockStored", medium)
        assert {facts_of(event) for event in found} == set(own)
        for facts in own:
            same = [event for event in found if facts_of(event) == facts]
            assert len(same) == chunks
            assert hashes(same) == wanted
    assert daemon.kvstore("clear", "--all", "--yes").returncode == 0
    engine.run(short)
    gone = engine.call("events", count=2 * 3)["events"]
    for medium in ("CPU", "STORAGE"):
        lost = external(gone, "BlockRemoved", medium)
        assert {event["group_idx"]: hashes([event]) for event in lost} == dict.fromkeys(
            range(3), wanted
        )


def facts_of(event: Event) -> tuple[Any, ...]:
    """What a BlockStored says of its group."""
    names = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    return tuple(event[name] for name in names)
