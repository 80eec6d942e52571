"""Daemons that share a Redis server which a proxy makes sick: always a miss, never wrong bytes.

A seed is printed with every failure: KVSTORE_TEST_SEED repeats it."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.redis_fleet import Member, fleet
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import standalone, wait_until

FAULTS = [fault for fault in Fault if fault is not Fault.NONE]
SHORT = {"KVSTORE_REDIS_TIMEOUT": "500ms", "KVSTORE_REDIS_CONNECT_TIMEOUT": "500ms"}


class Sick:
    """Two members, and the proxy that stands between both and the server."""

    def __init__(self, proxy: Proxy, first: Member, second: Member) -> None:
        self.proxy = proxy
        self.first = first
        self.second = second


@pytest.fixture(scope="module")
def sick() -> Iterator[Sick]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-")))
        server = stack.enter_context(standalone(folder / "v"))
        proxy = stack.enter_context(Proxy(server.port))
        made = stack.enter_context(fleet(folder))
        yield Sick(proxy, *made.pair(proxy.url, **SHORT))


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.lower() for fault in FAULTS])
def test_a_fault_is_a_miss_and_heals(sick: Sick, fault: Fault) -> None:
    """Engine B asks for what A shared while the server is sick: what it is given is right, or it
    computes. Stores go on meanwhile. Well again, B is given what A shares. Field case 77."""
    seed = 1000 + 10 * FAULTS.index(fault)
    sick.first.share(seed, seed + 1, chunks=1)
    sick.proxy.delay_s = 5.0
    sick.proxy.set(fault)
    try:
        given = sick.second.load(seed, chunks=1)
        assert fault is Fault.REFUSE or sick.proxy.hit.wait(60.0), "the fault met nothing"
        sick.second.store(seed + 2, chunks=1)
        sick.second.load(seed + 2, chunks=1)
        assert sick.second.stats()["process"]["state"] == "ok"
    finally:
        sick.proxy.set(Fault.NONE)
    assert given == 0
    for member in (sick.first, sick.second):
        member.wait_up()
    sick.first.share(seed + 3, chunks=1)
    sick.second.load_all(seed + 3, chunks=1)


STEPS = int(os.environ.get("REDIS_FAULT_STEPS", "2"))


def test_faults_in_any_order_under_traffic(sick: Sick) -> None:
    """Two engines store and load all the while, each what the other one has stored; whatever the
    server does at the moment, what they are given is right, and well again it is of use again."""
    seed = int(os.environ.get("KVSTORE_TEST_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"KVSTORE_TEST_SEED={seed}")
    generator = random.Random(seed)
    workers = [Worker(sick.first, 10_000, 20_000), Worker(sick.second, 20_000, 10_000)]
    sick.proxy.delay_s = 0.1
    with ThreadPoolExecutor(2) as threads:
        works = [threads.submit(worker.run, random.Random(seed)) for worker in workers]
        try:
            for _ in range(STEPS):
                before = sum(worker.loaded for worker in workers)
                wait_until(
                    lambda before=before: (
                        sum(worker.loaded for worker in workers) > before
                        or any(work.done() for work in works)
                    ),
                    "a chunk of the other engine's is loaded",
                )
                sick.proxy.set(generator.choice(FAULTS))
                sick.proxy.hit.wait(0.3)
                sick.proxy.set(Fault.NONE)
        finally:
            sick.proxy.set(Fault.NONE)
            for worker in workers:
                worker.ended = True
        for work in works:
            work.result()


class Worker:
    """An engine that stores prompts from one seed on and loads those that another one stores, from
    its first seed on; ``loaded`` chunks of them so far."""

    def __init__(self, member: Member, own: int, other: int) -> None:
        self.loaded = 0
        self.ended = False
        self._member = member
        self._own = own
        self._other = other

    def run(self, generator: random.Random) -> None:
        """Until ``ended``; fails where any byte is wrong."""
        number = 0
        while not self.ended:
            self._member.store(self._own + number, chunks=2)
            seed = self._other + max(0, number - generator.randrange(20))
            self.loaded += self._member.load(seed, chunks=2)
            number += 1
