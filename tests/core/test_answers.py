"""Answers: how far a hit reaches with what a probe has found, and for whom that is remembered."""

from __future__ import annotations

import random

import pytest

from kvstore.core.answers import Answers, Found
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import SpaceRecord
from kvstore.core.spaces import Space


def brute(found: Found, local: int, most: int, window: int, local_windows: set[int]) -> int:
    """The longest hit by trying each length, but those whose windows begin before what the answer
    knows."""
    best = 0
    for length in range(1, most + 1):
        whole = all(d < local or found.has(Part.FULL, d) for d in range(length))
        below = range(max(0, length - window), length)
        seen = all(found.has(Part.WINDOW, d) or (d < local and d in local_windows) for d in below)
        if whole and seen and below.start >= found.first:
            best = length
    return best


@pytest.mark.parametrize("seed", range(40))
def test_a_hit_reaches_as_far_as_trying_each_length_says(seed: int) -> None:
    """Random answers, with and without windows. What the local tiers have alone counts anyway."""
    rng = random.Random(seed)
    for _ in range(200):
        count, window = rng.randint(1, 8), rng.choice((0, 0, 1, 2, 3))
        local = rng.randint(0, count)
        first = max(0, local - window)
        size = rng.randint(0, count - first)
        full = bytes(rng.random() < 0.8 for _ in range(size))
        windows = bytes(rng.random() < 0.7 for _ in range(size)) if window else b""
        found = Found(first, 7, full, windows)
        have = {d for d in range(local) if rng.random() < 0.6}
        got = found.reach(local, count, window, have.__contains__)
        expected = brute(found, local, count, window, have)
        local_hit = brute(Found(0, 7, b"", b""), local, local, window, have)
        assert max(got, local_hit) == max(expected, local_hit)


def test_answers_are_bounded_in_number_and_bytes_and_expire() -> None:
    limits = RemoteLimits(answers_max=3, answer_bytes_max=32 * 10)
    answers = Answers(limits)
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)

    def chain(number: int, count: int) -> bytes:
        return b"".join(bytes([number, place]) + bytes(30) for place in range(count))

    for number in range(5):
        answers.put(space, chain(number, 2), Found(0, 1, b"\1\1"), 0, now=0.0)
    assert len(answers) == 3
    answers.put(space, chain(9, 9), Found(0, 1, b"\1" * 9), 0, now=0.5)
    assert len(answers) == 1
    answers.expire(1.4, 10)
    assert len(answers) == 1
    answers.expire(1.5, 10)
    assert len(answers) == 0


def test_an_answer_serves_chains_that_share_its_head() -> None:
    """Known of [0, 4), of which 3 are there: a chain that leaves it behind 2 isn't known, one that
    leaves it behind 3 is, as chunk 3 isn't there anyway, and a shorter one is."""
    answers = Answers(RemoteLimits())
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    keys = [bytes([place]) * 32 for place in range(6)]
    other = [bytes([place + 100]) * 32 for place in range(6)]
    answers.put(space, b"".join(keys[:5]), Found(0, 1, b"\1\1\1\0\1"), 0, now=0.0)

    def known(chain: list[bytes]) -> bytes | None:
        found = answers.get(space, b"".join(chain), 0, 0.1)
        return None if found is None else found.full

    assert known(keys) == b"\1\1\1\0"
    assert known(keys[:2]) == b"\1\1"
    assert known(keys[:4] + other[4:]) == b"\1\1\1\0"
    assert known(keys[:3] + other[3:]) is None
    assert known(other) is None
