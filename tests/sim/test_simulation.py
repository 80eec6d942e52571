"""The simulator's own seeds, fixed and fresh, and proof that it is neither idle nor blind."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

import kvstore.core.spaces as spaces
from kvstore.core.transfers import Transfers
from tests.sim.errors import SimulationError
from tests.sim.faults import Fault
from tests.sim.fleets import simulate_fleet
from tests.sim.run import simulate
from tests.sim.themes import THEMES

FIXED = range(500, 580)
FLEETS = range(500, 530)
FRESH_SECONDS = float(os.environ.get("SIM_SECONDS", "60"))
"""How long other worlds are tried in each run; ``make sim`` and ``make soak`` do so for minutes."""
HAPPENS = (
    "Store", "Retrieve", "Lookup", "Release", "Cancel", "Register", "Attach", "SetRevision",
    "cleared", "cancelled", "stored", "not stored", "retrieved", "not retrieved", "hit chunks",
    "hits that had to be", "store ok", "load ok", "read ok", "write ok", "write no space",
    "erase ok", "refused Store", "refused Retrieve", "refused Register", "evictions", "probes",
    "probes written", "found at start", "leases that had to hold", "host_full", "parent_missing",
    "corrupt", "key_collision", "session_lost", "nvme_budget", "nvme_backlog", "scan_old_epoch",
    "pending", "remote read ok", "remote read corrupt", "remote read foreign", "remote read failed",
    "remote write ok", "remote write no space", "redis_lost", "redis_backlog", "redis_down",
    "evicted_before_redis", "shared", "world fleet", "scan_orphan", "Watch", "resync",
    "told chunk present", "told chunk absent", "told window present", "told window absent",
    *(f"world {theme.name}" for theme in THEMES),
)  # fmt: skip
"""What must occur somewhere in the fixed seeds, beside each fault."""


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """What happened in the fixed seeds, all of which pass."""
    total: Counter[str] = Counter()
    for seed in FIXED:
        total.update(simulate(seed))
    for seed in FLEETS:
        total.update(simulate_fleet(seed))
    return total


def test_fixed_seeds_pass_and_everything_happens_in_them(counts: Counter[str]) -> None:
    """A simulator in which a fault never occurs proves nothing about it."""
    assert [what for what in HAPPENS if not counts[what]] == []
    assert [fault.value for fault in Fault if not counts[fault.name]] == []


def test_most_chunks_that_are_stored_and_asked_for_are_right(counts: Counter[str]) -> None:
    """Refusing everything would be safe, too."""
    assert counts["retrieved"] > counts["not retrieved"]
    assert counts["hits that had to be"] > 500


def test_fresh_seeds_pass() -> None:
    """Other worlds in each run; a failure prints its seed and how to replay it."""
    seed = first = random.SystemRandom().randrange(1 << 40)
    end = time.monotonic() + FRESH_SECONDS
    while time.monotonic() < end:
        (simulate_fleet if seed % 4 == 0 else simulate)(seed)
        seed += 1
    print(f"fresh seeds {first} to {seed - 1} passed")


def test_seeds_pass_where_only_two_namespaces_may_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and new revisions are refused, or take the place of namespaces that nobody uses."""
    monkeypatch.setattr(spaces, "SPACES_MAX", 2)
    total: Counter[str] = Counter()
    for seed in range(600, 612):
        total.update(simulate(seed, steps=250))
    assert total["refused Register"]
    assert total["retrieved"]


def test_a_seed_tells_the_same_story_each_time() -> None:
    assert simulate(501) == simulate(501)
    assert simulate_fleet(501, 200) == simulate_fleet(501, 200)


def test_a_failure_names_seed_story_and_how_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that forgets a Move's end is caught, and the last events are told."""
    monkeypatch.setattr(Transfers, "running", lambda self: 1)
    with pytest.raises(SimulationError) as caught:
        simulate(500)
    text = str(caught.value)
    assert text.startswith("seed 500, event ")
    assert "something is still held: {'moves': 1}" in text
    assert text.endswith("replay: python -m tests.sim --seed 500 --count 1 --steps 400")
    assert len(text.splitlines()) > 60
