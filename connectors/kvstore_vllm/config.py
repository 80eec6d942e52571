"""Settings: what a user may say in ``kv_connector_extra_config``, parsed and checked once.

The only place of the connector that reads the process's environment: for the daemon's socket, so
that ``kvstore serve`` and ``vllm serve`` meet without any setting, and for the cache folder.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kvstore.core.errors import ConfigError

POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's settings.

    ``socket``: the daemon's engine socket. ``credential`` names the tenant. ``read`` and ``write``
    switch lookups and stores off. ``min_hit_tokens``: an external hit that saves fewer tokens is a
    miss. ``store_decoded``: keep the KV of generated tokens too. ``tokens_per_chunk``: 0 takes the
    smallest multiple of the block size from 128 on. ``revision`` names the weights instead of a
    digest of them. ``lookup_timeout_s`` bounds the scheduler's wait for the daemon;
    ``load_timeout_s`` and ``store_timeout_s`` are when a transfer is asked to stop.
    ``held_blocks_max`` is the share of the engine's blocks that stores in flight may hold.
    ``load_failure_policy`` is put in the place of vLLM's ``kv_load_failure_policy``.
    """

    socket: str
    credential: str = ""
    read: bool = True
    write: bool = True
    min_hit_tokens: int = 0
    store_decoded: bool = True
    tokens_per_chunk: int = 0
    revision: str = ""
    lookup_timeout_s: float = 0.25
    load_timeout_s: float = 30.0
    store_timeout_s: float = 30.0
    held_blocks_max: float = 0.5
    load_failure_policy: str = "recompute"


def settings_from(given: Mapping[str, object]) -> Settings:
    """Parse ``kv_connector_extra_config``; raises ConfigError, in one line, for a key that doesn't
    exist or a value of the wrong type or range."""
    known = {field.name: field.type for field in fields(Settings)}
    values: dict[str, object] = {"socket": default_socket()}
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; valid are {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{hint}")
        values[key] = _typed(key, str(known[key]), value)
    settings = Settings(**values)  # type: ignore[arg-type]
    _check(settings)
    return settings


def default_socket() -> str:
    """Where ``kvstore serve`` listens without settings: $KVSTORE_SOCKET, else below
    $XDG_RUNTIME_DIR, else /tmp/kvstore-UID."""
    named = os.environ.get("KVSTORE_SOCKET", "")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and Path(runtime).is_dir():
        return str(Path(runtime) / "kvstore" / "kvstore.sock")
    return f"/tmp/kvstore-{os.getuid()}/kvstore.sock"


def environment_folder(name: str = "vllm") -> Path:
    """Where an environment is built: $XDG_CACHE_HOME/kvstore/NAME-env, below ~/.cache where that
    variable isn't set to a full path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = base if base.is_absolute() else Path.home() / ".cache"
    return root / "kvstore" / f"{name}-env"


def _typed(key: str, kind: str, value: object) -> object:
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != kind:
        raise ConfigError(f"kv_connector_extra_config: {key}={value!r}; valid is a {kind}")
    return value


def _check(settings: Settings) -> None:
    """Ranges; all in one place, so that each message reads alike."""
    problems = [
        ("min_hit_tokens", settings.min_hit_tokens >= 0, "0 or more"),
        ("tokens_per_chunk", settings.tokens_per_chunk >= 0, "0 (automatic) or more"),
        ("lookup_timeout_s", 0 < settings.lookup_timeout_s <= 60, "more than 0 and up to 60"),
        ("load_timeout_s", settings.load_timeout_s > 0, "more than 0"),
        ("store_timeout_s", settings.store_timeout_s > 0, "more than 0"),
        ("held_blocks_max", 0 < settings.held_blocks_max <= 1, "more than 0 and up to 1"),
        ("load_failure_policy", settings.load_failure_policy in POLICIES, " or ".join(POLICIES)),
        ("socket", bool(settings.socket), "a path"),
    ]
    for key, right, valid in problems:
        if not right:
            found = getattr(settings, key)
            raise ConfigError(f"kv_connector_extra_config: {key}={found!r}; valid is {valid}")
