"""Requests that vLLM asks about again: while the daemon asks a remote tier, or while another
request loads the same."""

from __future__ import annotations

import signal

from tests.vllm.conftest import CHUNK, Rig, prompt, whole

FOREVER = 1_000_000_000
USERS = 5


def test_a_lookup_that_is_answered_later_is_a_hit_and_holds_nobody_up(rig: Rig) -> None:
    """Fifty lookups long the answer isn't there: vLLM asks again, computes other requests
    meanwhile, and loads the prefix in the end; also when there is no other request."""
    text, others = prompt("later", 20), [prompt(f"beside later {i}", 3) for i in range(2)]
    cold = rig.engine.run(*({"prompt": t, "salt": "s"} for t in (text, *others)))
    rig.engine.run({"prompt": text})
    for beside in (others, []):
        rig.fresh()
        rig.engine.call("pend", times=50)
        found = rig.engine.run(*({"prompt": t} for t in (text, *beside)))
        assert [r["tokens"] for r in found] == [r["tokens"] for r in cold[: len(found)]]
        assert found[0]["cached"] == whole(rig.engine, text)
        assert all(r["first_s"] < found[0]["first_s"] for r in found[1:])
        assert rig.engine.call("pend", times=0)["left"] == 0
    rig.nothing_is_left()


def test_a_lookup_that_is_never_answered_is_a_miss(rig: Rig) -> None:
    """The time of a lookup passes, and vLLM computes; nothing of it is left."""
    text = prompt("never", 12)
    cold = rig.engine.run({"prompt": text})[0]
    rig.fresh()
    rig.engine.call("pend", times=FOREVER)
    found = rig.engine.run({"prompt": text}, {"prompt": text + " more", "abort_at": 2})[0]
    assert (found["tokens"], found["cached"]) == (cold["tokens"], 0)
    assert rig.engine.call("pend", times=0)["left"] > 0
    rig.nothing_is_left()


def test_requests_with_the_same_prefix_load_it_once(rig: Rig) -> None:
    """Five users come at once with a prefix of some chunks that is on NVMe only, and a question of
    their own each: one of them loads it, and all have it."""
    shared = rig.engine.call("encode", prompt=prompt("five users", 30))["tokens"][: 3 * CHUNK]
    texts = [{"prompt": [*shared, 42, 43 + number]} for number in range(USERS)]
    cold = [rig.engine.run(text)[0]["tokens"] for text in texts]
    rig.from_nvme()
    before = rig.engine.call("status")["counts"].get("loaded_chunks", 0)
    found = rig.engine.run(*texts)
    assert [r["tokens"] for r in found] == cold
    assert [r["cached"] for r in found] == [3 * CHUNK] * USERS
    assert rig.nothing_is_left()["counts"]["loaded_chunks"] == before + 3


def test_requests_do_not_wait_for_a_load_that_never_ends(rig: Rig) -> None:
    """Two come with the same prefix; the daemon is stopped as soon as the first one's load has been
    asked for. The second doesn't wait for it: it is computed, and only then the daemon goes on."""
    text = prompt("never ends", 30)
    cold = rig.engine.run({"prompt": text})[0]["tokens"]
    rig.from_nvme()
    pid = rig.daemon.pid
    signals = [
        {"behind": "retrieve", "pid": pid, "number": int(signal.SIGSTOP), "stops": True},
        {"after": [1], "seconds": 0, "pid": pid, "number": int(signal.SIGCONT)},
    ]
    answer = rig.engine.call("run", requests=[{"prompt": text}] * 2, signals=signals)
    assert [r["tokens"] for r in answer["results"]] == [cold, cold]
    assert answer["unsent"] == 0
    rig.fresh()
    rig.nothing_is_left()
