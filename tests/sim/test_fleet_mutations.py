"""Faults put into the core's part of the remote tier on purpose; the simulator must notice each, by
what the outside sees alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.answers import Answers, Found
from kvstore.core.leases import Lease
from kvstore.core.messages import MoveStatus
from kvstore.core.probing import Probing
from kvstore.core.reads import Reads
from kvstore.core.remote_messages import RemoteState
from kvstore.core.remote_tier import RemoteTier
from kvstore.core.service import Service
from kvstore.core.sharing import Sharing
from kvstore.core.spaces import Space
from tests.sim.errors import SimulationError
from tests.sim.fleets import simulate_fleet

SEEDS = range(700, 1100)
"""Worlds that are tried until one notices; most mutations are noticed at once."""
STEPS = 250
Patch = Callable[..., None]
"""``monkeypatch.setattr``."""


def a_bad_value_is_used(patch: Patch) -> None:
    """What failed its check, or couldn't be read at all, is handed on."""
    ended = Reads.ended

    def always(self: Reads, job: Any, status: MoveStatus) -> None:
        ended(self, job, MoveStatus.OK if job.remote is not None else status)

    patch(Reads, "ended", always)


def nobody_is_told_at_the_deadline(patch: Patch) -> None:
    """A lookup waits for its probe however long that takes."""
    patch(Probing, "tick", lambda self: None)


def a_probe_that_fails_is_forgotten(patch: Patch) -> None:
    """Those who wait for it wait until the deadline, and it stays open."""
    probed = Probing.probed

    def told(self: Probing, event: Any) -> bool:
        return event.error != "" or probed(self, event)

    patch(Probing, "probed", told)


def a_hole_is_jumped_over(patch: Patch) -> None:
    """A hit reaches to the end of what was asked for."""
    patch(Found, "reach", lambda self, local, most, *rest: most)


def a_lease_outlives_a_clear(patch: Patch) -> None:
    """What the remote tier promised is still promised in the next epoch."""
    patch(Lease, "holds", lambda self: all(copy.live for _, copy in self.pins))


def answers_are_anyones(patch: Patch) -> None:
    """What is remembered of a chain is taken for any namespace's and tenant's."""
    put, get = Answers.put, Answers.get
    patch(Answers, "put", lambda self, space, *rest, **more: put(self, None, *rest, **more))
    patch(Answers, "get", lambda self, space, *rest: get(self, None, *rest))


def a_tier_that_is_down_is_used(patch: Patch) -> None:
    """The core doesn't mind."""
    told = RemoteTier.told
    patch(RemoteTier, "told", lambda self, event: told(self, RemoteState(True)))


def nothing_is_shared(patch: Patch) -> None:
    """Commits aren't considered for the remote tier."""
    patch(Sharing, "consider", lambda self, slot: None)


def staging_slots_are_never_free_again(patch: Patch) -> None:
    """A read from the remote tier that was staged counts as staged for ever."""
    forget = Reads._forget

    def kept(self: Reads, job: Any) -> None:
        staged = set(self._staged)
        forget(self, job)
        self._staged.update(staged)

    patch(Reads, "_forget", kept)


def what_others_cleared_is_shared_again(patch: Patch) -> None:
    """A chunk that was here before another node's clear is written under the new epoch."""

    def saw(self: Space, epoch: int) -> None:
        self.fleet_epoch = max(self.fleet_epoch, epoch)

    patch(Space, "saw_fleet_epoch", saw)


MUTATIONS = (
    a_bad_value_is_used,
    nobody_is_told_at_the_deadline,
    a_probe_that_fails_is_forgotten,
    a_hole_is_jumped_over,
    a_lease_outlives_a_clear,
    answers_are_anyones,
    a_tier_that_is_down_is_used,
    nothing_is_shared,
    staging_slots_are_never_free_again,
    what_others_cleared_is_shared_again,
)


def test_the_core_as_it_is_passes_these_seeds() -> None:
    for seed in SEEDS[:30]:
        simulate_fleet(seed, STEPS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)
def test_mutation_is_caught(
    mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "check_invariants", lambda self: None)
    mutation(monkeypatch.setattr)
    for seed in SEEDS:
        try:
            simulate_fleet(seed, STEPS)
        except SimulationError as error:
            if isinstance(error.__cause__, SimulationError):
                return
    pytest.fail(f"{mutation.__name__} went unnoticed by all of {SEEDS}")
