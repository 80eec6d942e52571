"""Hits in Redis on a real vLLM engine: the daemon answers "pending", and pushes the answer."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conftest import RunningDaemon, StartDaemon
from tests.redis_fleet import PATIENT
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import standalone
from tests.vllm.conftest import (
    BIG,
    CHUNK,
    EngineProcess,
    StartEngine,
    nothing_is_pinned,
    prompt,
    whole,
)


def forget(daemon: RunningDaemon, engine: EngineProcess) -> None:
    """Start the daemon anew with an empty folder, so that what was stored is in Redis only."""
    daemon.stop()
    shutil.rmtree(daemon.nvme)
    engine.fresh()
    daemon.start()
    assert engine.call("wait_ready")["ready"]
    daemon.wait_for_stats(lambda s: s["redis"]["state"] == "up")


def test_prefix_in_redis_is_hit_and_a_dead_server_is_a_miss(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """What is in Redis only is loaded, while other requests are computed: the text is the same.
    With a server that answers nothing any more all requests are computed, at once."""
    with (
        standalone(private_folder / "redis", maxmemory="256mb") as server,
        Proxy(server.port) as proxy,
    ):
        daemon = start_daemon(**BIG, **PATIENT, KVSTORE_REDIS_URL=f"redis://{proxy.address}")
        engine = start_engine({"socket": daemon.socket})
        assert engine.call("wait_ready")["ready"]
        texts = [prompt("in redis", 40), *(prompt(f"beside redis {i}", 3) for i in range(2))]
        cold = [engine.run({"prompt": text, "salt": "s"})[0]["tokens"] for text in texts]
        engine.run({"prompt": texts[0]})
        full = whole(engine, texts[0])
        chunks = full // CHUNK
        daemon.wait_for_stats(lambda s: s["redis"]["chunks_written"] >= 2 * chunks)
        for fault in (Fault.NONE, Fault.BLACK_HOLE):
            forget(daemon, engine)
            before = engine.call("status")["counts"].get("loaded_chunks", 0)
            proxy.set(fault)
            found = engine.run(*({"prompt": text} for text in texts))
            proxy.set(Fault.NONE)
            assert [r["tokens"] for r in found] == cold
            hit = fault is Fault.NONE
            assert found[0]["cached"] == (full if hit else 0)
            status = engine.call("status")
            assert status["counts"].get("loaded_chunks", 0) - before == (chunks if hit else 0)
            assert status["errors"] == 0
        engine.fresh()
        nothing_is_pinned(daemon)
