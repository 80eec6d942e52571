"""Policies: the order of candidates, and what they forget."""

from __future__ import annotations

import pytest

from kvstore.core.eviction import POLICIES, FirstInFirstOut, LeastRecentlyUsed, Look, Policy
from kvstore.core.messages import SpaceRecord
from kvstore.core.spaces import Space
from kvstore.core.tree_nodes import Copy
from tests.core.driver import Driver, limits
from tests.core.forest import key


def copies(count: int) -> list[Copy]:
    """Root copies that were used one after another; all their shards are there."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    found = [Copy(space, key(chr(97 + place)), 0, None) for place in range(count)]
    for place, copy in enumerate(found):
        copy.last_use, copy.full_ready = place + 1, 1
    return found


def leaves(copy: Copy) -> Look:
    """Each copy may leave."""
    return Look.LEAVES


class Looks:
    """So many looks, each of which finds that a copy may leave; then none."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, copy: Copy) -> Look:
        self.left -= 1
        return Look.LATER if self.left < 0 else Look.LEAVES


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_policy_returns_each_candidate_once(make: type[Policy]) -> None:
    """Offered twice, held once; taken, forgotten; offered again, held again."""
    policy, (a, b) = make(), copies(2)
    for copy in (a, b, a, b):
        policy.offer(copy)
    assert [policy.take(leaves) for _ in range(3)] == [a, b, None]
    policy.offer(b)
    assert policy.take(leaves) is b


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_policy_forgets_what_is_not_evictable_until_it_is_offered_again(
    make: type[Policy],
) -> None:
    """Chunk "a" is pinned when it comes up: "b" is taken; "a" comes back with its next offer
    only."""
    policy, (a, b) = make(), copies(2)
    policy.offer(a)
    policy.offer(b)
    assert policy.take(lambda copy: Look.STAYS if copy is a else Look.LEAVES) is b
    assert policy.take(leaves) is None
    policy.offer(a)
    assert policy.take(leaves) is a


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_coldest_use_takes_nothing(make: type[Policy]) -> None:
    """Asked any number of times, it names what ``take`` then returns."""
    policy, (a, b) = make(), copies(2)
    policy.offer(b)
    policy.offer(a)
    assert policy.coldest_use(leaves) == policy.coldest_use(leaves)
    assert policy.take(leaves) is not None
    assert policy.take(leaves) is not None
    assert policy.coldest_use(leaves) is None


def test_lru_sees_uses_after_the_offer() -> None:
    """Chunk "a" was offered first and is used again: "b" leaves first."""
    policy, (a, b) = LeastRecentlyUsed(), copies(2)
    policy.offer(a)
    policy.offer(b)
    a.last_use = 9
    assert policy.take(leaves) is b


def test_the_coldest_is_found_over_several_events() -> None:
    """Of 26 chunks 24 were used again since they were offered. With five looks an event nothing is
    taken until all those are passed over; then come the two that weren't, in the order of their
    uses, and the others in the order of theirs."""
    policy, all_copies = LeastRecentlyUsed(), copies(26)
    for copy in all_copies:
        policy.offer(copy)
    for use, copy in enumerate(reversed(all_copies[:24])):
        copy.last_use = 100 + use
    taken, events = [], 0
    while len(taken) < 26:
        events += 1
        copy = policy.take(Looks(5))
        if copy is not None:
            taken.append(copy)
    assert taken == [*all_copies[24:], *reversed(all_copies[:24])]
    assert events == 26 + 24 // 5


def test_fifo_does_not() -> None:
    """What was offered first leaves first, whatever was used."""
    policy, (a, b) = FirstInFirstOut(), copies(2)
    policy.offer(a)
    policy.offer(b)
    a.last_use = 9
    assert policy.take(leaves) is a


def test_an_incomplete_family_leaves_first() -> None:
    """Chunk "b" lacks a shard: it leaves before "a", which was used earlier."""
    policy, (a, b) = LeastRecentlyUsed(), copies(2)
    b.full_ready = 0
    policy.offer(a)
    policy.offer(b)
    assert policy.take(leaves) is b


def test_heap_does_not_keep_copies_that_are_gone() -> None:
    """A tier that never fills is cleared again and again: the policy's heap must not grow with
    chunks that left long ago, else the daemon's memory grows for ever (it runs for months)."""
    made: list[LeastRecentlyUsed] = []

    def policy() -> Policy:
        made.append(LeastRecentlyUsed())
        return made[-1]

    driver = Driver(limits(host_slots=8), policy=policy)
    engine = driver.engine()
    for _ in range(100):
        assert engine.put(engine.chain(4)) == bytes([1] * 4)
        driver.clear()
        driver.tick()
    held = sum(len(lru) for lru in made)
    assert held <= 32, f"{held} candidates are held, where 8 slots are all there is"
