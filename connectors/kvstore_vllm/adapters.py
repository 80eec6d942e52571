"""AdapterDigests: digests of LoRA adapters' weights, computed off the scheduler's thread.

An adapter is its name and its weights; vLLM's integer IDs differ between engines and never enter a
key. Until the digest of an adapter is there, its requests are neither looked up nor stored.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("vllm.kvstore")


State = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Entry:
    state: State
    digest: Future[str]


class AdapterDigests:
    """Digests by vLLM's integer ID, name and folder of an adapter.

    vLLM reads an adapter's files once and keeps the weights. So a digest is computed once too, and
    an adapter whose files have changed since is cached no more: nobody can tell which weights vLLM
    has. One thread uses this; a second one, started with the first adapter, reads files.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._entries: dict[tuple[int, str, str], _Entry] = {}
        self._refused: set[tuple[int, str, str]] = set()

    def digest(self, number: int, name: str, path: str) -> str | None:
        """The digest of an adapter's files, or None while it is computed or can't be."""
        known, folder = (number, name, path), Path(path)
        try:
            state = _state(folder)
        except OSError:
            state = ()
        entry = self._entries.get(known)
        if not state or (entry is not None and entry.state != state):
            self._refuse(known, "its files aren't a folder here, or have changed")
            return None
        if entry is None:
            self._pool = self._pool or ThreadPoolExecutor(1, "kvstore-adapters")
            entry = _Entry(state, self._pool.submit(_digest, folder))
            self._entries[known] = entry
        if not entry.digest.done():
            return None
        error = entry.digest.exception()
        if error is not None:
            self._refuse(known, str(error))
            return None
        return entry.digest.result()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _refuse(self, known: tuple[int, str, str], reason: str) -> None:
        if known not in self._refused:
            self._refused.add(known)
            _log.warning("kvstore: nothing of adapter %s is reused: %s", known[1], reason)


def _state(folder: Path) -> State:
    """Names, sizes and times of change of an adapter's files; empty for what isn't a folder."""
    if not folder.is_dir():
        return ()
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name, size, _ in _state(folder):
        digest.update(f"{name}:{size};".encode())
        with (folder / name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return "sha256:" + digest.hexdigest()
