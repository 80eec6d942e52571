"""Hits on a real vLLM engine: the same text, from wherever the KV came."""

from __future__ import annotations

from tests.conftest import RunningDaemon, StartDaemon
from tests.vllm.conftest import BIG, CHUNK, Rig, StartEngine, prompt, whole


def settled(daemon: RunningDaemon) -> None:
    """Wait until everything that was stored is on NVMe too."""
    daemon.wait_for_stats(
        lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
    )


def test_same_text_cold_local_external_after_restarts_of_engine_and_daemon(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """One prompt is computed, hit locally, loaded from host memory, loaded by an engine that was
    started anew, and loaded from NVMe by the daemon's next process: one text, and each time vLLM
    counts the cached tokens that there are. Field case 53: the engine outlives the daemon."""
    daemon = start_daemon(**BIG)
    extra = {"socket": daemon.socket}
    text = prompt("restarts", 40)
    engine = start_engine(extra)
    cold = engine.run({"prompt": text})[0]
    assert cold["cached"] == 0
    full = whole(engine, text)
    assert full >= 4 * CHUNK
    local = engine.run({"prompt": text})[0]
    assert (local["tokens"], local["cached"]) == (cold["tokens"], full)
    engine.fresh()
    external = engine.run({"prompt": text})[0]
    assert (external["tokens"], external["cached"]) == (cold["tokens"], full)
    assert engine.call("status")["counts"]["loaded_chunks"] == full // CHUNK
    engine.close()
    engine = start_engine(extra)
    again = engine.run({"prompt": text})[0]
    assert (again["tokens"], again["cached"]) == (cold["tokens"], full)
    settled(daemon)
    daemon.kill()
    engine.fresh()
    gone = engine.run({"prompt": text})[0]
    assert (gone["tokens"], gone["cached"]) == (cold["tokens"], 0)
    engine.fresh()
    daemon.start()
    assert engine.call("wait_ready")["ready"]
    nvme = engine.run({"prompt": text})[0]
    assert (nvme["tokens"], nvme["cached"]) == (cold["tokens"], full)
    status = engine.call("status")
    assert (status["errors"], status["held"], status["loads"], status["tracked"]) == (0, 0, 0, 0)
    connected = engine.lines("connected to the daemon")
    assert len(connected) == 4, connected


def test_stored_tokens_of_a_reply_are_hit_by_the_next_turn(rig: Rig) -> None:
    """The KV of generated tokens is kept for whole chunks: a second turn, whose prompt is the first
    one's with its reply, finds more than the first prompt."""
    text = prompt("turns", 20)
    first = rig.engine.run({"prompt": text, "max_tokens": 200})[0]
    tokens = rig.engine.call("encode", prompt=text)["tokens"] + first["tokens"]
    rig.engine.fresh()
    second = rig.engine.run({"prompt": [*tokens, 42, 43]})[0]
    assert second["cached"] == (len(tokens) - 1) // CHUNK * CHUNK > whole(rig.engine, text)
    rig.nothing_is_left()


def test_salt_and_wishes_of_a_request_are_kept(rig: Rig) -> None:
    """Another salt never hits; a request that doesn't want to read isn't given anything, and one
    that doesn't want to write leaves nothing behind."""
    text = prompt("wishes", 20)
    full = whole(rig.engine, text)
    silent = {"kvstore.write": False}
    asked = rig.engine.run({"prompt": text, "params": silent, "salt": "one"})[0]
    rig.engine.fresh()
    stored = rig.engine.run({"prompt": text, "salt": "one"})[0]
    assert (asked["cached"], stored["cached"]) == (0, 0)
    rig.engine.fresh()
    other = rig.engine.run({"prompt": text, "salt": "two"})[0]
    deaf = rig.engine.run({"prompt": text, "salt": "one", "params": {"kvstore.read": False}})[0]
    assert (other["cached"], deaf["cached"]) == (0, 0)
    rig.engine.fresh()
    assert rig.engine.run({"prompt": text, "salt": "one"})[0]["cached"] == full
    assert len({str(r["tokens"]) for r in (asked, stored, other, deaf)}) == 1
    rig.nothing_is_left()


def test_hit_is_shorter_than_the_prompt_at_every_length(rig: Rig) -> None:
    """Around a chunk's end (one token less, exact, one more) the hit is what lies before the last
    token, and the text is the same as without it. Field case 18's lengths, on the engine."""
    tokens = rig.engine.call("encode", prompt=prompt("lengths", 30))["tokens"]
    lengths = [n * CHUNK + more for n in (1, 2) for more in (-1, 0, 1, 2)]
    cold = rig.engine.run(*({"prompt": tokens[:n], "salt": str(n)} for n in lengths))
    rig.engine.fresh()
    rig.engine.run({"prompt": tokens})
    rig.engine.fresh()
    for n, computed in zip(lengths, cold, strict=True):
        loaded = rig.engine.run({"prompt": tokens[:n]})[0]
        assert (loaded["tokens"], loaded["cached"]) == (
            computed["tokens"],
            (n - 1) // CHUNK * CHUNK,
        ), n
        rig.engine.fresh()
    rig.nothing_is_left()
