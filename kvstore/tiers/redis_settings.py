"""RedisSettings: how the Redis tier reaches its servers and what it may use there.

Forms of an address (``+`` in front names the kind, ``rediss`` is TLS):

=================================================  ==============================================
``redis://user:p%40ss@host:6379/2``                one server
``rediss://host``                                  one server, TLS
``unix:///run/redis.sock?db=2``                    one server on this machine
``redis+sentinel://a:26379,b:26379/service/2``     the master that Sentinels name
``redis+cluster://a:6379,b:6379``                  a Cluster, found from any of its nodes
=================================================  ==============================================

Names and passwords are percent-encoded, IPv6 addresses stand in brackets. Nothing here imports
redis-py: settings are read long before the tier opens. No text of this module holds a password:
an address that can't be read is never quoted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from urllib.parse import parse_qs, unquote

from kvstore.core.errors import ConfigError

REDIS_PORT, SENTINEL_PORT = 6379, 26379
SPLIT_BYTES_MAX = 512 << 20
"""No server takes a larger value (proto-max-bulk-len)."""
FORMS = (
    "redis://, rediss://, unix://, redis+sentinel:// and redis+cluster:// (rediss+... for TLS), "
    "names and passwords percent-encoded"
)

_AUTHORITY = re.compile(r"^(?:(?P<user>[^@]*)@)?(?P<hosts>[^@]*)$")
_HOST = re.compile(
    r"^(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,5}))?$"
)
_PREFIX = re.compile(r"^[A-Za-z0-9_./-]{1,64}$")


class RedisMode(Enum):
    """How the servers are found."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """An address, taken apart. ``hosts`` is empty where ``path`` names a Unix socket."""

    mode: RedisMode
    hosts: tuple[tuple[str, int], ...]
    path: str = ""
    tls: bool = False
    database: int = 0
    service: str = ""
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The address for a person, without credentials."""
        return self.path or ",".join(host_text(host, port) for host, port in self.hosts)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """What the tier is told. Sizes in bytes, times in seconds; 0 means: none, for ``ttl_s`` and
    ``namespace_bytes``. ``username`` and ``password`` replace those of the address,
    which in front of Sentinels are then theirs alone.

    ``connections`` is the most that are open to one server; ``split_bytes`` the most that one
    value holds; ``namespace_bytes`` the most that one namespace of a tenant may occupy.
    Raises ConfigError."""

    url: str = field(repr=False)
    prefix: str = "kvstore"
    ttl_s: float = 0.0
    codec: str = "identity"
    connect_timeout_s: float = 1.0
    operation_timeout_s: float = 2.0
    round_s: float = 2.0
    """How often each server is asked what it is, and one that is down is tried again."""
    connections: int = 10
    split_bytes: int = 64 << 20
    namespace_bytes: int = 0
    ca: str = ""
    cert: str = ""
    key: str = ""
    username: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        parse(self.url)
        if not _PREFIX.match(self.prefix):
            raise ConfigError("redis: prefix must be 1 to 64 letters, digits or _ . / -")
        if not 0 <= self.ttl_s < 1 << 32:
            raise ConfigError(f"redis: ttl_s={self.ttl_s}; valid are 0 (none) or more seconds")
        if not (self.connect_timeout_s > 0 and self.operation_timeout_s > 0):
            raise ConfigError("redis: timeouts must be longer than 0 s")
        if not 1 <= self.connections <= 1024:
            raise ConfigError(f"redis: connections={self.connections}; valid are 1 to 1024")
        if not 4096 <= self.split_bytes <= SPLIT_BYTES_MAX:
            raise ConfigError(
                f"redis: split_bytes={self.split_bytes}; valid are 4096 to {SPLIT_BYTES_MAX}"
            )
        if self.namespace_bytes < 0:
            raise ConfigError("redis: namespace_bytes must be 0 (no limit) or more")
        if self.key and not self.cert:
            raise ConfigError("redis: a key needs its certificate")

    @property
    def address(self) -> RedisAddress:
        """The address with the credentials that count."""
        found = parse(self.url)
        return replace(
            found,
            username=self.username or found.username,
            password=self.password or found.password,
        )


