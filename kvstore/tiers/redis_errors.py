"""What a server refuses, as our errors. No text here holds credentials: what redis-py says about a
refused handshake may quote the command, so only its kind is told."""

from __future__ import annotations

from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.tiers.redis_driver import redis
from kvstore.tiers.redis_lane import ReplyError

AUTH_FAILED = "auth failed"
NO_SERVER = "answers, but isn't a Redis or Valkey server"
NO_TLS = "answers, but not with TLS"
NO_NODE = "is no node of a Cluster"
NO_SENTINEL = "is no Sentinel"
NO_DATABASE = "has no database of this number"
REPLICA = "is a replica, which takes no writes"
_AUTH_CODES = ("NOAUTH", "WRONGPASS")
_HEALTHY_CODES = ("OOM", "MOVED", "ASK", "TRYAGAIN", "WRONGTYPE", "NOPERM")
"""Errors of a server that does its work; any other reply of an error is a failure to the
breaker."""
_TEXT_MAX = 120


class AuthFailedError(TierUnavailableError):
    """The server refuses our credentials, or wants some."""


def of_reply(error: ReplyError, server: str) -> KVStoreError:
    """What an error reply to a command of the lane means; those commands hold no secrets."""
    if error.code == "OOM":
        return CapacityError(f"redis: {server} is full (maxmemory)")
    if error.code in _AUTH_CODES:
        return AuthFailedError(f"redis: {server}: {AUTH_FAILED}")
    text = str(error)[:_TEXT_MAX]
    if "cluster support disabled" in text:
        return TierUnavailableError(f"redis: {server} {NO_NODE}")
    if "unknown command 'SENTINEL'" in text:
        return TierUnavailableError(f"redis: {server} {NO_SENTINEL}")
    if error.code == "WRONGTYPE":
        return ChunkCorruptError(f"redis: {server}: {text}")
    return TierUnavailableError(f"redis: {server}: {text}")


def is_sick(error: ReplyError) -> bool:
    """Whether an error reply counts as a failure of the server."""
    return error.code not in _HEALTHY_CODES


def of_connect(
    error: redis.RedisError | OSError | ValueError | TypeError | OverflowError, server: str
) -> TierUnavailableError:
    """What an error of connecting means."""
    if isinstance(error, redis.AuthenticationError):
        return AuthFailedError(f"redis: {server}: {AUTH_FAILED}")
    if isinstance(error, redis.InvalidResponse):
        return TierUnavailableError(f"redis: {server} {NO_SERVER}")
    if isinstance(error, redis.ResponseError) and "DB index" in str(error):
        return TierUnavailableError(f"redis: {server} {NO_DATABASE}")
    if isinstance(error, redis.ResponseError):
        code = str(error).partition(" ")[0]
        said = code if code.isupper() and code.isalpha() else type(error).__name__
        return TierUnavailableError(f"redis: {server} refuses the handshake ({said})")
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return TierUnavailableError(f"redis: {server} doesn't answer in time")
    if "WRONG_VERSION_NUMBER" in _cause(error):
        return TierUnavailableError(f"redis: {server} {NO_TLS}")
    return TierUnavailableError(f"redis: {server} can't be reached: {_cause(error)}")


def of_lane(error: OSError, server: str) -> TierUnavailableError:
    """What a lane that broke means."""
    if isinstance(error, TimeoutError):
        return TierUnavailableError(f"redis: {server} doesn't answer in time")
    return TierUnavailableError(f"redis: {server}: {error.strerror or error}")


def _cause(error: BaseException) -> str:
    """The system's own word for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror[:_TEXT_MAX]
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
