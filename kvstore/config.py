"""Config: one typed tree from defaults < TOML file < environment < flags, and where each value is
from.

Every setting stands once in SCHEMA and is reachable in three ways through one parser:
``host.size`` is ``size`` under ``[host]`` in the file, ``KVSTORE_HOST_SIZE`` in the environment
and ``--host-size`` as a flag. This is the only module that reads the environment. A setting that
isn't known is an error, never ignored: a configuration that is silently not used is worse than
none.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import config_kinds as kinds
from kvstore.core.errors import ConfigError
from kvstore.core.limits import SOCKET_PATH_BYTES_MAX

PREFIX = "KVSTORE_"
CONFIG_VARIABLE = "KVSTORE_CONFIG"

_SERVICE_LINK = re.compile(
    r"KVSTORE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets for a Service whose name starts with kvstore: they aren't ours."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the schema."""

    key: str
    kind: kinds.Kind
    default: str
    help: str
    secret: bool = False

    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.key.replace(".", "_").upper()

    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.key.replace(".", "-").replace("_", "-")

    def shown(self, text: str) -> str:
        """A text that it was given as, without what is secret."""
        if self.secret:
            return kinds.MASK if text else ""
        return self.kind.mask(text)


SCHEMA: tuple[Setting, ...] = (
    Setting("socket", kinds.PATH, "auto", "Unix socket that engines connect to"),
    Setting("admin.address", kinds.ADDRESS, "auto", "where the admin service listens"),
    Setting("host.size", kinds.SHARE, "auto", "host memory for chunks, staging included"),
    Setting("host.slab_size", kinds.SLAB, "auto", "host memory is cut into slabs of this size"),
    Setting("host.huge_pages", kinds.choice("on", "off"), "on", "ask for transparent huge pages"),
    Setting("nvme.size", kinds.AMOUNT, "auto", "disk space for chunks; off or 0: no NVMe tier"),
    Setting("nvme.path", kinds.PATH, "auto", "folder of the NVMe tier"),
    Setting("nvme.slab_size", kinds.SLAB, "auto", "size of one slab file"),
    Setting("nvme.direct_io", kinds.choice("auto", "on", "off"), "auto", "O_DIRECT on slab files"),
    Setting("nvme.prewrite", kinds.AMOUNT, "auto", "slab files written ahead of their use"),
    Setting("nvme.write_budget", kinds.RATE, "0", "bytes a second that may enter NVMe"),
    Setting(
        "nvme.admit_after", kinds.integer(1, 255), "1", "a chunk enters NVMe at its n-th store"
    ),
    Setting("redis.url", kinds.REDIS_URL, "off", "servers of the tier that several nodes share"),
    Setting("redis.prefix", kinds.KEY_PREFIX, "kvstore", "how the names of its keys begin"),
    Setting("redis.ttl", kinds.duration_or_off(10 * 365 * 86400), "7d", "values expire after this"),
    Setting("redis.codec", kinds.NAME, "none", "how values are packed: none, zstd, lz4, another"),
    Setting("redis.connect_timeout", kinds.duration(0.01, 60), "1s", "to connect, at most"),
    Setting("redis.timeout", kinds.duration(0.01, 60), "2s", "for one operation, at most"),
    # An engine waits 250 ms for a lookup's answer: Redis must have told its own by then.
    Setting("redis.probe_timeout", kinds.duration(0.001, 0.2), "20ms", "for a lookup, at most"),
    Setting("redis.connections", kinds.integer(1, 64), "10", "connections to one server, at most"),
    Setting(
        "redis.split_size",
        kinds.bounded_size(64 << 10, 512 << 20),
        "64MiB",
        "values above it are stored in parts",
    ),
    Setting(
        "redis.namespace_size",
        kinds.LIMIT,
        "0",
        "bytes of a namespace, where the server has no maxmemory; 0: no limit",
    ),
    Setting("redis.backlog", kinds.integer(1, 1 << 20), "4096", "chunks that wait for their write"),
    Setting("redis.username", kinds.TEXT, "", "ACL user, where redis.url names none"),
    Setting("redis.password", kinds.TEXT, "", "its password, where redis.url has none", True),
    Setting("redis.ca", kinds.FILE, "", "certificates to check a rediss:// server by"),
    Setting("redis.cert", kinds.FILE, "", "certificate to show to a rediss:// server"),
    Setting("redis.key", kinds.FILE, "", "the private key of redis.cert"),
    Setting("eviction", kinds.NAME, "lru", "what leaves a full tier first: lru, fifo, or a plugin"),
    Setting(
        "tenants.quota", kinds.QUOTAS, "off", "share of each local tier that a tenant may hold"
    ),
    Setting("lease_s", kinds.duration(0.1, 86400), "60s", "a lookup protects its hit this long"),
    Setting(
        "session.partial",
        kinds.choice("serve", "miss"),
        "serve",
        "what engines get that don't register all of their KV, such as a draft model's",
    ),
    Setting("session.bytes_max", kinds.BYTES, "4GiB", "bytes of stores in flight per session"),
    Setting("threads.copy", kinds.integer(0, 64), "0", "copy threads; 0: from the cores"),
    Setting("threads.read", kinds.integer(0, 64), "0", "NVMe read threads; 0: six"),
    Setting("threads.write", kinds.integer(0, 64), "0", "NVMe write threads; 0: six"),
    Setting(
        "log.level", kinds.choice("debug", "info", "warning", "error"), "info", "log to stderr"
    ),
)


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed value, the text it was given as without what is secret, and where that came
    from."""

    value: object = field(repr=False)
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting by key, parsed but not yet fitted to the machine."""

    values: Mapping[str, Value]
    environ: Mapping[str, str] = field(repr=False)

    def path(self, key: str) -> Path | None:
        """A path setting; None is auto."""
        value = self.values[key].value
        return value if isinstance(value, Path) else None

    def text(self, key: str) -> str:
        """A setting of words, as text."""
        return str(self.values[key].value)

    def amount(self, key: str) -> kinds.Amount:
        """A size setting."""
        value = self.values[key].value
        assert isinstance(value, kinds.Amount), key
        return value

    def shares(self, key: str) -> tuple[tuple[str, float], ...]:
        """Shares by name."""
        value = self.values[key].value
        assert isinstance(value, tuple), key
        return value

    def integer(self, key: str) -> int:
        """A whole number, or bytes."""
        value = self.values[key].value
        assert isinstance(value, int), key
        return value

    def seconds(self, key: str) -> float:
        """A duration."""
        value = self.values[key].value
        assert isinstance(value, float), key
        return value

    def given(self, key: str) -> str:
        """How a person gave it: ``host.size=1GiB (environment KVSTORE_HOST_SIZE)``."""
        value = self.values[key]
        return f"{key}={value.text} ({value.source})"

    def socket(self) -> Path:
        """The engine socket's path, checked for length."""
        path = self.path("socket") or _runtime_folder(self.environ) / "kvstore.sock"
        _check_socket_path("socket", path, self.values["socket"].source)
        return path

    def admin_address(self) -> str:
        """The admin service's address: ``unix:/path``, or a loopback ``host:port``."""
        given = self.values["admin.address"].value
        if given is None:
            path = self.socket()
            given = f"unix:{path.with_name(path.stem + '-admin.sock')}"
        return _check_admin_address(str(given), self.values["admin.address"].source)

    def nvme_path(self) -> Path:
        """The NVMe tier's folder."""
        cache = _xdg_folder(self.environ, "XDG_CACHE_HOME", ".cache")
        return self.path("nvme.path") or cache / "kvstore" / "nvme"

    def notify_socket(self) -> str:
        """Where a service supervisor waits to be told that the daemon is ready; empty: nowhere."""
        return self.environ.get("NOTIFY_SOCKET", "")

    def socket_is_default(self) -> bool:
        """Whether nobody chose the socket's place."""
        return self.path("socket") is None