def host_text(host: str, port: int) -> str:
    """``host:port``, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(url: str) -> RedisAddress:
    """Take an address apart. Raises ConfigError, whose text holds nothing of it."""
    scheme, mark, rest = url.strip().partition("://")
    kind, _, extra = scheme.lower().partition("+")
    if not mark or kind not in ("redis", "rediss", "unix") or (kind == "unix" and extra):
        raise ConfigError(f"redis: no valid address; valid are {FORMS}")
    if kind == "unix":
        return _unix(rest)
    modes = {"": RedisMode.STANDALONE, "sentinel": RedisMode.SENTINEL, "cluster": RedisMode.CLUSTER}
    if extra not in modes:
        raise ConfigError(f"redis: an unknown kind of address; valid are {FORMS}")
    mode = modes[extra]
    authority, _, path = rest.partition("/")
    path, _, query = path.partition("?")
    authority, _, bare = authority.partition("?")
    username, password, hosts = _authority(
        authority, SENTINEL_PORT if mode is RedisMode.SENTINEL else REDIS_PORT
    )
    if mode is RedisMode.STANDALONE and len(hosts) > 1:
        # A list can only be a Cluster's, whose nodes are found from any of them.
        mode = RedisMode.CLUSTER
    service, database = _path(mode, path, query or bare)
    return RedisAddress(mode, hosts, "", kind == "rediss", database, service, username, password)


def _unix(rest: str) -> RedisAddress:
    path, _, query = rest.partition("?")
    username = password = ""
    if "@" in path and not path.startswith("/"):
        credentials, _, path = path.partition("@")
        username, password = _credentials(credentials)
    path = unquote(path)
    if not path.startswith("/") or len(path) < 2:
        raise ConfigError("redis: a unix:// address needs an absolute path, as unix:///run/r.sock")
    if len(path.encode()) > 107:
        raise ConfigError("redis: the path of a Unix socket has at most 107 bytes")
    return RedisAddress(
        RedisMode.STANDALONE, (), path, False, _database("", query), "", username, password
    )


def _authority(text: str, port: int) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    match = _AUTHORITY.match(text)
    if match is None:
        raise ConfigError("redis: an @ in a user name or password must be written as %40")
    username, password = _credentials(match["user"] or "")
    hosts = tuple(_host(part.strip(), port) for part in match["hosts"].split(","))
    return username, password, hosts


def _credentials(text: str) -> tuple[str, str]:
    username, mark, password = text.partition(":")
    # `redis://secret@host` means a password in some clients and a user in others.
    if text and not mark:
        raise ConfigError("redis: credentials are user:password, or :password alone")
    return unquote(username), unquote(password)


def _host(text: str, default: int) -> tuple[str, int]:
    match = _HOST.match(text)
    port = int(match["port"] or default) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(
            "redis: a server is host, host:port or [IPv6]:port; special characters of a user "
            "name or password must be percent-encoded"
        )
    return match["v6"] or match["host"], port


def _path(mode: RedisMode, path: str, query: str) -> tuple[str, int]:
    """Service and database."""
    if mode is not RedisMode.SENTINEL:
        database = _database(path, query)
        if database and mode is RedisMode.CLUSTER:
            raise ConfigError("redis: a Cluster has database 0 only")
        return "", database
    service, _, rest = path.partition("/")
    if not service:
        raise ConfigError("redis: a Sentinel address names its service: .../service/database")
    return unquote(service), _database(rest, query)


def _database(path: str, query: str) -> int:
    given = parse_qs(query, keep_blank_values=True)
    if set(given) - {"db"}:
        raise ConfigError("redis: an address takes no parameter but db")
    text = given["db"][-1] if "db" in given else path.strip("/")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ConfigError("redis: the database of an address is a number")
    return int(text)
