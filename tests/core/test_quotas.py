"""Quotas: a tenant at its share of a tier gives up leaves of its own, or is refused."""

from __future__ import annotations

import pytest

from kvstore.core.candidates import Candidates
from kvstore.core.keys import Namespace
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import TierName
from kvstore.core.quotas import Account, Quotas
from tests.core.disk import Disk
from tests.core.driver import BLOCK_BYTES, Driver, Engine, layout, limits

HALF = Quotas(default=0.5)
NVME = TierName.NVME


def account(driver: Driver, tenant: str, tier: TierName = TierName.HOST) -> Account:
    """A tenant's account in a tier."""
    tree = driver.service._state.directory.tree(tier)
    assert tree is not None
    return tree.accounts.of(tenant)


def two(driver: Driver) -> tuple[Engine, Engine]:
    """An engine each of the tenants blue and red."""
    return driver.engine("e", tenant="blue"), driver.engine("e", tenant="red")


def test_a_tenant_at_its_quota_evicts_its_own_coldest_leaf() -> None:
    """Half of eight places each. Red holds two old chunks; blue stores six, one by one: its own
    first two leave, though red's are colder and half of the tier is free at first."""
    driver = Driver(limits(host_slots=8, quotas=HALF))
    blue, red = two(driver)
    assert red.put(red.chain(2)) == b"\1\1"
    for seed in range(6):
        assert blue.put(blue.chain(1, seed)) == b"\1"
    assert [blue.peek(blue.chain(1, seed)) for seed in range(6)] == [0, 0, 1, 1, 1, 1]
    assert red.peek(red.chain(2)) == 2
    assert account(driver, "blue").used_bytes == 4 * BLOCK_BYTES
    assert driver.drops("host_quota") == 0


def test_the_leading_part_of_a_prompt_larger_than_the_quota_is_kept() -> None:
    """Six chunks of one prompt, four places: the leading four are kept, the rest is refused and
    counted, and another tenant isn't touched."""
    driver = Driver(limits(host_slots=8, quotas=HALF))
    blue, red = two(driver)
    assert red.put(red.chain(4)) == b"\1" * 4
    assert blue.put(blue.chain(6)) == b"\1" * 4 + b"\0" * 2
    assert driver.drops("host_quota") == 2
    assert (blue.peek(blue.chain(6)), red.peek(red.chain(4))) == (4, 4)


def test_a_tenant_of_leased_chunks_is_refused_and_others_are_not() -> None:
    """All of blue's chunks are leased: its store is refused; red's goes on."""
    driver = Driver(limits(host_slots=8, quotas=HALF))
    blue, red = two(driver)
    for seed in range(4):
        blue.put(blue.chain(1, seed))
        assert blue.lookup(blue.chain(1, seed), f"r{seed}") == 1
    assert blue.put(blue.chain(1, 9)) == b"\0"
    assert driver.drops("host_quota") == 1
    assert red.put(red.chain(4)) == b"\1" * 4


def test_a_named_tenant_has_its_own_share() -> None:
    """Blue may have a quarter, all others have no quota."""
    driver = Driver(limits(host_slots=8, quotas=Quotas(None, (("blue", 0.25),))))
    blue, red = two(driver)
    assert blue.put(blue.chain(4)) == b"\1\1\0\0"
    assert red.put(red.chain(6)) == b"\1" * 6
    assert (account(driver, "blue").quota_bytes, account(driver, "red").quota_bytes) == (
        2 * BLOCK_BYTES,
        None,
    )


def test_a_quota_is_no_reservation() -> None:
    """Without a quota of its own, a tenant takes the coldest of all, those of a tenant below its
    quota too."""
    driver = Driver(limits(host_slots=8, quotas=Quotas(None, (("blue", 0.5),))))
    blue, red = two(driver)
    blue.put(blue.chain(4))
    red.put(red.chain(8))
    assert (blue.peek(blue.chain(4)), red.peek(red.chain(8))) == (0, 8)


def test_two_models_of_one_tenant_share_its_quota() -> None:
    """Blue's chunks of one size fill its share; for a larger one those leave, as many as it
    takes."""
    driver = Driver(Limits(host=TierLimits(4, 4 * BLOCK_BYTES), quotas=HALF))
    small = driver.engine("small", tenant="blue")
    wide = Namespace("b", "r", "f")
    large = driver.engine("large", tenant="blue", shape=layout(2), namespace=wide)
    for seed in range(8):
        assert small.put(small.chain(1, seed)) == b"\1"
    assert large.put(large.chain(1)) == b"\1"
    assert [small.peek(small.chain(1, seed)) for seed in range(8)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert account(driver, "blue").used_bytes == 8 * BLOCK_BYTES


def test_what_is_cleared_makes_room_before_anything_is_refused() -> None:
    """Blue's four chunks are cleared and wait for the sweep: its next four are kept at once."""
    driver = Driver(limits(host_slots=8, quotas=HALF))
    blue, _ = two(driver)
    blue.put(blue.chain(4))
    driver.clear("blue")
    assert blue.put(blue.chain(4)) == b"\1" * 4
    assert driver.drops("host_quota") == 0


def test_a_tenant_gives_up_its_own_over_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of blue's four chunks are leased and looked at first, two an event: its store waits for
    the next event rather than being refused."""
    monkeypatch.setattr(Candidates, "begin", lambda self, looks: setattr(self, "looks_left", 2))
    driver = Driver(limits(host_slots=8, quotas=HALF))
    blue, _ = two(driver)
    for seed in range(4):
        blue.put(blue.chain(1, seed))
    for seed in range(3):
        assert blue.lookup(blue.chain(1, seed), f"r{seed}") == 1
    number = blue.store(blue.chain(1, 9))
    assert not driver.moves
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
    driver.run()
    assert driver.completed(blue.workers[0], number).done == b"\1"
    assert driver.drops("host_quota") == 0


def test_what_a_scan_finds_counts_even_beyond_the_quota() -> None:
    """Blue filled all of NVMe; after a restart it may have half. All of it is found again; each
    new write takes the place of blue's own coldest, until it is within its share."""
    first = Driver(limits(host_slots=16, nvme_slots=8))
    first.scanned()
    blue = first.engine("e", tenant="blue")
    blue.put(blue.chain(8))
    disk = Disk()
    disk.take(first)
    second = Driver(limits(host_slots=16, nvme_slots=8, quotas=HALF), disk.spaces)
    second.scanned(disk.found())
    blue = second.engine("e", tenant="blue")
    assert second.tier(NVME).chunks == 8
    assert blue.put(blue.chain(1, seed=5)) == b"\1"
    second.run()
    assert account(second, "blue", NVME).used_bytes == 4 * 2 * BLOCK_BYTES
    assert second.tier(NVME).chunks == 4
