"""Connecting by redis-py: TCP, TLS or a Unix socket, credentials, database."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore.tiers.redis_driver import (
    ONCE,
    NoBackoff,
    Parser,
    Retry,
    TcpConnection,
    TlsConnection,
    UnixDomainSocketConnection,
    redis,
)
from kvstore.tiers.redis_errors import of_connect
from kvstore.tiers.redis_lane import AnyConnection, Lane
from kvstore.tiers.redis_settings import RedisSettings, host_text

_RESP = 2
"""Of RESP 3 nothing is used here, and pushes would come between replies."""


@dataclass(frozen=True, slots=True)
class Login:
    """What a server is told first; a Sentinel has no database."""

    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0


def login_of(settings: RedisSettings) -> Login:
    """What the address and settings say."""
    address = settings.address
    return Login(address.username, address.password, address.database)


def connect(settings: RedisSettings, to: tuple[str, int], login: Login, address: str) -> Lane:
    """A lane to the server of a host and port, which is at the IP ``address``; a Unix socket's path
    where the port is 0. Raises TierUnavailableError (AuthFailedError is one)."""
    host, port = to
    server = host_text(host, port) if port else host
    try:
        connection = _connection(settings, to, login, address)
        connection.connect()  # type: ignore[no-untyped-call]
        return Lane(connection, settings.operation_timeout_s)
    except (redis.RedisError, OSError, ValueError, TypeError, OverflowError) as error:
        # redis-py lets Python's own errors through where a server answers nonsense.
        told, cause = of_connect(error, server), _bare(error)
        _forget_frames(error)
        try:
            raise told from cause
        finally:
            del told, cause  # or this frame would be in a cycle, too


def _connection(
    settings: RedisSettings, to: tuple[str, int], login: Login, address: str
) -> AnyConnection:
    host, port = to
    common: dict[str, Any] = {
        "db": login.database,
        "username": login.username or None,
        "password": login.password or None,
        "socket_timeout": settings.connect_timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
        "protocol": _RESP,
        "retry": Retry(NoBackoff(), 0),
        "parser_class": Parser,
        **ONCE,
    }
    if not port:
        make_unix: Callable[..., UnixDomainSocketConnection] = UnixDomainSocketConnection
        return make_unix(path=host, **common)
    if not settings.address.tls:
        make: Callable[..., TcpConnection] = TcpConnection
        plain = make(host=host, port=port, socket_keepalive=True, **common)
        plain.address = address
        return plain
    secured = TlsConnection(
        host=host,
        port=port,
        ssl_ca_certs=settings.ca or None,
        ssl_certfile=settings.cert or None,
        ssl_keyfile=settings.key or None,
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        socket_keepalive=True,
        **common,
    )
    secured.address = address
    return secured


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the frames of an error and of those behind it. redis-py's hold their own errors in
    turn, and the daemon collects no cycles: a server that is down for days is tried every few
    seconds."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _bare(error: BaseException) -> BaseException | None:
    """The cause to keep in a traceback: what a server answers to AUTH may quote it, so only the
    system's errors are kept."""
    plain = isinstance(error, OSError | redis.ConnectionError | redis.TimeoutError)
    return error if plain and not isinstance(error, redis.AuthenticationError) else None
