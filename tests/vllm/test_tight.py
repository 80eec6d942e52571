"""An engine with few blocks that computes one chunk a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.vllm.conftest import CHUNK, Rig, prompt, running_rig, whole

BLOCKS = 25
"""One of them is vLLM's null block."""
OPTIONS = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": CHUNK,
           "max_model_len": 1024}  # fmt: skip
STOP_S = 20.0


@pytest.fixture(scope="module")
def module_rig() -> Iterator[Rig]:
    """The module's rig, as the last test left it."""
    with running_rig(OPTIONS) as rig:
        yield rig


@pytest.fixture
def rig(module_rig: Rig) -> Rig:
    """The module's rig, as good as new."""
    module_rig.begin()
    return module_rig


def test_stores_of_one_request_end_one_by_one(rig: Rig) -> None:
    """A prompt of six chunks is computed in six steps, so it is stored by six stores, which a
    stopped daemon keeps waiting. The request ends; its blocks stay held, as those of all six, until
    the daemon goes on. Then all six chunks are there. Field case 37."""
    tokens = rig.engine.call("encode", prompt=prompt("steps", 60))["tokens"][: 6 * CHUNK + 40]
    before = rig.engine.call("status")["counts"].get("stores", 0)
    stop = {"before": "store", "pid": rig.daemon.pid, "number": int(signal.SIGSTOP), "stops": True}
    cold = rig.engine.run({"prompt": tokens}, signals=[stop])[0]
    status = rig.engine.call("status")
    assert (status["held"], status["held_blocks"], status["blocks_used"]) == (6, 6, 6)
    assert status["counts"]["stores"] == before + 6
    assert status["requests"] == 0
    rig.signal(signal.SIGCONT)
    rig.nothing_is_left()
    rig.fresh()
    again = rig.engine.run({"prompt": tokens})[0]
    assert (again["tokens"], again["cached"]) == (cold["tokens"], 6 * CHUNK)
    rig.nothing_is_left()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL], ids=["goes on", "is killed"])
def test_loads_that_hold_all_blocks_end_when_the_daemon_does(rig: Rig, end: signal.Signals) -> None:
    """Eight prompts whose loads hold as many blocks as vLLM gives to loads, and a ninth request
    that has none. The daemon stands still before the first load; past their deadline the loads are
    cancelled. Nothing ends until it goes on or is killed; then everything does, with the right
    text, and all blocks are back. Field cases 39 and 52."""
    texts = [prompt(f"full {end} {number}", 20) for number in range(8)]
    full = [whole(rig.engine, text) for text in texts]
    assert set(full) == {2 * CHUNK}
    ninth = prompt(f"ninth {end}", 10)
    cold = [rig.engine.run({"prompt": text, "salt": "s"})[0]["tokens"] for text in (*texts, ninth)]
    for text in texts:
        rig.engine.run({"prompt": text})
    rig.fresh()
    pid = rig.daemon.pid
    signals = [
        {"before": "retrieve", "pid": pid, "number": int(signal.SIGSTOP), "stops": True},
        {"after": [], "seconds": STOP_S, "pid": pid, "number": int(end)},
    ]
    requests = [{"prompt": text} for text in (*texts, ninth)]
    answer = rig.engine.call("run", requests=requests, signals=signals)
    found = answer["results"]
    assert [r["tokens"] for r in found] == cold
    assert answer["unsent"] == 0
    assert answer["blocks_used_max"] > BLOCKS // 2
    rig.fresh()
    rig.nothing_is_left()
