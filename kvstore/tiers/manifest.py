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

from kvstore.core.errors import ConfigError
from kvstore.core.messages import SpaceRecord

FORMAT = "kvstore/nvme/1"
FILE_NAME = "manifest.json"
RESERVE_NAME = "reserve"
RESERVE_BYTES = 256 << 10
"""Room for the records of a thousand namespaces."""

_TEMPORARY = "manifest.json.tmp"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the file says."""

    slab_bytes: int
    clean: bool
    spaces: tuple[SpaceRecord, ...] = ()


def load(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where there is none. Raises ConfigError, saying what to do,
    for a file that this version can't read. (A temporary file that a crash left goes with the
    next save.)"""
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"nvme: {path} is damaged ({error}); empty the folder or choose another to start "
            "with an empty tier"
        ) from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ConfigError(
            f"nvme: {path} has format {found!r}, this version reads {FORMAT!r}; use the version "
            "that wrote it, or empty the folder or choose another"
        )
    try:
        return Manifest(
            slab_bytes=int(data["slab_bytes"]),
            clean=data["clean"] is True,
            spaces=tuple(_space(item) for item in data["spaces"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"nvme: {path} is damaged ({error!r}); empty the folder or choose another to start "
            "with an empty tier"
        ) from error


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
    temporary = folder / _TEMPORARY
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / FILE_NAME)
    sync_folder(folder)


def _reserve(folder: Path) -> None:
    """Hold room for the next save; on a full disk it stays as short as the room that is left."""
    fd = os.open(folder / RESERVE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def _space(item: dict[str, Any]) -> SpaceRecord:
    return SpaceRecord(
        tenant=str(item["tenant"]),
        namespace=bytes.fromhex(item["namespace"]),
        model=str(item["model"]),
        alias=str(item["alias"]),
        epoch=int(item["epoch"]),
    )
