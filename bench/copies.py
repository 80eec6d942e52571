"""Store and retrieve by host memory: how near they come to one memcpy of the same bytes.

A prompt of eight chunks of 4 MiB, its blocks scattered over the engine's memory, from the request
to the acknowledgement, at a real daemon that writes what is stored to NVMe as well. ``np.copyto``
of as many bytes is the measure: between the same engine memory and anonymous memory, both touched
before, and in turn over as many places, so that neither side finds its bytes in a cache more often.
What a store sets off on NVMe has ended before the next side's turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Bytes, chunk_shape, finish
from bench.harness import (
    MILLI,
    Bar,
    Bench,
    Question,
    Size,
    at_least,
    interleave,
    p50,
    rates,
    timed,
)

_CHUNKS = 8
_SETS = 8
"""Prompts in the engine's memory."""
_HOST_SETS = 12
"""Prompts that the host tier holds."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    chunk_bytes: int
    rounds: int
    settings: dict[str, str]


_SIZES = {
    Size.FULL: _Sizes(4 << 20, 16, {
        "KVSTORE_HOST_SIZE": "448MiB", "KVSTORE_HOST_SLAB_SIZE": "32MiB",
        "KVSTORE_NVME_SIZE": "900MiB", "KVSTORE_NVME_SLAB_SIZE": "128MiB",
    }),
    Size.SMALL: _Sizes(1 << 20, 2, {
        "KVSTORE_HOST_SIZE": "112MiB", "KVSTORE_HOST_SLAB_SIZE": "8MiB",
        "KVSTORE_NVME_SIZE": "225MiB", "KVSTORE_NVME_SLAB_SIZE": "32MiB",
    }),
}  # fmt: skip


class Copies:
    """The sides: prompts that are stored and retrieved, and the memory that memcpy uses."""

    def __init__(self, daemon: BenchDaemon, engine: BenchEngine) -> None:
        self._daemon = daemon
        self._engine = engine
        self._places = [engine.places(n * _CHUNKS, _CHUNKS) for n in range(_SETS)]
        self._memory: Bytes = engine.pages.reshape(_SETS, -1)
        self._other: Bytes = np.ones((_SETS, _CHUNKS * engine.shape.chunk_bytes), np.uint8)
        self._keys = [engine.keys(_CHUNKS, 1)] * _SETS
        self._stored = 0

    def fill(self) -> None:
        """Give every prompt of the engine's memory its bytes."""
        for number, places in enumerate(self._places):
            self._engine.fill(places, number * _CHUNKS)

    def store(self, number: int) -> float:
        """Store one prompt under keys that nobody has seen; its seconds."""
        self._stored += 1
        prompt = number % _SETS
        keys = self._engine.keys(_CHUNKS, self._stored)
        places = self._places[prompt]
        taken_s = timed(lambda: finish(self._engine.store("s", keys, places)))
        self._keys[prompt] = keys
        self._daemon.drain()
        return taken_s

    def copy_out(self, number: int) -> float:
        """memcpy of as many bytes out of the engine's memory."""
        prompt = number % _SETS
        return timed(lambda: np.copyto(self._other[prompt], self._memory[prompt]))

    def retrieve(self, number: int) -> float:
        """Retrieve one prompt to where another one lay, and compare every byte; its seconds."""
        prompt, place = number % _SETS, (number + 3) % _SETS
        keys, places = self._keys[prompt], self._places[place]
        taken_s = timed(lambda: finish(self._engine.retrieve("r", keys, places)))
        self._engine.check(places, prompt * _CHUNKS)
        self._engine.fill(places, (place + 1) % _SETS * _CHUNKS)
        return taken_s

    def copy_in(self, number: int) -> float:
        """memcpy of as many bytes into the engine's memory."""
        place = (number + 3) % _SETS
        return timed(lambda: np.copyto(self._memory[place], self._other[number % _SETS]))


def measure(bench: Bench) -> None:
    """Rows of pages of 64 and 16 KiB."""
    sizes = _SIZES[bench.size]
    with BenchDaemon(bench.folder, sizes.settings) as daemon:
        for page_kib, store_bar in ((64, at_least(0.75)), (16, at_least(0.60))):
            shape = chunk_shape(_CHUNKS * _SETS, sizes.chunk_bytes, page_kib << 10)
            with BenchEngine(daemon.address, f"pages{page_kib}", shape) as engine:
                _pages(bench, Copies(daemon, engine), f"pages of {page_kib} KiB", store_bar)


def _pages(bench: Bench, copies: Copies, pages: str, store_bar: Bar) -> None:
    sizes = _SIZES[bench.size]
    what = f"{_CHUNKS} x {sizes.chunk_bytes >> 20} MiB, {pages}"
    copies.fill()
    for number in range(2 * _HOST_SETS if bench.size is Size.FULL else _SETS):
        copies.store(number)
    stores = [
        interleave({"ours": copies.store, "memcpy": copies.copy_out}, sizes.rounds)
        for _ in range(bench.runs)
    ]
    bench.row(
        f"store {what}, by memcpy", "x", rates(stores, "ours", "memcpy"), store_bar, _both(stores)
    )
    for number in range(_SETS):
        copies.store(number)
    retrieves = [
        interleave({"ours": copies.retrieve, "memcpy": copies.copy_in}, sizes.rounds)
        for _ in range(bench.runs)
    ]
    bench.row(
        f"retrieve {what}, by memcpy", "x", rates(retrieves, "ours", "memcpy"), at_least(0.80),
        _both(retrieves),
    )  # fmt: skip


def _both(runs: list[dict[str, list[float]]]) -> str:
    ours, memcpy = ([p50(run[side]) * MILLI for run in runs] for side in ("ours", "memcpy"))
    return f"ours {_list(ours)} ms, memcpy {_list(memcpy)} ms"


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


QUESTION = Question("copies", "how near do store and retrieve come to one memcpy?", measure)
