"""The daemon dies, comes back, or stops in its tracks: the engine never raises, never waits for
long, and always gives the right tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_transformers.connect import connect
from kvstore_transformers.engine import Engine
from kvstore_transformers.model import CausalModel

from kvstore import Client
from kvstore.demo_processes import OwnDaemon
from tests.connectors import tiny
from tests.connectors.conftest import StartEngine
from tests.connectors.test_transformers_daemon import CHUNK, NEW, OPTIONS, check_sound, cold

PROMPT = tiny.random_tokens(8 * CHUNK + 5, seed=90)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return tiny.ours(tiny.oracle("llama"))


def nvme_reads(daemon: OwnDaemon) -> int:
    return sum(t["io"]["reads"] for t in daemon.stats()["tiers"] if t["name"] == "nvme")


def test_hit_partly_in_host_and_partly_on_nvme(
    own_daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """After a kill and a restart everything is on NVMe; a first request brings the head into host
    memory, so the second finds its head there and its tail on NVMe. The engine is the same all
    along: it registers again by itself."""
    truth = cold(model, PROMPT)
    engine = start_engine(own_daemon, model, OPTIONS)
    engine.generate(PROMPT, NEW)
    assert engine.flush(20.0)
    own_daemon.await_writes()
    own_daemon.kill()
    own_daemon.start()
    assert engine.wait_connected(20.0)
    scanned = nvme_reads(own_daemon)
    head = PROMPT[: 3 * CHUNK + 1]
    made = engine.generate(head, NEW)
    assert (made.reused_tokens, made.tokens) == (3 * CHUNK, cold(model, head).tokens)
    assert nvme_reads(own_daemon) - scanned == 3
    made = engine.generate(PROMPT, NEW)
    assert (made.reused_tokens, made.tokens) == (8 * CHUNK, truth.tokens)
    assert nvme_reads(own_daemon) - scanned == 8
    check_sound(engine)


@pytest.mark.parametrize("calls", [0, 2, 5, 5 + NEW // 2], ids=lambda n: f"at_forward_{n}")
def test_daemon_killed_in_the_middle_of_a_request(
    own_daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine, calls: int
) -> None:
    """field case 53: SIGKILL before the first block of the prompt, in the middle of it, and while
    decoding with a store open; then requests without a daemon; then it is back and hits resume."""
    truth = cold(model, PROMPT)
    engine = start_engine(own_daemon, model, OPTIONS)
    with calling(engine.model, calls, own_daemon.kill):
        assert engine.generate(PROMPT, NEW).tokens == truth.tokens
    assert engine.generate(PROMPT, NEW).tokens == truth.tokens
    own_daemon.start()
    assert engine.wait_connected(20.0)
    assert engine.generate(PROMPT, NEW).tokens == truth.tokens
    assert engine.flush(20.0)
    warm = engine.generate(PROMPT, NEW)
    assert (warm.reused_tokens, warm.tokens) == (8 * CHUNK, truth.tokens)
    check_sound(engine)


def test_daemon_killed_while_it_loads(
    own_daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """SIGKILL right behind a retrieve: whatever it wrote is computed anew unless it said done."""
    truth = cold(model, PROMPT)
    engine = start_engine(own_daemon, model, OPTIONS)
    engine.generate(PROMPT, NEW)
    assert engine.flush(20.0)
    link: Any = engine._link
    retrieve = link.retrieve

    def killing(*arguments: object) -> object:
        ticket = retrieve(*arguments)
        own_daemon.kill()
        return ticket

    link.retrieve = killing
    made = engine.generate(PROMPT, NEW)
    assert made.tokens == truth.tokens
    assert made.reused_tokens in {chunks * CHUNK for chunks in range(9)}
    check_sound(engine)


def test_engine_started_before_the_daemon_finds_it(tmp_path: Path, model: CausalModel) -> None:
    """No daemon at first: every request is a miss; once it is there the engine registers by
    itself."""
    truth = cold(model, PROMPT)
    daemon = OwnDaemon(tmp_path, ["--host-size", "64MiB", "--nvme-size", "off"])
    with (
        Client(f"unix:{daemon.socket}", connect_timeout_s=0.1) as client,
        Engine(model, OPTIONS, connect(client, model, "early")) as engine,
    ):
        assert not engine.wait_connected(0.0)
        assert engine.generate(PROMPT, NEW).tokens == truth.tokens
        try:
            daemon.start()
            assert engine.wait_connected(20.0)
            for reused in (0, 8 * CHUNK):
                made = engine.generate(PROMPT, NEW)
                assert (made.tokens, made.reused_tokens) == (truth.tokens, reused)
                check_sound(engine)
        finally:
            daemon.stop()


def test_stopped_daemon_costs_the_engine_its_memory_at_most(
    own_daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """field case 52: SIGSTOP while stores are open. Requests go on as misses; when the held blocks
    run short the engine leaves that memory to the daemon. After SIGCONT the daemon finishes its
    copies there, hurting nobody, and hits resume."""
    truth = cold(model, PROMPT)
    options = replace(OPTIONS, transfer_deadline_s=0.1, acknowledge_deadline_s=0.1)
    engine = start_engine(own_daemon, model, options)
    cache = engine.cache
    pid = own_daemon.stats()["process"]["pid"]
    with calling(engine.model, 4, lambda: os.kill(pid, signal.SIGSTOP)):
        assert engine.generate(PROMPT, NEW).tokens == truth.tokens
    try:
        for _ in range(3):
            assert engine.generate(PROMPT, NEW).tokens == truth.tokens
        assert engine.cache is not cache
    finally:
        os.kill(pid, signal.SIGCONT)
    assert engine.wait_connected(20.0)
    for _ in range(3):
        made = engine.generate(PROMPT, NEW)
        assert made.tokens == truth.tokens
        assert engine.flush(20.0)
    assert made.reused_tokens == 8 * CHUNK
    check_sound(engine)


class calling:
    """While entered, a model's forward number ``number`` calls ``action`` first."""

    def __init__(self, model: CausalModel, number: int, action: Callable[[], object]) -> None:
        self._model = model
        self._left = number
        self._action = action
        self._forward = model.forward

    def __enter__(self) -> None:
        self._model.forward = self._counted  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        del self._model.forward

    def _counted(self, tokens: torch.Tensor, start: int, pages: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == -1:
            self._action()
        return self._forward(tokens, start, pages)
