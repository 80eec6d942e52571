"""ByteBudget: a bucket of bytes; and what it lets into NVMe."""

from __future__ import annotations

import pytest

from kvstore.core.admission import ByteBudget


def admit(budget: ByteBudget, nbytes: int, now: float) -> bool:
    """Let bytes in if there is room for them."""
    if not budget.has_room(nbytes, now):
        return False
    budget.spend(nbytes)
    return True


def test_no_limit_admits_everything() -> None:
    """A rate of 0 is no limit."""
    budget = ByteBudget(0, 1.0)
    assert all(admit(budget, 1 << 40, 0.0) for _ in range(3))


def test_the_bucket_starts_full_and_empties() -> None:
    """100 bytes a second over 2 s: 200 bytes at once, then none."""
    budget = ByteBudget(100, 2.0)
    assert admit(budget, 150, 0.0)
    assert admit(budget, 50, 0.0)
    assert not admit(budget, 1, 0.0)


def test_the_bucket_fills_at_its_rate_up_to_the_burst() -> None:
    """After 0.5 s 50 bytes are there; after an hour no more than the burst."""
    budget = ByteBudget(100, 2.0)
    assert admit(budget, 200, 0.0)
    assert not admit(budget, 51, 0.5)
    assert admit(budget, 50, 0.5)
    assert admit(budget, 200, 3600.0)
    assert not admit(budget, 1, 3600.0)


def test_asking_takes_nothing() -> None:
    """A chunk that is too large now leaves the room for a smaller one, asked however often."""
    budget = ByteBudget(100, 1.0)
    assert admit(budget, 60, 0.0)
    assert not budget.has_room(60, 0.0)
    assert budget.has_room(40, 0.0)
    assert budget.has_room(40, 0.0)


def test_a_chunk_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for() -> None:
    """No size starves, but over time no more bytes pass than the rate allows."""
    budget = ByteBudget(100, 1.0)
    assert admit(budget, 250, 0.0)
    assert not admit(budget, 250, 1.0)
    assert not admit(budget, 1, 1.0)
    assert admit(budget, 250, 2.5)


@pytest.mark.parametrize("nbytes", [30, 100, 170])
def test_over_time_the_rate_holds(nbytes: int) -> None:
    """Asked every 10 ms for 100 s, the bucket admits its rate, and the burst once."""
    budget = ByteBudget(100, 1.0)
    admitted = sum(nbytes for step in range(10_000) if admit(budget, nbytes, step / 100))
    assert 100 * 100 - nbytes <= admitted <= 100 * 101 + nbytes
