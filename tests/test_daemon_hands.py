"""An engine's memory on its way into the daemon."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import create_host_memory, daemon_hands
from kvstore.core.errors import CapacityError
from kvstore.core.limits import Limits, TierLimits
from kvstore.machine import memory_facts
from tests.link_rig import MEMORY_BYTES, layout

LIMITS = Limits(TierLimits(4, 1 << 20))


def test_memory_that_cannot_come_to_exist_is_refused_before_it_is_touched() -> None:
    """An engine registers a sparse memfd that is larger than the machine: to fault it in would have
    the kernel kill the daemon, and with it what all other engines stored."""
    nbytes = 4 * memory_facts().total_bytes
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(CapacityError, match="never touched"):
            daemon_hands.open_pages(LIMITS, fd, nbytes, layout())
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)
    assert "sparse" not in Path("/proc/self/maps").read_text()


def test_memory_that_is_there_is_taken_however_little_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that has touched its memory costs the daemon none."""
    none_left = replace(memory_facts(), available_bytes=0)
    monkeypatch.setattr(daemon_hands, "memory_facts", lambda: none_left)
    with create_host_memory("engine", MEMORY_BYTES) as memory:
        daemon_hands.open_pages(LIMITS, memory.fd, MEMORY_BYTES, layout()).close()
