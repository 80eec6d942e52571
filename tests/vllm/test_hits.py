"""Hits on a real vLLM engine: the same text, from wherever the KV came."""

from __future__ import annotations

from tests.conftest import RunningDaemon, StartDaemon
from tests.vllm.conftest import EngineProcess, StartEngine, prompt

CHUNK = 128
BIG = {"KVSTORE_HOST_SIZE": "512MiB", "KVSTORE_NVME_SIZE": "1GiB", "KVSTORE_NVME_SLAB_SIZE": "64MiB"}


def settled(daemon: RunningDaemon) -> None:
    """Wait until everything that was stored is on NVMe too."""
    daemon.wait_for_stats(lambda s: not s["moves_in_flight"] and not s["write_backlog"])


def chunks_of(engine: EngineProcess, text: str) -> int:
    """Tokens of the whole chunks of a prompt but its last token, as an external hit has them."""
    return (engine.call("tokens", prompt=text)["count"] - 1) // CHUNK * CHUNK


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
    whole = chunks_of(engine, text)
    assert whole >= 4 * CHUNK
    local = engine.run({"prompt": text})[0]
    assert (local["tokens"], local["cached"]) == (cold["tokens"], whole)
    engine.fresh()
    external = engine.run({"prompt": text})[0]
    assert (external["tokens"], external["cached"]) == (cold["tokens"], whole)
    assert engine.call("status")["counts"]["loaded_chunks"] == whole // CHUNK
    engine.close()
    engine = start_engine(extra)
    again = engine.run({"prompt": text})[0]
    assert (again["tokens"], again["cached"]) == (cold["tokens"], whole)
    settled(daemon)
    daemon.kill()
    engine.fresh()
    gone = engine.run({"prompt": text})[0]
    assert (gone["tokens"], gone["cached"]) == (cold["tokens"], 0)
    engine.fresh()
    daemon.start()
    assert engine.call("wait_ready")["ready"]
    nvme = engine.run({"prompt": text})[0]
    assert (nvme["tokens"], nvme["cached"]) == (cold["tokens"], whole)
    status = engine.call("status")
    assert (status["errors"], status["held"], status["loads"], status["tracked"]) == (0, 0, 0, 0)
    connected = engine.lines("connected to the daemon")
    assert len(connected) == 4, connected
