"""RedisTiers for tests: open, up, and closed afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.core.errors import ChunkCorruptError
from kvstore.core.messages import ChunkHeader
from kvstore.testing import pattern
from kvstore.testing.remote_tiers import epoch_of, place
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_settings import RedisSettings
from tests.redis_rig import wait_until

OPERATION_S = 20.0
"""Tests that aren't about deadlines must not meet one on a slow machine."""
ROUND_S = 0.2
"""Nor should they wait long until a server that is back is tried."""


@dataclass
class Opened:
    """A tier and what it reported."""

    tier: RedisTier
    told: list[bool] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """What it reported last."""
        return bool(self.told) and self.told[-1]

    def wait(self, up: bool) -> None:
        """Until it has reported that."""
        wait_until(lambda: self.is_up is up, f"the tier reports up={up}")


@contextlib.contextmanager
def opened(url: str, **settings: Any) -> Iterator[Opened]:
    """A tier that was opened, whatever becomes of it."""
    told: list[bool] = []
    known = RedisSettings(
        url, **{"operation_timeout_s": OPERATION_S, "round_s": ROUND_S, **settings}
    )
    tier = RedisTier(known, told.append)
    tier.open()
    try:
        yield Opened(tier, told)
    finally:
        tier.close()


@contextlib.contextmanager
def up(url: str, **settings: Any) -> Iterator[RedisTier]:
    """A tier that all its servers are up for."""
    with opened(url, **settings) as found:
        found.wait(True)
        wait_until(lambda: (s := found.tier.stats()).nodes_up == s.nodes, "all servers are reached")
        yield found.tier


def name_of(header: ChunkHeader, epoch: int, prefix: str = "kvstore") -> bytes:
    """The name of a chunk's value."""
    start, end = RedisNames(prefix).around_key(
        (header.tenant, header.namespace), epoch, header.shard, header.part
    )
    return start + header.key.hex().encode() + end


def read(tier: RedisTier, header: ChunkHeader, epoch: int) -> np.ndarray | None:
    """A chunk's payload, or None for a miss."""
    out = np.zeros(header.payload_bytes, np.uint8)
    try:
        tier.read(place(epoch), header, out)
    except ChunkCorruptError:
        return None
    return out


def write(tier: RedisTier, header: ChunkHeader) -> int:
    """Write the chunk's own pattern; the epoch."""
    epoch = epoch_of(tier, header)
    tier.write(place(epoch), header, pattern(header.sequence, header.payload_bytes))
    return epoch


def write_blindly(tier: RedisTier, header: ChunkHeader) -> None:
    """Without asking for the epoch first."""
    tier.write(place(1), header, pattern(1, header.payload_bytes))
