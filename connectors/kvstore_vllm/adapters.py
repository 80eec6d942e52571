"""Adapters: which LoRA adapter a request's KV was computed with, told off the engine's loop.

An adapter is its name and its weights; vLLM's integer numbers differ between engines and never
enter a key. Weights are a digest of the files that vLLM reads (about 1 GB a second), computed once
and from a thread, which begins when the request comes; lookups wait for it as for a remote answer,
ADAPTER_WAIT_S at most, while other requests go on.

vLLM reads the files at some time of its own, again whenever it has dropped the adapter meanwhile,
and the workers watch it (adapter_reads.py). Nothing is looked up before vLLM has read the adapter,
and nothing is looked up or stored unless what it read are the very files of the digest. So an
engine's first request of an adapter is computed, and stored like any other. The files are looked at
for each request, too: an adapter whose files have changed is cached no more. Nor is one that
comes back with other weights in the same folder: vLLM's own prefix cache tells adapters apart by
name and folder only, and what it hits there would be stored as the new weights'.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm.lora.request import LoRARequest

ADAPTER_WAIT_S = 5.0
"""How long a request with an adapter waits to be looked up; beyond that it is computed."""
ADAPTERS_MAX = 65_536
"""Adapters remembered, some 20 MB; none is forgotten, as vLLM may have its weights still."""
_READ = ("adapter_", "new_embeddings.")
"""How the files begin that vLLM reads of an adapter's folder."""
_THREADS = 4
_log = logging.getLogger("vllm.kvstore")

State = tuple[tuple[str, int, int, int], ...]
"""Per file its name, size and times of change."""


class UnknownWeightsError(Exception):
    """Nobody can tell the weights of an adapter; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its files were: ``digest`` names their contents, ``number`` is vLLM's."""

    number: int
    name: str
    folder: str
    state: State
    digest: str


class Adapters:
    """The adapters of this engine. Safe to use from several threads; starts its own with the first
    adapter."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._files: dict[int, AdapterFiles] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._refused: set[int] = set()

    def check(self, lora: LoRARequest) -> Future[AdapterFiles]:
        """The adapter's files as they are now, soon; UnknownWeightsError where nobody can tell."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "kvstore-adapters")
        return self._pool.submit(self._check, lora)

    def refuse(self, number: int, name: str, reason: str) -> None:
        """From now on nothing of this adapter is cached; said once."""
        with self._lock:
            known = number in self._refused
            if len(self._refused) < ADAPTERS_MAX:
                self._refused.add(number)
        if not known:
            _log.warning("kvstore: nothing of adapter %s is reused: %s", name, reason)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, lora: LoRARequest) -> AdapterFiles:
        number = lora.lora_int_id
        try:
            if number in self._refused:
                raise UnknownWeightsError("it was refused before")
            files = self._known(lora)
        except (UnknownWeightsError, OSError) as error:
            self.refuse(number, lora.lora_name, str(error))
            raise UnknownWeightsError(str(error)) from error
        return files

    def _known(self, lora: LoRARequest) -> AdapterFiles:
        """What is known of it, compared with how it is now; or all of it, read now."""
        folder = Path(lora.lora_path).expanduser().absolute()
        if lora.load_inplace:
            raise UnknownWeightsError("load_inplace may replace weights under running requests")
        if not folder.is_dir():
            raise UnknownWeightsError(f"its files aren't a folder here: {lora.lora_path}")
        state = read_state(folder)
        known = self._files.get(lora.lora_int_id)
        if known is None:
            return self._read(lora, folder, state)
        if (known.name, known.folder) != (lora.lora_name, str(folder)):
            raise UnknownWeightsError(f"its number {lora.lora_int_id} is {known.name}'s as well")
        if known.state != state:
            raise UnknownWeightsError("its files have changed since vLLM may have read them")
        return known

    def _read(self, lora: LoRARequest, folder: Path, state: State) -> AdapterFiles:
        if not state:
            raise UnknownWeightsError(f"there is no file of an adapter in {folder}")
        digest = _digest(folder, state)
        found = AdapterFiles(lora.lora_int_id, lora.lora_name, str(folder), state, digest)
        if read_state(folder) != state:
            raise UnknownWeightsError("its files change while they are read")
        with self._lock:
            if len(self._files) >= ADAPTERS_MAX:
                raise UnknownWeightsError(f"{ADAPTERS_MAX} adapters are known, which is the limit")
            if self._digests.setdefault((found.name, found.folder), found.digest) != found.digest:
                raise UnknownWeightsError("vLLM has had other weights from its folder before")
            return self._files.setdefault(lora.lora_int_id, found)


def read_state(folder: Path) -> State:
    """Names, sizes and times of change of what vLLM reads in an adapter's folder."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_READ) and path.is_file():
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def _digest(folder: Path, state: State) -> str:
    digest = hashlib.sha256()
    for name, size, *_ in state:
        digest.update(f"{name}:{size};".encode())
        with (folder / name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return "sha256:" + digest.hexdigest()
