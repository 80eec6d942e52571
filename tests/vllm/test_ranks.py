"""An engine of two ranks, each a process with KV memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartDaemon
from tests.vllm.conftest import BIG, CHUNK, StartEngine, prompt, whole
from tests.vllm.slots import lose
from tests.vllm.test_kinds import tiny

pytestmark = pytest.mark.full


def test_two_ranks_hit_together_and_one_missing_part_is_a_miss_for_both(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """Tensor parallelism of two: external hits give the same text. Then rank 1's part of the fourth
    chunk is lost: both ranks load three chunks, and vLLM computes the rest. Field case 30."""
    daemon = start_daemon(**BIG)
    model = tiny("hybrid", private_folder)
    engine = start_engine(
        {"socket": daemon.socket}, model=model, engine={"tensor_parallel_size": 2}
    )
    assert engine.call("wait_ready")["ready"]
    text = prompt("ranks", 60)
    full = whole(engine, text)
    assert full >= 6 * CHUNK
    cold = engine.run({"prompt": text})[0]
    engine.fresh()
    found = engine.run({"prompt": text})[0]
    assert (cold["cached"], found["cached"]) == (0, full)
    assert found["tokens"] == cold["tokens"]
    keys = engine.call("keys", prompt=text)["keys"]
    daemon.wait_for_stats(
        lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
    )
    daemon.stop()
    assert lose(daemon.nvme, bytes.fromhex(keys[3]), shard=1) >= 1
    engine.fresh()
    daemon.start()
    assert engine.call("wait_ready")["ready"]
    less = engine.run({"prompt": text})[0]
    assert (less["tokens"], less["cached"]) == (cold["tokens"], 3 * CHUNK)
    assert len(engine.lines("rank 1: connected to the daemon")) == 2


def test_ranks_with_the_same_kv_head_are_stored_once_and_hit_together(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """Two ranks of a model with one KV head hold the same bytes: they are stored once, both load
    them, and the text is the same; also by an engine that was started anew."""
    daemon = start_daemon(**BIG)
    model, two = tiny("single", private_folder), {"tensor_parallel_size": 2}
    engine = start_engine({"socket": daemon.socket}, model=model, engine=two)
    assert engine.call("wait_ready")["ready"]
    tokens = engine.call("encode", prompt=prompt("shared heads", 60))["tokens"][: 5 * CHUNK + 20]
    cold = engine.run({"prompt": tokens})[0]
    for again in range(2):
        if again:
            engine.close()
            engine = start_engine({"socket": daemon.socket}, model=model, engine=two)
            assert engine.call("wait_ready")["ready"]
        engine.fresh()
        found = engine.run({"prompt": tokens})[0]
        assert (cold["cached"], found["cached"]) == (0, 5 * CHUNK)
        assert found["tokens"] == cold["tokens"]
        stats = daemon.wait_for_stats(
            lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
        )
        assert [tier["slots_used"] for tier in stats["tiers"]] == [5, 5]
        (known,) = stats["engines"]
        assert (known["ready"], known["ranks_registered"], known["ranks"]) == (True, 2, 2)
