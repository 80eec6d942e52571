"""Daemons that share a Redis server which a proxy makes sick: always a miss, never wrong bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.redis_fleet import Member, fleet
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import standalone

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
