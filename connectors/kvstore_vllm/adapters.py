"""AdapterDigests: digests of LoRA adapters' weights, computed off the scheduler's thread.

An adapter is its name and its weights; vLLM's integer IDs differ between engines and never enter a
key. Until the digest of an adapter is there, its requests are neither looked up nor stored.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_log = logging.getLogger("vllm.kvstore")


class AdapterDigests:
    """Digests by folder. A folder whose files have changed since is digested anew.

    One thread uses it; a second one, started with the first adapter, reads files.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._found: dict[tuple[str, tuple[tuple[str, int, int], ...]], Future[str]] = {}

    def digest(self, path: str) -> str | None:
        """The digest of an adapter's folder, or None while it is computed or can't be."""
        folder = Path(path)
        try:
            state = _state(folder)
        except OSError:
            state = ()
        if not state:
            return None
        future = self._found.get((path, state))
        if future is None:
            self._pool = self._pool or ThreadPoolExecutor(1, "kvstore-adapters")
            future = self._found[path, state] = self._pool.submit(_digest, folder)
        if not future.done():
            return None
        error = future.exception()
        if error is not None:
            _log.warning("kvstore: can't read adapter %s: %s", path, error)
            self._found[path, state] = Future()
            return None
        return future.result()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
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
