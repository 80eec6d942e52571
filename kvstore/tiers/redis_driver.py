"""What is used of redis-py and hiredis, in one place: the extra ``kvstore[redis]`` brings them."""

from __future__ import annotations

from kvstore.core.errors import ConfigError

try:
    import hiredis
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
    from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError(
        'redis: redis-py and hiredis aren\'t installed; pip install "kvstore[redis]"'
    ) from error

__all__ = [
    "REDIS_CLUSTER_HASH_SLOTS",
    "Connection",
    "NoBackoff",
    "Retry",
    "SSLConnection",
    "UnixDomainSocketConnection",
    "hiredis",
    "key_slot",
    "redis",
]
