"""``vllm serve`` beside ``kvstore serve``, with nothing configured: API, engine and worker are
processes of their own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon, StartDaemon
from tests.vllm.conftest import BIG, prompt
from tests.vllm.server import Server

pytestmark = pytest.mark.full


@pytest.fixture
def daemon_and_server(
    start_daemon: StartDaemon, private_folder: Path
) -> Iterator[tuple[RunningDaemon, Server]]:
    """Both, running."""
    daemon = start_daemon(**BIG)
    server = Server(private_folder, private_folder / "run")
    try:
        server.wait()
        yield daemon, server
    finally:
        server.close()


def _is_left(stats: dict[str, dict[str, int]]) -> bool:
    traffic = stats["traffic"]
    return bool(traffic["leases"] or traffic["moves_in_flight"] or traffic["write_backlog"])


def test_serve_hits_survives_its_daemon_and_leaves_nothing(
    daemon_and_server: tuple[RunningDaemon, Server],
) -> None:
    """Cold, local and external answers are one text. With eight users and hang-ups the daemon is
    killed and restarted, then stopped for ten seconds: every request ends with its text. Afterwards
    external hits are back, no lease or block is left, and vLLM's own metrics have counted it all.
    Field cases 47 and 53."""
    daemon, server = daemon_and_server
    text = prompt("served", 30)
    cold, none = server.complete(text)
    local, cached = server.complete(text)
    server.reset()
    external, loaded = server.complete(text)
    assert (local, external) == (cold, cold)
    assert (none, cached, loaded) == (0, cached, cached)
    assert cached > 0
    texts = [prompt(f"user {number}", 10 + number) for number in range(8)]
    wanted = [server.complete(t)[0] for t in texts]
    server.reset()
    with ThreadPoolExecutor(10) as users:
        for turn in range(3):
            leaving = [users.submit(server.begin_and_leave, t + " And then?") for t in texts[:2]]
            asking = [users.submit(server.complete, t) for t in texts]
            if turn == 0:
                daemon.kill()
                daemon.start()
            if turn == 1:
                daemon.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
                threading.Timer(
                    10,
                    daemon.process.send_signal,
                    (signal.SIGCONT,),  # type: ignore[union-attr]
                ).start()
            assert [each.result()[0] for each in asking] == wanted
            assert [each.result() for each in leaving] == [None, None]
            server.reset()
    daemon.wait_for_stats(lambda s: s["traffic"]["sessions"] == 2)
    server.complete(text)
    server.reset()
    assert server.complete(text) == (cold, cached)
    server.reset()
    daemon.wait_for_stats(lambda s: not _is_left(s))
    counted = server.metrics()
    assert counted["loads"] > 0
    assert counted["stored_chunks"] > 0
    assert counted.get("errors", 0) == 0
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    assert log.count("connected to the daemon") == 4
