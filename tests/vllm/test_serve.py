"""``vllm serve`` beside ``kvstore serve``, with nothing configured: API, engine and worker are
processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon, StartDaemon
from tests.vllm.conftest import BIG, StartEngine, nothing_is_pinned, prompt
from tests.vllm.server import Server
from tests.vllm.test_many import TIGHT, requests

pytestmark = pytest.mark.full

STOP_S = 20.0
KILLS = 5
Serve = Callable[..., Server]


@pytest.fixture
def serve(private_folder: Path) -> Iterator[Serve]:
    """Starts servers: ``serve("--flag", ...)``. All of them are ended after the test."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        folder = private_folder / f"server{len(started)}"
        folder.mkdir()
        server = Server(folder, private_folder / "run", arguments)
        started.append(server)
        server.wait()
        return server

    yield start
    for server in started:
        server.close()


def written(daemon: RunningDaemon) -> None:
    """Wait until everything that was stored is on NVMe too."""
    daemon.wait_for_stats(
        lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
    )


def test_serve_hits_after_restarts_of_engine_and_daemon(
    start_daemon: StartDaemon, serve: Serve
) -> None:
    """Cold, local and external answers are one text, also those of a server that was started anew,
    and of one whose daemon was: then they come from NVMe. vLLM's own metrics have counted it
    all."""
    daemon = start_daemon(**BIG)
    server = serve()
    text = prompt("served", 30)
    cold, none = server.complete(text)
    local, cached = server.complete(text)
    assert (local, none) == (cold, 0)
    assert cached > 0
    server.complete_from_daemon(text, cold, cached)
    counted = server.metrics()
    assert counted["loads"] > 0
    assert counted["stored_chunks"] > 0
    assert counted.get("errors", 0) == 0
    server.reset()
    nothing_is_pinned(daemon)
    server.close()
    nothing_is_pinned(daemon, sessions=0)
    server = serve()
    server.complete_from_daemon(text, cold, cached)
    written(daemon)
    daemon.kill()
    assert server.complete(prompt("meanwhile", 3))[1] == 0
    daemon.start()
    server.complete_from_daemon(text, cold, cached)
    server.reset()
    nothing_is_pinned(daemon)
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    assert log.count("connected to the daemon") == 4


def test_serve_goes_on_while_its_daemon_is_killed_and_stopped(
    start_daemon: StartDaemon, serve: Serve
) -> None:
    """Eight users with external hits, eight who store, and some who hang up. In the midst of it the
    daemon is killed and restarted, five times, then stopped for 20 s, during which others are
    served. Every request ends with its text; afterwards external hits are back, and no lease, pin
    or block is left. Field cases 47, 52 and 53."""
    daemon = start_daemon(**BIG)
    server = serve()
    texts = [prompt(f"user {number}", 10 + number) for number in range(8)]
    wanted = [server.complete(text)[0] for text in texts]
    beside = [prompt(f"beside {number}", 4) for number in range(4)]
    others = [server.complete(text)[0] for text in beside]
    with ThreadPoolExecutor(24) as users:
        for turn in range(KILLS):
            server.reset()
            answers = _ask(users, server, texts, turn)
            daemon.kill()
            daemon.start()
            assert answers() == wanted
            daemon.wait_for_stats(lambda s: s["traffic"]["sessions"] == 2)
        server.reset()
        answers = _ask(users, server, texts, KILLS)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        while time.monotonic() < stopped_s + STOP_S:
            assert [server.complete(text)[0] for text in beside] == others
        daemon.process.send_signal(signal.SIGCONT)
        assert answers() == wanted
    cached = server.complete(texts[-1])[1]
    server.complete_from_daemon(texts[-1], wanted[-1], cached)
    server.reset()
    nothing_is_pinned(daemon)
    assert server.metrics().get("errors", 0) == 0
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    assert log.count("connected to the daemon") == 2 * (KILLS + 1)


def test_serve_in_little_memory_gives_the_texts_of_vllm_alone(
    start_daemon: StartDaemon, start_engine: StartEngine, serve: Serve
) -> None:
    """32 requests at once, some of whose users hang up, in memory for a few of them, cold and then
    with external hits: they are preempted, their texts are those of an engine without kvstore, and
    nothing is left."""
    asked = requests()
    plain = start_engine(None, engine=TIGHT)
    results = plain.call("run", requests=asked)["results"]
    plain.close()
    daemon = start_daemon(**BIG)
    server = serve(
        "--block-size", str(TIGHT["block_size"]), "--max-num-seqs", str(TIGHT["max_num_seqs"]),
        "--num-gpu-blocks-override", str(TIGHT["num_gpu_blocks_override"]),
        "--max-num-batched-tokens", str(TIGHT["max_num_batched_tokens"]),
    )  # fmt: skip
    with ThreadPoolExecutor(len(asked)) as users:
        for _ in range(2):
            answers = [
                users.submit(server.begin_and_leave, request["prompt"])
                if "abort_at" in request
                else users.submit(server.complete, request["prompt"], request["max_tokens"])
                for request in asked
            ]
            for request, result, answer in zip(asked, results, answers, strict=True):
                found = answer.result()
                assert "abort_at" in request or found[0] == result["text"]
            server.reset()
            nothing_is_pinned(daemon)
    assert server.counter("vllm:num_preemptions_total") > 0
    counted = server.metrics()
    assert counted["loaded_chunks"] > 0
    assert counted.get("errors", 0) == 0
    assert "Traceback" not in server.log.read_text(errors="replace")


def _ask(
    users: ThreadPoolExecutor, server: Server, texts: list[str], turn: int
) -> Callable[[], list[str]]:
    """Users who ask for stored texts, beside as many who ask for new ones, half of whom hang up
    after the first bytes. Call what is returned: all have ended, and these are the answers to the
    stored ones."""
    new = [
        users.submit(server.begin_and_leave if number % 2 else server.complete, text)
        for number, text in enumerate(f"{turn} {text}" for text in texts)
    ]
    stored = [users.submit(server.complete, text) for text in texts]

    def answers() -> list[str]:
        for each in new:
            each.result()
        return [each.result()[0] for each in stored]

    return answers
