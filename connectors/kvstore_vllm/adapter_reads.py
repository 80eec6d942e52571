"""AdapterReads: which files vLLM read an adapter's weights from, as the worker saw it read them.

vLLM reads an adapter when it likes: when a server starts, when a request is computed, again after
it has dropped it. Files that are replaced meanwhile would make other weights of the same name and
number. Only who looks at the files around vLLM's own reading can tell which weights those are, so
the worker does: it calls vLLM's loader in vLLM's place. What was read under a number more than once
from files that differ, or while they changed, is never trusted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvstore_vllm.adapters import ADAPTERS_MAX, AdapterFiles, State, read_state


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """A rank's vLLM has read an adapter; ``state`` is that of its files, empty where they changed
    meanwhile or aren't a folder."""

    rank: int
    number: int
    state: State


class AdapterReads:
    """All reads of the ranks that are told of. One thread uses it."""

    def __init__(self) -> None:
        self._states: dict[int, set[State]] = {}
        self._ranks: dict[int, set[int]] = {}

    def add(self, reads: Iterable[AdapterRead]) -> None:
        """Remember reads; of adapters beyond ADAPTERS_MAX none, so that they aren't trusted."""
        for read in reads:
            if read.number in self._states or len(self._states) < ADAPTERS_MAX:
                self._states.setdefault(read.number, set()).add(read.state)
                self._ranks.setdefault(read.number, set()).add(read.rank)

    def has(self, number: int, ranks: int) -> bool:
        """Whether so many ranks have read the adapter."""
        return len(self._ranks.get(number, ())) >= ranks

    def are_of(self, files: AdapterFiles) -> bool:
        """Whether whatever was read of the adapter was these files."""
        return self._states.get(files.number) == {files.state}


def watch_loader(rank: int, told: Callable[[AdapterRead], None]) -> None:
    """From now on tell of each adapter that vLLM reads in this process."""
    load = WorkerLoRAManager._load_adapter

    def watched(manager: WorkerLoRAManager, lora: LoRARequest) -> Any:
        before = _state(lora)
        loaded = load(manager, lora)
        told(AdapterRead(rank, lora.lora_int_id, before if _state(lora) == before else ()))
        return loaded

    WorkerLoRAManager._load_adapter = watched


def _state(lora: LoRARequest) -> State:
    try:
        return read_state(Path(lora.lora_path).expanduser().absolute())
    except OSError:
        return ()
