"""Sizes and durations as people write them, and back."""

from __future__ import annotations

import pytest

from kvstore.units import (
    format_duration,
    format_exact_size,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("64MiB", 64 * MIB), ("64 mib", 64 * MIB), ("1.5GiB", 3 * GIB // 2),
     ("2T", 2 << 40), ("1GB", 10**9), ("10k", 10 * KIB), ("1Gi", GIB)],
)  # fmt: skip
def test_sizes_parse(text: str, nbytes: int) -> None:
    """Binary and decimal units; a bare letter is binary, as Kubernetes' are."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 64 * MIB, 3 * GIB // 2, 5 << 40, 10**9])
def test_exact_size_parses_back(nbytes: int) -> None:
    """What --print-config shows can be given as a setting."""
    assert parse_size(format_exact_size(nbytes)) == nbytes


def test_sizes_and_durations_read_well() -> None:
    """Three digits and a unit."""
    assert [format_size(n) for n in (0, 1023, 64 * MIB, 1288490189)] == [
        "0 B", "1023 B", "64 MiB", "1.2 GiB",
    ]  # fmt: skip
    assert [parse_duration(t) for t in ("60", "500ms", "5min", "1h")] == [60.0, 0.5, 300.0, 3600.0]


@pytest.mark.parametrize("text", ["", "MiB", "1 2", "-1", "1e3", "0x10", "1.2.3", "5 miles", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0%", "101%", "20", "20%%", "-5%", "5MiB%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    """A share is above 0 % and up to 100 %."""
    with pytest.raises(ValueError, match="is not a"):
        parse_share(text)


def test_durations_read_well() -> None:
    """From microseconds to hours."""
    assert [format_duration(s) for s in (85e-6, 1.234e-3, 0.5, 3.14159, 600, 7500)] == [
        "85 us", "1.23 ms", "500 ms", "3.14 s", "10 min", "2 h 5 min",
    ]  # fmt: skip
