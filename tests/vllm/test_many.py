"""Many requests at once in far too little KV memory, and engines beside each other."""

from __future__ import annotations

from typing import Any

from tests.conftest import StartDaemon
from tests.vllm.conftest import BIG, StartEngine, prompt, whole

TIGHT = {"block_size": 32, "num_gpu_blocks_override": 72, "max_model_len": 1024, "max_num_seqs": 32,
         "max_num_batched_tokens": 512}  # fmt: skip
ABORTS = {3: 2, 9: 5, 14: 12, 20: 30, 27: 60}
"""Request -> the step before which it is aborted."""


GROUPS = 8
"""Of four requests each: one of them loads what they share."""


def requests() -> list[dict[str, Any]]:
    """32 requests: groups of four share a prefix of some chunks, each ends in its own way."""
    found: list[dict[str, Any]] = []
    for number in range(32):
        shared = prompt(f"group {number // 4}", 8 + 2 * (number // 8))
        request: dict[str, Any] = {
            "prompt": f"{shared} Request {number} asks:", "max_tokens": 40 + number,
        }  # fmt: skip
        if number in ABORTS:
            request["abort_at"] = ABORTS[number]
        found.append(request)
    return found


def test_preemption_and_aborts_change_no_text_and_leave_nothing(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """32 requests, some aborted midway, in memory for a few of them: they are preempted. With the
    cache, cold and then with external hits, the texts are those of an engine without it, and
    afterwards no lease, session too many, held block or open transfer is left. Field cases 37,
    46, 47."""
    plain = start_engine(None, engine=TIGHT)
    wanted = plain.call("run", requests=requests())
    assert wanted["preemptions"] > 0
    texts = [result["tokens"] for result in wanted["results"]]
    plain.close()
    daemon = start_daemon(**BIG)
    engine = start_engine({"socket": daemon.socket}, engine=TIGHT)
    for again in range(2):
        found = engine.call("run", requests=requests())
        assert [result["tokens"] for result in found["results"]] == texts, again
        assert found["preemptions"] > 0
        engine.fresh()
        status = engine.call("status")
        left = ("blocks_used", "requests", "tracked", "held", "loads", "stores", "errors")
        assert [status[name] for name in left] == [0] * len(left), status
    assert status["counts"]["loaded_chunks"] >= GROUPS, status
    assert status["counts"].get("load_failures", 0) == 0, status
    traffic = daemon.wait_for_stats(lambda s: not s["traffic"]["leases"])["traffic"]
    assert (traffic["sessions"], traffic["moves_in_flight"]) == (2, 0)


def test_engines_share_what_is_the_same_and_nothing_else(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """A second engine, with another size of KV memory, hits what the first one stored. One with
    another revision, element type or rope setting, or another block size, doesn't."""
    daemon = start_daemon(**BIG)
    extra = {"socket": daemon.socket}
    text = prompt("sharing", 20)
    first = start_engine(extra)
    cold = first.run({"prompt": text})[0]
    first.fresh()
    second = start_engine(extra, engine={"num_gpu_blocks_override": 50})
    shared = second.run({"prompt": text})[0]
    assert (shared["tokens"], shared["cached"]) == (cold["tokens"], whole(first, text))
    second.close()
    first.close()
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}
    others: list[dict[str, Any]] = [
        {"extra": extra | {"revision": "other"}},
        {"extra": extra, "engine": {"dtype": "bfloat16"}},
        {"extra": extra, "engine": {"hf_overrides": rope}},
        {"extra": extra, "engine": {"block_size": 64}},
    ]
    for other in others:
        engine = start_engine(other["extra"], engine=other.get("engine", {}))
        assert engine.call("wait_ready")["ready"], other
        assert engine.run({"prompt": text, "max_tokens": 1})[0]["cached"] == 0, other
        engine.close()
    spaces = {s["namespace"] for s in daemon.stats()["spaces"]}
    assert len(spaces) == 1 + len(others)
