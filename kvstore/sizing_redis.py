"""The Redis tier's settings, checked before anything starts: no secret is in what they say."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.codecs.registry import codec
from kvstore.config import Settings
from kvstore.core.errors import ConfigError
from kvstore.tiers.redis_settings import RedisSettings

_TLS_FILES = ("redis.ca", "redis.cert", "redis.key")
_PACKAGES = ("redis", "hiredis")
_CODEC_NAMES = {"none": "identity"}


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """``url`` empty: no Redis tier. Sizes in bytes, times in seconds, ``ttl`` 0: values don't
    expire, ``namespace_size`` 0: no limit. Its repr has no secret."""

    url: str = field(repr=False)
    prefix: str
    ttl: float
    codec: str
    connect_timeout: float
    timeout: float
    probe_timeout: float
    connections: int
    split_size: int
    namespace_size: int
    backlog: int
    username: str
    password: str = field(repr=False)
    ca: Path | None
    cert: Path | None
    key: Path | None


def fit_redis(settings: Settings) -> RedisConfig:
    """The Redis tier of these settings. Raises ConfigError where they make none."""
    redis = RedisConfig(
        url=settings.text("redis.url"),
        prefix=settings.text("redis.prefix"),
        ttl=settings.seconds("redis.ttl"),
        codec=settings.text("redis.codec"),
        connect_timeout=settings.seconds("redis.connect_timeout"),
        timeout=settings.seconds("redis.timeout"),
        probe_timeout=settings.seconds("redis.probe_timeout"),
        connections=settings.integer("redis.connections"),
        split_size=settings.integer("redis.split_size"),
        namespace_size=settings.integer("redis.namespace_size"),
        backlog=settings.integer("redis.backlog"),
        username=settings.text("redis.username"),
        password=settings.text("redis.password"),
        ca=settings.path("redis.ca"),
        cert=settings.path("redis.cert"),
        key=settings.path("redis.key"),
    )
    if redis.url:
        _check(settings, redis)
        _check_packages(settings, redis)
    return redis


def redis_settings(redis: RedisConfig) -> RedisSettings:
    """What the tier is told. Raises ConfigError, whose text holds nothing of the address."""
    return RedisSettings(
        url=redis.url,
        prefix=redis.prefix,
        ttl_s=redis.ttl,
        codec=_codec_name(redis),
        connect_timeout_s=redis.connect_timeout,
        operation_timeout_s=redis.timeout,
        connections=redis.connections,
        split_bytes=redis.split_size,
        namespace_bytes=redis.namespace_size,
        ca=_file(redis.ca),
        cert=_file(redis.cert),
        key=_file(redis.key),
        username=redis.username,
        password=redis.password,
    )


def _check(settings: Settings, redis: RedisConfig) -> None:
    given = settings.given("redis.url")
    try:
        address = redis_settings(redis).address
    except ConfigError as error:
        raise ConfigError(f"{given} is refused: {str(error).removeprefix('redis: ')}") from error
    for name in _TLS_FILES:
        file = settings.path(name)
        if file is None:
            continue
        if not address.tls:
            raise ConfigError(
                f"{settings.given(name)} is for TLS, which {given} hasn't: use rediss"
            )
        if file.exists() and not file.is_file():
            raise ConfigError(f"{settings.given(name)} isn't a file")  # to open a pipe would wait
        try:
            file.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{settings.given(name)} can't be read: {error.strerror}") from error


def _check_packages(settings: Settings, redis: RedisConfig) -> None:
    """What the tier imports is looked for here, as it is imported only when engines are served."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{settings.given('redis.url')} needs {' and '.join(missing)}, not installed here: "
            "pip install 'kvstore[redis]'"
        )
    try:
        codec(_codec_name(redis), "uint8")
    except ConfigError as error:
        raise ConfigError(f"{settings.given('redis.codec')}: {error}") from error


def _codec_name(redis: RedisConfig) -> str:
    return _CODEC_NAMES.get(redis.codec, redis.codec)


def _file(path: Path | None) -> str:
    return "" if path is None else str(path)
