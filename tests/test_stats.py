"""The latency histogram: its percentiles against a sorted list."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.stats import Drop, Histogram, LatencySummary

LATENCIES = st.lists(
    st.floats(min_value=1e-6, max_value=1e5, allow_nan=False), min_size=1, max_size=60
)


def histogram_of(latencies_s: list[float]) -> Histogram:
    histogram = Histogram()
    for latency_s in latencies_s:
        histogram.add(latency_s)
    return histogram


def test_an_empty_histogram_is_all_zeros() -> None:
    assert Histogram().summary() == LatencySummary(0, 0.0, 0.0, 0.0, 0.0)


@given(LATENCIES)
def test_percentiles_bound_the_true_ones_within_a_bucket(latencies_s: list[float]) -> None:
    """A percentile is never below the true one, and at most a quarter (one bucket) above it."""
    summary = histogram_of(latencies_s).summary()
    ordered = sorted(latencies_s)
    marks = ((0.5, summary.p50_s), (0.9, summary.p90_s), (0.99, summary.p99_s))
    for share, reported in marks:
        true = ordered[math.ceil(share * len(ordered)) - 1]
        assert true * (1 - 1e-9) <= reported <= true * 1.25 * (1 + 1e-9)


@given(LATENCIES)
def test_summary_is_ordered_and_ends_at_the_largest(latencies_s: list[float]) -> None:
    summary = histogram_of(latencies_s).summary()
    assert summary.count == len(latencies_s)
    assert summary.p50_s <= summary.p90_s <= summary.p99_s <= summary.max_s == max(latencies_s)


@pytest.mark.parametrize("latency_s", [0.0, 1e-9, 1e12])
def test_a_latency_outside_all_buckets_is_still_counted(latency_s: float) -> None:
    summary = histogram_of([latency_s]).summary()
    assert summary.count == 1
    assert summary.max_s == latency_s


def test_one_slow_outlier_shows_in_the_maximum_and_not_in_the_median() -> None:
    summary = histogram_of([1e-3] * 99 + [10.0]).summary()
    assert summary.p50_s == summary.p90_s
    assert summary.p50_s <= 1.25e-3
    assert summary.max_s == 10.0


def test_snapshots_are_frozen() -> None:
    summary = histogram_of([1.0]).summary()
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.count = 2  # type: ignore[misc]


def test_drop_reasons_are_distinct_metric_labels() -> None:
    names = [drop.value for drop in Drop]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name == name.lower() for name in names)
