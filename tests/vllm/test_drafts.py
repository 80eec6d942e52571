"""Speculative decoding with a draft model: its KV is kept with the model's."""

from __future__ import annotations

import pytest

from tests.conftest import StartDaemon
from tests.vllm.conftest import BIG, MODEL, StartEngine, prompt, whole

pytestmark = pytest.mark.full


def test_a_hit_brings_the_drafters_kv_back(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """The model drafts for itself, so nearly every draft is taken, and a text needs few steps. With
    an external hit it is the same text in no more steps: the drafter has the KV of the prefix
    again. An engine without a drafter has other KV, and hits none of it."""
    daemon = start_daemon(**BIG)
    options = {"speculative_config": {"method": "draft_model", "model": str(MODEL),
                                      "num_speculative_tokens": 3}}  # fmt: skip
    engine = start_engine({"socket": daemon.socket}, engine=options)
    assert engine.call("wait_ready")["ready"]
    text = prompt("drafts", 30)
    full = whole(engine, text)
    runs = []
    for _ in range(2):
        runs.append(engine.call("run", requests=[{"prompt": text, "max_tokens": 32}]))
        engine.fresh()
    cold, hit = (run["results"][0] for run in runs)
    assert (cold["cached"], hit["cached"]) == (0, full)
    assert hit["tokens"] == cold["tokens"]
    assert runs[1]["decoded"] <= runs[0]["decoded"] + 1 < 16
    status = engine.call("status")
    assert (status["errors"], status["held"], status["blocks_used"]) == (0, 0, 0)
    assert status["counts"].get("load_failures", 0) == 0
    engine.close()
    plain = start_engine({"socket": daemon.socket})
    assert plain.call("wait_ready")["ready"]
    other = plain.run({"prompt": text, "max_tokens": 32})[0]
    assert (other["tokens"], other["cached"]) == (cold["tokens"], 0)
