"""The host arena."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import CapacityError, ConfigError, InvariantError
from kvstore.core.messages import Place, TierName
from kvstore.testing import pattern
from kvstore.tiers import host as host_module
from kvstore.tiers.host import HostTier

MIB = 1 << 20


def place(slab: int, index: int, slot_bytes: int) -> Place:
    return Place(TierName.HOST, slab, index, slot_bytes)


@pytest.fixture
def host() -> Iterator[HostTier]:
    tier = HostTier(slabs=4, slab_bytes=8 * MIB)
    tier.open()
    yield tier
    tier.close()


def test_slots_are_aligned_and_apart(host: HostTier) -> None:
    """Every slot of slabs that are cut differently holds its own bytes."""
    places = [place(0, i, 2 * MIB) for i in range(4)] + [place(1, i, 12_288) for i in range(682)]
    places.append(place(3, 0, 8 * MIB))
    for number, where in enumerate(places):
        view = host.view(where, where.slot_bytes - 1)
        assert view.ctypes.data % 4096 == 0
        view[:] = number % 251
    for number, where in enumerate(places):
        assert (host.view(where, where.slot_bytes - 1) == number % 251).all()


@pytest.mark.parametrize(
    ("slab", "index", "slot_bytes", "nbytes"),
    [
        (4, 0, MIB, 1),
        (-1, 0, MIB, 1),
        (0, 8, MIB, 1),
        (1, -1, MIB, 1),
        (0, 0, MIB, MIB + 1),
        (3, 1, 8 * MIB, 1),
    ],
)
def test_place_outside_the_arena_is_a_bug(
    host: HostTier, slab: int, index: int, slot_bytes: int, nbytes: int
) -> None:
    with pytest.raises(InvariantError):
        host.view(place(slab, index, slot_bytes), nbytes)


def test_arena_is_touched_in_the_background(host: HostTier) -> None:
    """The tier serves at once; later all pages are there, and status says which kind."""
    assert host.wait_touched(60)
    stats = host.stats()
    assert stats.bytes_total == stats.bytes_touched == 32 * MIB
    assert "pages" in stats.mode
    assert ("huge" in stats.mode) == (stats.bytes_huge > 0)


def test_touching_changes_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is stored before its pages were touched: it is still there afterwards."""
    go, real = threading.Event(), host_module.populate

    def late(address: int, nbytes: int) -> None:
        assert go.wait(60)
        real(address, nbytes)

    monkeypatch.setattr(host_module, "populate", late)
    tier = HostTier(2, 8 * MIB)
    tier.open()
    view = tier.view(place(1, 0, 8 * MIB), 8 * MIB)
    view[:] = pattern(1, 8 * MIB)
    go.set()
    assert tier.wait_touched(60)
    np.testing.assert_array_equal(view, pattern(1, 8 * MIB))
    tier.close()


def test_close_stops_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is stopped early doesn't touch the rest of its arena first."""
    steps, reached, go = [], threading.Event(), threading.Event()

    def step(address: int, nbytes: int) -> None:
        steps.append(address)
        reached.set()
        assert go.wait(60)

    monkeypatch.setattr(host_module, "populate", step)
    tier = HostTier(8, 16 * MIB)
    tier.open()
    assert reached.wait(60)
    tier._stop.set()
    go.set()
    tier.close()
    assert len(steps) == 1
    assert tier.stats().bytes_touched <= 16 * MIB


def test_machine_without_memory_is_said_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching fails half-way: the tier goes on, and status says so."""

    def refuse(address: int, nbytes: int) -> None:
        raise CapacityError("no pages left")

    monkeypatch.setattr(host_module, "populate", refuse)
    tier = HostTier(1, 8 * MIB)
    tier.open()
    assert tier.wait_touched(60)
    assert "no pages left" in tier.stats().mode
    tier.view(place(0, 0, 4096), 4096)[:] = 1
    tier.close()


def test_close_gives_the_memory_back() -> None:
    """Idempotent, with views of slots still around."""

    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    tier = HostTier(4, 16 * MIB)
    before = resident_pages()
    tier.open()
    assert tier.wait_touched(60)
    view = tier.view(place(0, 0, 4096), 4096)
    assert resident_pages() - before > 60 * 256
    tier.close()
    tier.close()
    assert resident_pages() - before < 4 * 256
    assert tier.stats().mode == "closed"
    assert view.nbytes == 4096


@pytest.mark.parametrize(("slabs", "slab_bytes"), [(0, 4096), (1, 0), (1, 5000), (1, 1 << 60)])
def test_impossible_sizes_are_refused_in_one_line(slabs: int, slab_bytes: int) -> None:
    tier = HostTier(slabs, slab_bytes)
    with pytest.raises(ConfigError) as caught:
        tier.open()
    assert "\n" not in str(caught.value)
    tier.close()
