"""DaemonRedis: the Redis tier in the daemon, opened beside its start and closed within its stop.

The tier connects in a thread of its own, so a server that isn't there delays nothing; until it
reports that it is up, the core asks nothing of it. redis-py is imported here and only here, once
engines can connect: a daemon without Redis never loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.admin_snapshot import RedisFigures
from kvstore.core.remote_messages import RemoteState
from kvstore.mover import Mover
from kvstore.sizing_redis import RedisConfig, redis_settings
from kvstore.tiers.base import TierIOStats

if TYPE_CHECKING:
    from kvstore.tiers.redis import RedisTier


class DaemonRedis:
    """The Redis tier of these settings, which may be: none. ``post`` takes an event for the core,
    from any thread."""

    def __init__(
        self, config: RedisConfig, mover: Mover, post: Callable[[RemoteState], None]
    ) -> None:
        self._config = config
        self._mover = mover
        self._post = post
        self._tier: RedisTier | None = None

    def open(self) -> None:
        """Begin to connect; returns at once. Raises KVStoreError where there can't be such a
        tier."""
        if not self._config.url:
            return
        from kvstore.tiers.redis import RedisTier

        tier = RedisTier(redis_settings(self._config), self._told)
        self._mover.open_remote(tier)
        self._tier = tier
        tier.open()

    def close(self) -> None:
        """End what runs there at once, well or not. Idempotent."""
        if self._tier is not None:
            self._tier.close()

    def figures(self) -> RedisFigures:
        """What the tier tells of itself."""
        if not self._config.url:
            return RedisFigures()
        if self._tier is None:
            return RedisFigures(state="connecting")
        stats = self._tier.stats()
        return RedisFigures(
            state=stats.state,
            server=stats.server,
            mode=stats.server_mode,
            nodes=stats.nodes,
            codec=self._config.codec,
            raw_bytes=stats.raw_bytes,
            stored_bytes=stats.stored_bytes,
            breaker_openings=stats.breaker_openings,
            connection_waits=stats.connection_waits,
            connection_wait_s=stats.connection_wait_s,
            splits=stats.splits,
            evicted=stats.evicted,
        )

    def io(self) -> TierIOStats | None:
        """What it has read and written; None where there is no such tier, or not yet."""
        return None if self._tier is None else self._tier.stats()

    def line(self) -> str:
        """What a person is told at the start."""
        if not self._config.url:
            return "off"
        address = redis_settings(self._config).address
        kind = address.mode.value + (", TLS" if address.tls else "")
        return f"{address.shown}, {kind}, names begin with {self._config.prefix}"

    def _told(self, up: bool) -> None:
        """In the tier's threads: it can be used, or can't."""
        self._post(RemoteState(up))
