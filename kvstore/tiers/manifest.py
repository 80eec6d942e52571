"""Manifest: the small file that says what an NVMe folder is and which namespaces it knows.

``manifest.json``::

    {"format": "kvstore/nvme/1", "slab_bytes": N, "clean": true|false,
     "spaces": [{"tenant": ..., "namespace": hex, "model": ..., "alias": ..., "epoch": n}, ...]}

It is replaced as a whole: written beside, fsynced, renamed, and the folder fsynced, so a crash
leaves the old one or the new one. ``clean`` is false while a daemon has the folder open; so it is
false after a crash.

A full disk must not keep a clear from being kept (or a daemon from starting), so the folder holds
a small file of no content, ``reserve``, whose room a save takes when there is no other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.codecs.base import TENANT_BYTES_MAX
from kvstore.core.errors import ConfigError
from kvstore.core.limits import ALIGN_BYTES
from kvstore.core.messages import SpaceRecord
from kvstore.tiers.regular_file import open_regular

FORMAT = "kvstore/nvme/1"
FILE_NAME = "manifest.json"
TEMPORARY_NAME = "manifest.json.tmp"
RESERVE_NAME = "reserve"
RESERVE_BYTES = 256 << 10
"""Room for the records of a thousand namespaces."""
SLAB_BYTES_MIN, SLAB_BYTES_MAX = 8192, 1 << 40
EPOCH_MAX = (1 << 63) - 1
NAMESPACE_BYTES = 32
NAME_CHARACTERS_MAX = 1024
"""Of a model or alias, as the engine link takes them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the file says."""

    slab_bytes: int
    clean: bool
    spaces: tuple[SpaceRecord, ...] = ()


def load(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where there is none. Raises ConfigError, saying what to do,
    for a file that this version can't read or that says what no daemon writes, and OSError where
    there is none to be read. (A temporary file that a crash left goes with the next save.)"""
    path = folder / FILE_NAME
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ConfigError(
            f"nvme: {path} has format {found!r:.80}, this version reads {FORMAT!r}; use the "
            "version that wrote it, or empty the folder or choose another"
        )
    try:
        return _manifest(data)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    except (KeyError, TypeError) as error:
        raise _damaged(path, repr(error)) from error


def save(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest, durably. Raises OSError; the old one stands then."""
    data = {
        "format": FORMAT,
        "slab_bytes": manifest.slab_bytes,
        "clean": manifest.clean,
        "spaces": [
            asdict(space) | {"namespace": space.namespace.hex()} for space in manifest.spaces
        ],
    }
    content = json.dumps(data, indent=1).encode("ascii")
    try:
        _replace(folder, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        (folder / RESERVE_NAME).unlink(missing_ok=True)
        _replace(folder, content)
    with contextlib.suppress(OSError):
        _reserve(folder)


def _replace(folder: Path, content: bytes) -> None:
    temporary = folder / TEMPORARY_NAME
    fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / FILE_NAME)
    sync_folder(folder)


def _reserve(folder: Path) -> None:
    """Hold room for the next save; on a full disk it stays as short as the room that is left."""
    fd = open_regular(folder / RESERVE_NAME, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(fd).st_size < RESERVE_BYTES:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names of a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _manifest(data: dict[str, Any]) -> Manifest:
    """What the file says, each value within its range; raises KeyError, TypeError or ValueError."""
    slab_bytes = _number(data, "slab_bytes", SLAB_BYTES_MIN, SLAB_BYTES_MAX)
    if slab_bytes % ALIGN_BYTES:
        raise ValueError(f"slab_bytes={slab_bytes}; valid are multiples of {ALIGN_BYTES}")
    spaces = tuple(_space(item) for item in data["spaces"])
    if len({(space.tenant, space.namespace) for space in spaces}) < len(spaces):
        raise ValueError("a namespace is there twice")
    return Manifest(slab_bytes, data["clean"] is True, spaces)


def _space(item: dict[str, Any]) -> SpaceRecord:
    namespace = bytes.fromhex(item["namespace"])
    tenant = _name(item, "tenant")
    if len(namespace) != NAMESPACE_BYTES or len(tenant.encode("utf-8")) > TENANT_BYTES_MAX:
        raise ValueError(f"namespace of {len(namespace)} bytes, tenant={tenant!r:.80}")
    return SpaceRecord(
        tenant=tenant,
        namespace=namespace,
        model=_name(item, "model"),
        alias=_name(item, "alias"),
        epoch=_number(item, "epoch", 0, EPOCH_MAX),
    )


def _number(item: dict[str, Any], name: str, least: int, most: int) -> int:
    value = item[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r:.80}; valid are {least}..{most}")
    return value


def _name(item: dict[str, Any], name: str) -> str:
    """A name that can be shown: whatever prints is in UTF-8."""
    value = item[name]
    if type(value) is not str or len(value) > NAME_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"{name}={value!r:.80}; valid are names that print")
    return value


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"nvme: {path} is damaged ({why}); empty the folder or choose another to start with an "
        "empty tier"
    )
