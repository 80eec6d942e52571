"""What goes wrong at the daemon, and what a vLLM engine does then: it serves on, the same text."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.vllm.conftest import CHUNK, Rig, prompt, whole
from tests.vllm.slots import damage, lose

STOP_S = 20.0


@pytest.mark.parametrize("how", ["damaged", "lost"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_chunk_that_cannot_be_loaded_is_computed(rig: Rig, where: str, how: str) -> None:
    """A byte on NVMe is flipped in the first, a middle or the last chunk of a hit, or the chunk is
    erased under the running daemon. The load names the blocks, vLLM computes from there, the text
    is the same; the request isn't offered the chunk again (one failed load), and afterwards
    everything is stored anew. Field case 22."""
    text = prompt(f"{how} {where}", 40)
    cold = rig.engine.run({"prompt": text})[0]
    chunks = whole(rig.engine, text) // CHUNK
    keys = rig.engine.call("keys", prompt=text)["keys"]
    place = {"first": 0, "middle": chunks // 2, "last": chunks - 1}[where]
    before = rig.nothing_is_left()["counts"]
    key = bytes.fromhex(keys[place])
    rig.written()
    rig.daemon.stop()
    if how == "damaged":
        assert damage(rig.daemon.nvme, key) == 1
    rig.fresh()
    if how == "lost":
        assert lose(rig.daemon.nvme, key, shard=0) == 1
    loaded = rig.engine.run({"prompt": text})[0]
    assert loaded["tokens"] == cold["tokens"]
    after = rig.nothing_is_left()["counts"]
    assert after["load_failures"] == before.get("load_failures", 0) + 1
    loaded_chunks = after.get("loaded_chunks", 0) - before.get("loaded_chunks", 0)
    assert loaded_chunks == place
    rig.engine.fresh()
    again = rig.engine.run({"prompt": text})[0]
    assert (again["tokens"], again["cached"]) == (cold["tokens"], chunks * CHUNK)
    rig.nothing_is_left()


def test_two_requests_that_share_a_damaged_chunk_are_both_computed(rig: Rig) -> None:
    """Both wait for the same chunk, both are told, both give the text of a cold run. Field case
    22."""
    shared = prompt("shared damage", 30)
    texts = [shared + " Tell me more.", shared + " What comes next?"]
    cold = [rig.engine.run({"prompt": text, "salt": "s"})[0] for text in texts]
    keys = rig.engine.call("keys", prompt=shared)["keys"]
    rig.engine.fresh()
    stored = [rig.engine.run({"prompt": text})[0] for text in texts]
    rig.written()
    rig.daemon.stop()
    assert damage(rig.daemon.nvme, bytes.fromhex(keys[1])) == 1
    rig.fresh()
    loaded = rig.engine.run(*({"prompt": text} for text in texts))
    assert [r["tokens"] for r in loaded] == [r["tokens"] for r in cold]
    assert [r["tokens"] for r in stored] == [r["tokens"] for r in cold]
    rig.nothing_is_left()


@pytest.mark.parametrize("when", ["load", "store", "idle"])
def test_killed_daemon_is_a_miss_until_it_is_back(rig: Rig, when: str) -> None:
    """kill -9 as soon as a load or a store has been asked for, or while nothing is under way. No
    request fails or hangs, all texts are right, and the next daemon is found by itself. Field case
    53."""
    text, others, cold = _prepared(rig, f"killed {when}", stored=when == "load")
    signals = _when_asked(rig, when, signal.SIGKILL)
    if when == "idle":
        rig.daemon.kill()
    found = rig.engine.run(*({"prompt": t} for t in (text, *others)), signals=signals)
    assert [r["tokens"] for r in found] == cold
    assert {r["reason"] for r in found} == {"length"}
    _serves_as_ever(rig, text, cold[0])


@pytest.mark.parametrize("when", ["load", "store", "idle"])
def test_stopped_daemon_keeps_only_the_request_that_loads_waiting(rig: Rig, when: str) -> None:
    """SIGSTOP for 20 s as soon as a load or a store has been asked for, or while nothing is under
    way; the deadline of transfers passes meanwhile. All other requests are served before the
    daemon goes on, again and again, over the blocks that are free: the stopped daemon has the
    others, and when it goes on it writes into none of theirs. All texts are right. Field cases 39
    and 52."""
    text, others, cold = _prepared(rig, f"stopped {when}", stored=when == "load")
    pid = rig.daemon.pid
    more = [{"prompt": t} for t in others]
    signals = _when_asked(rig, when, signal.SIGSTOP)
    if when == "idle":
        rig.signal(signal.SIGSTOP)
    if when == "load":
        served = list(range(1, 1 + len(others)))
        go_on = {"pid": pid, "number": int(signal.SIGCONT), "after": served, "seconds": STOP_S}
        signals.append(go_on)
    started_s = time.monotonic()
    found = rig.engine.run({"prompt": text}, *more, signals=signals)
    assert [r["tokens"] for r in found] == cold
    assert {r["reason"] for r in found} == {"length"}
    while when == "store" and time.monotonic() < started_s + STOP_S:
        assert rig.engine.call("status")["held_blocks"] > 0
        assert [r["tokens"] for r in rig.engine.run(*more)] == cold[1:]
    rig.signal(signal.SIGCONT)
    assert [r["tokens"] for r in rig.engine.run(*more)] == cold[1:]
    _serves_as_ever(rig, text, cold[0])


def _when_asked(rig: Rig, when: str, number: signal.Signals) -> list[dict[str, Any]]:
    call = {"load": "retrieve", "store": "store"}.get(when)
    sent = {"behind": call, "pid": rig.daemon.pid, "number": int(number), "stops": True}
    return [sent] if call else []


def _prepared(rig: Rig, tag: str, stored: bool) -> tuple[str, list[str], list[list[int]]]:
    """A prompt of some chunks, which is on NVMe only if it is to be ``stored``, three short ones,
    and the tokens that follow each."""
    text, others = prompt(tag, 30), [prompt(f"beside {tag} {i}", 6) for i in range(3)]
    cold = rig.engine.run(*({"prompt": t, "salt": "s"} for t in (text, *others)))
    rig.engine.fresh()
    if stored:
        rig.engine.run({"prompt": text})
        rig.from_nvme()
    return text, others, [r["tokens"] for r in cold]


def _serves_as_ever(rig: Rig, text: str, tokens: list[int]) -> None:
    """The daemon is there or comes back: the prompt gives its text, is stored, and hit."""
    rig.fresh()
    assert rig.engine.run({"prompt": text})[0]["tokens"] == tokens
    rig.engine.fresh()
    again = rig.engine.run({"prompt": text})[0]
    assert (again["tokens"], again["cached"]) == (tokens, whole(rig.engine, text))
    rig.nothing_is_left()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_aborts_at_every_moment_leave_nothing(rig: Rig, stopped: bool) -> None:
    """Requests with an external hit are aborted before they are scheduled, while they load, when
    they have loaded and while they store, again and again, also while the daemon is stopped, so
    that their loads can't end: afterwards nothing is held, and the rest gives the right texts.
    Field cases 39, 47, 52."""
    texts = [prompt(f"abort {stopped} {number}", 9) for number in range(8)]
    cold = rig.engine.run(*({"prompt": text} for text in texts))
    rig.fresh()
    stop = [{"at": 0, "pid": rig.daemon.pid, "number": int(signal.SIGSTOP)},
            {"at": 12, "pid": rig.daemon.pid, "number": int(signal.SIGCONT)}]  # fmt: skip
    for cycle in range(6):
        requests = [
            {"prompt": text, "max_tokens": 16} | ({"abort_at": (n + cycle) % 6} if n % 4 else {})
            for n, text in enumerate(texts)
        ]
        found = rig.engine.run(*requests, signals=stop if stopped and cycle % 2 else [])
        rig.signal(signal.SIGCONT)
        for number in range(0, len(texts), 4):
            assert found[number]["tokens"] == cold[number]["tokens"], cycle
        rig.fresh()
    rig.nothing_is_left()
    found = rig.engine.run(*({"prompt": text} for text in texts))
    assert [r["tokens"] for r in found] == [r["tokens"] for r in cold]
    assert all(r["cached"] > 0 for r in found)
    rig.nothing_is_left()


def test_lookups_without_a_load_leave_no_pin(rig: Rig) -> None:
    """vLLM asks ten thousand times for a request that never gets blocks, and then it is aborted.
    Field case 46."""
    text = prompt("asked for", 12)
    rig.engine.run({"prompt": text})
    rig.engine.fresh()
    assert rig.engine.call("lookups", prompt=text, times=10_000)["hits"] == 10_000
    rig.nothing_is_left()


@pytest.mark.parametrize(
    ("side", "of", "method"),
    [
        ("scheduler", "session", "lookup"),
        ("scheduler", "session", "hasher"),
        ("scheduler", "session", "release"),
        ("scheduler", "side", "start"),
        ("scheduler", "side", "allocated"),
        ("scheduler", "side", "orders"),
        ("worker", "session", "retrieve"),
        ("worker", "session", "store"),
        ("worker", "side", "start_loads"),
        ("worker", "side", "start_stores"),
    ],
)
def test_connector_method_that_raises_is_a_miss(rig: Rig, side: str, of: str, method: str) -> None:
    """Whatever raises inside the connector is logged and counted, and vLLM computes: the text is
    right, no request hangs, and nothing stays behind. Field case 55."""
    text = prompt(f"raising {side} {of} {method}", 12)
    cold = rig.engine.run({"prompt": text})[0]
    rig.engine.fresh()
    before = rig.engine.call("status")["errors"]
    rig.engine.call("sabotage", side=side, of=of, method=method)
    found = rig.engine.run({"prompt": text}, {"prompt": text + " more", "max_tokens": 150})
    assert found[0]["tokens"] == cold["tokens"]
    assert {r["reason"] for r in found} == {"length"}
    rig.engine.call("sabotage")
    assert rig.engine.call("settle")["settled"], rig.engine.call("status")
    status = rig.engine.call("status")
    assert status["errors"] > before
    rig.errors = status["errors"]
    left = ("blocks_used", "held", "loads", "stores", "wanted")
    assert [status[name] for name in left] == [0] * len(left), status
    rig.engine.fresh()
    assert rig.engine.run({"prompt": text})[0]["tokens"] == cold["tokens"]


def test_change_of_weights_ends_every_hit(rig: Rig) -> None:
    """After vLLM reset its connector's cache nothing that was stored before is found, also by the
    daemon's next process; what is stored from then on is."""
    text = prompt("weights", 12)
    cold = rig.engine.run({"prompt": text})[0]
    rig.engine.fresh()
    assert rig.engine.call("forget")["done"]
    assert rig.engine.run({"prompt": prompt("another", 3)})[0]["cached"] == 0
    assert rig.engine.call("wait_ready")["ready"]
    found = rig.engine.run({"prompt": text})[0]
    assert (found["tokens"], found["cached"]) == (cold["tokens"], 0)
    rig.from_nvme()
    assert rig.engine.run({"prompt": text})[0]["cached"] == whole(rig.engine, text)
