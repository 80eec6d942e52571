"""What is used of redis-py and hiredis, in one place: the extra ``kvstore[redis]`` brings them.

The daemon collects no cycles, and a server that is down is tried every few seconds for as long as
it takes, so a connection must leave none: redis-py's own parser holds itself and a buffer of 64
KiB, and its version is looked up anew in the installed packages for each connection, in cycles.
"""

from __future__ import annotations

import socket
from typing import Any

from kvstore.core.errors import ConfigError

try:
    import hiredis
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import (
        Connection,
        DefaultParser,
        SSLConnection,
        UnixDomainSocketConnection,
    )
    from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
    from redis.retry import Retry
except ImportError as error:
    raise ConfigError(
        'redis: redis-py and hiredis aren\'t installed; pip install "kvstore[redis]"'
    ) from error

try:
    from redis.driver_info import DriverInfo
except ImportError:  # before 7.1: the version is looked up once
    ONCE: dict[str, Any] = {}
else:
    ONCE = {"driver_info": DriverInfo()}
"""What each connection is told of redis-py itself."""


def _ignore(push: object) -> None:
    """Nobody subscribes to anything here."""


class Parser(DefaultParser):  # type: ignore[valid-type, misc]
    """redis-py's parser, without the cycle."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self.pubsub_push_handler_func = _ignore


class TcpConnection(Connection):
    """One to ``address``, which no name is; ``host`` is what a certificate must bear."""

    address = ""

    def _connect(self) -> socket.socket:
        name, self.host = self.host, self.address
        try:
            found: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        finally:
            self.host = name
        return found


class TlsConnection(SSLConnection, TcpConnection):
    """The same; redis-py puts TLS on what the next class in line connected."""


__all__ = [
    "ONCE",
    "REDIS_CLUSTER_HASH_SLOTS",
    "NoBackoff",
    "Parser",
    "Retry",
    "TcpConnection",
    "TlsConnection",
    "UnixDomainSocketConnection",
    "hiredis",
    "key_slot",
    "redis",
]
