"""A Redis server that lies, against the tier: bytes that were verified or an expected error, within
the operation's deadline; what the tier's own thread does is tried here, too."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.core.errors import CapacityError, ChunkCorruptError, TierUnavailableError
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.core.remote_messages import Probe, RemoteClear, RemoteEnter
from kvstore.testing import pattern, sample_header
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_lane import ReplyError
from kvstore.tiers.redis_settings import RedisSettings
from tests.fuzz.liar import LyingServer
from tests.fuzz.mutate import EXAMPLES, fuzz, is_line
from tests.link_rig import eventually

FORMS = (
    "redis://127.0.0.1:{port}",
    "redis+cluster://127.0.0.1:{port}",
    "redis+sentinel://127.0.0.1:{port}/main",
)
TIMEOUT_S = 0.1
"""Lies that promise more than comes take it; where a machine is slow, honest answers do, too."""
PAYLOAD_BYTES = 10_000
HEADERS = [sample_header(seed, PAYLOAD_BYTES) for seed in range(1, 9)]
SPACE = ("tenant", bytes(range(32)))
GROWTH_BYTES_MAX = 512 << 20
EXPECTED = (CapacityError, ChunkCorruptError, TierUnavailableError, ReplyError)


class Deceived:
    """A tier and its server."""

    def __init__(self, stack: ExitStack, form: str, split_bytes: int) -> None:
        self.server = stack.enter_context(LyingServer())
        settings = RedisSettings(
            form.format(port=self.server.port), split_bytes=split_bytes, namespace_bytes=30_000,
            operation_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S,
        )  # fmt: skip
        self.tier = RedisTier(settings, lambda up: None)
        stack.callback(self.tier.close)
        self.be_honest()

    def be_honest(self) -> None:
        """Tell the truth from now on, and be believed again."""
        self.server.lies = 0.0

        def is_up() -> bool:
            self.tier._servers.discover()
            for node in self.tier._servers.nodes():
                node.check(self.tier._watch._test)
            return self.tier.stats().state == "up"

        eventually(is_up)

    def heals(self, header: ChunkHeader, epoch: int) -> bool:
        """Whether a chunk is read as it was written, stored again where it's lost; False where the
        server wasn't there in time."""
        try:
            try:
                read(self.tier, header, epoch)
            except ChunkCorruptError:
                write(self.tier, header, epoch)
                read(self.tier, header, epoch)
        except TierUnavailableError:
            self.be_honest()
            return False
        return True


@pytest.fixture(scope="module")
def deceived() -> Iterator[list[Deceived]]:
    """One of each kind, with chunks in one piece and in several."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as stack:
        yield [Deceived(stack, form, split) for form in FORMS for split in (4096, 1 << 20)]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH_BYTES_MAX


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Counter[str]]:
    """What became of the operations: neither all lies nor all truth."""
    counts: Counter[str] = Counter()
    yield counts
    wanted = {"read", "write", "probe", "clear", "enter", "round", "sweep"}
    assert sum(counts.values()) < 1000 or counts.keys() >= wanted | {
        "CapacityError", "ChunkCorruptError", "TierUnavailableError"
    }, counts  # fmt: skip


def write(tier: RedisTier, header: ChunkHeader, epoch: int) -> None:
    """Write a chunk."""
    payload = pattern(header.sequence, PAYLOAD_BYTES)
    tier.write(Place(TierName.REDIS, epoch, 0, 0), header, payload)


def read(tier: RedisTier, header: ChunkHeader, epoch: int) -> None:
    """Read a chunk: its own bytes or an error."""
    out = np.zeros(PAYLOAD_BYTES, np.uint8)
    tier.read(Place(TierName.REDIS, epoch, 0, 0), header, out)
    np.testing.assert_array_equal(out, pattern(header.sequence, PAYLOAD_BYTES))


def act(rng: random.Random, tier: RedisTier, epoch: int) -> str:
    """One thing that a daemon does with the tier."""
    kind = rng.choice(("read", "read", "write", "probe", "clear", "enter", "round", "sweep"))
    header = rng.choice(HEADERS)
    if kind == "read":
        read(tier, header, epoch)
    elif kind == "write":
        write(tier, header, epoch)
    elif kind == "probe":
        keys = b"".join(one.key for one in HEADERS)
        parts = (Part.FULL, Part.WINDOW)
        probed = tier.probe(Probe(1, *SPACE, keys, (0, 1), parts))
        assert probed.epoch >= 0
        assert is_line(probed.error)
        assert probed.error or [len(found) for found in probed.found] == [len(HEADERS)] * 2
    elif kind == "clear":
        cleared = tier.clear(RemoteClear(1, rng.choice((None, "tenant")), rng.choice((None, "m"))))
        assert is_line(cleared.error)
    elif kind == "enter":
        tier.enter(RemoteEnter(*SPACE, "m", "alias"))
    elif kind == "round":
        tier._watch._discovered_s = 0.0
        tier._watch._round()
    else:
        tier._watch._sweep(SPACE)
    return kind


@fuzz(EXAMPLES // 100)
def test_a_server_that_lies_is_a_miss_at_worst(
    deceived: list[Deceived], outcomes: Counter[str], seed: int
) -> None:
    """Standalone, Cluster and Sentinel: some operations on what was stored honestly, with lies in
    any reply; afterwards what is read honestly is right or absent, and can be stored again."""
    rng = random.Random(seed)
    one = rng.choice(deceived)
    tier, server, epoch = one.tier, one.server, rng.choice((0, 7, (1 << 63) - 1))
    server.rng = random.Random(rng.random())
    for header in rng.sample(HEADERS, 2):
        eventually(lambda header=header: one.heals(header, epoch))  # type: ignore[misc]
    server.lies = rng.choice((0.1, 0.5, 1.0))
    for _ in range(rng.choice((1, 2, 5))):
        try:
            outcomes[act(rng, tier, epoch)] += 1
        except EXPECTED as error:
            outcomes[type(error).__name__] += 1
    one.be_honest()
    for header in rng.sample(HEADERS, 3):
        eventually(lambda header=header: one.heals(header, epoch))  # type: ignore[misc]
    if len(server.values) > 200:
        server.values.clear()
        server.registry.clear()