def load(flags: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from all sources; ``flags`` maps keys (and ``config``) to text. Raises
    ConfigError."""
    environ = os.environ if environ is None else environ
    given: dict[str, tuple[str, str]] = {s.key: (s.default, "default") for s in SCHEMA}
    file = _config_file(flags, environ)
    if file is not None:
        given |= _from_file(file)
    given |= _from_environment(environ)
    for setting in SCHEMA:
        if setting.key in flags:
            given[setting.key] = (flags[setting.key], f"flag {setting.flag()}")
    values = {s.key: parse(s, *given[s.key]) for s in SCHEMA}
    return Settings(values, dict(environ))


def suggestion(word: str, valid: Iterable[str]) -> str:
    """``did you mean X?``, or the list of what is valid where nothing is near."""
    valid = list(valid)
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"valid are {', '.join(valid)}"


def parse(setting: Setting, text: str, source: str) -> Value:
    """One value from its text. Raises ConfigError, without what is secret in the text."""
    try:
        value = setting.kind.parse(text)
    except ValueError as error:
        shown = repr(setting.shown(text))
        raise ConfigError(
            f"{setting.key}={shown} ({source}) is refused; valid: {setting.kind.valid}"
        ) from error
    return Value(value, setting.shown(text), source)


def _config_file(flags: Mapping[str, str], environ: Mapping[str, str]) -> Path | None:
    """The file that was named (it must exist), else the user's own, if there is one."""
    candidates = (
        (flags.get("config"), "flag --config"),
        (environ.get(CONFIG_VARIABLE), f"environment {CONFIG_VARIABLE}"),
    )
    for named, source in candidates:
        if named:
            with suppress(ValueError):
                path = kinds.expanded(named)
                if path.is_file():
                    return path
            raise ConfigError(f"config={named!r} ({source}) is no file; name one that exists")
    path = _xdg_folder(environ, "XDG_CONFIG_HOME", ".config") / "kvstore" / "kvstore.toml"
    return path if path.is_file() else None


def _from_file(file: Path) -> dict[str, tuple[str, str]]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = str(error).replace("\n", " ")
        raise ConfigError(f"config file {file} can't be read: {reason}; it must be TOML") from error
    given: dict[str, tuple[str, str]] = {}
    known = {setting.key: setting for setting in SCHEMA}
    for key, value in _flatten(document, ""):
        if key not in known:
            raise ConfigError(f"unknown setting {key!r} in {file}; {suggestion(key, known)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(
                f"{key}={known[key].shown(str(value))} in {file} is refused; "
                "valid is one string, number or boolean"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        given[key] = (text, f"file {file}")
    return given


def _flatten(table: Mapping[str, object], prefix: str) -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    by_variable = {setting.variable(): setting for setting in SCHEMA}
    given: dict[str, tuple[str, str]] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or _SERVICE_LINK.fullmatch(name):
            continue
        if name not in by_variable:
            raise ConfigError(
                f"unknown setting {name} in the environment; "
                + suggestion(name, [*by_variable, CONFIG_VARIABLE])
            )
        given[by_variable[name].key] = (text, f"environment {name}")
    return given


def _xdg_folder(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    """A folder of the XDG base directory specification; a relative one is ignored, as it says."""
    given = environ.get(variable, "")
    if given.startswith("/"):
        return Path(given)
    return Path(environ.get("HOME") or os.path.expanduser("~")) / fallback


def _runtime_folder(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and Path(runtime).is_dir():
        return Path(runtime) / "kvstore"
    return Path(f"/tmp/kvstore-{os.getuid()}")


def _check_socket_path(key: str, path: Path, source: str) -> None:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{key}={path} ({source}) has {length} bytes; a Unix socket's path has at most "
            f"{SOCKET_PATH_BYTES_MAX}: choose a shorter one"
        )


def _check_admin_address(address: str, source: str) -> str:
    """A Unix path or a loopback port; anything else would need TLS and a token."""
    refused = ConfigError(
        f"admin.address={address!r} ({source}) is refused; valid: {kinds.ADDRESS.valid}"
    )
    if address.startswith("unix:"):
        try:
            path = kinds.expanded(address)
        except ValueError as error:
            raise refused from error
        _check_socket_path("admin.address", path, source)
        return f"unix:{path}"
    host, _, port = address.rpartition(":")
    decimal = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not decimal or not 1 <= int(port) <= 65535:
        raise refused
    if host not in ("localhost", "127.0.0.1", "[::1]"):
        raise ConfigError(
            f"admin.address={address!r} ({source}) is refused: an address that other machines "
            "reach needs TLS and a token, which this version doesn't have; "
            "valid: unix:/path or a port of 127.0.0.1, [::1] or localhost"
        )
    return address
