"""NVMe: how near the daemon comes to plain direct I/O of the same bytes.

Reading: a prompt of 64 chunks of 4 MiB that only NVMe has, from the request to the acknowledgement,
checksums and the scatter included. Beside it plain O_DIRECT ``preadv`` of the same slots in the
same files, those that the daemon wrote, with as many threads.

Writing: a prompt of 64 chunks that host memory has and NVMe hasn't, from the request that has it
written until all of it is on NVMe: chunks are admitted at their second store (``nvme.admit_after``)
which copies nothing. And the same from a first store on, the copies into host memory included.
Beside both plain O_DIRECT ``pwritev`` of as many bytes with as many threads. All overwrite extents
that were written before.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Bytes, chunk_shape, finish
from bench.harness import Bar, Bench, Question, Size, at_least, interleave, p50, rates, timed
from kvstore import ChunkKeys
from kvstore.codecs import base as codecs
from kvstore.core.errors import ChunkCorruptError
from kvstore.memory import advise_huge_pages, map_anonymous
from kvstore.mover import MoverThreads
from kvstore.tiers.block_io import aligned_empty

_READ_SETS = 3
_WRITE_SETS = 4
_READ_THREADS, _WRITE_THREADS = MoverThreads().read, MoverThreads().write
"""The daemon's own defaults."""
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``slab`` holds one prompt; the host tier holds little more than one."""

    chunks: int
    chunk_bytes: int
    rounds: int
    settings: dict[str, str]


_SIZES = {
    Size.FULL: _Sizes(64, 4 << 20, 6, {
        "KVSTORE_HOST_SIZE": "416MiB", "KVSTORE_HOST_SLAB_SIZE": "32MiB",
        "KVSTORE_NVME_SIZE": "1029MiB", "KVSTORE_NVME_SLAB_SIZE": "257MiB",
    }),
    Size.SMALL: _Sizes(8, 1 << 20, 2, {
        "KVSTORE_HOST_SIZE": "12MiB", "KVSTORE_HOST_SLAB_SIZE": "1MiB",
        "KVSTORE_NVME_SIZE": "37MiB", "KVSTORE_NVME_SLAB_SIZE": "9MiB",
    }),
}  # fmt: skip


class PlainIO:
    """Direct reads or writes of whole slots with a few threads; the measure. A context manager."""

    def __init__(self, threads: int, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._threads = ThreadPoolExecutor(threads)
        # Huge pages, as the daemon's arena has: direct I/O into small ones is slower.
        memory = map_anonymous(slots * slot_bytes)
        advise_huge_pages(memory.address, memory.nbytes)
        whole: Bytes = np.frombuffer(memory.buffer, np.uint8)
        whole[:] = 1
        self.buffers = list(whole.reshape(slots, slot_bytes))
        self._files: list[int] = []

    def __enter__(self) -> PlainIO:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        for file in self._files:
            os.close(file)

    def open(self, path: Path) -> int:
        """A descriptor for direct I/O, buffered where the file system refuses it (as the tier
        does)."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            file = os.open(path, flags, 0o600)
        self._files.append(file)
        return file

    def read(self, places: list[tuple[int, int]]) -> None:
        """Read slots, each (file, offset), one into each buffer."""
        self._each(lambda n: os.preadv(places[n][0], [self.buffers[n].data], places[n][1]))

    def write(self, places: list[tuple[int, int]]) -> None:
        """Write the buffers to slots."""
        self._each(lambda n: os.pwritev(places[n][0], [self.buffers[n].data], places[n][1]))

    def _each(self, work: Callable[[int], int]) -> None:
        done = list(self._threads.map(work, range(len(self.buffers))))
        assert done == [self.slot_bytes] * len(done), "a short read or write"


class Prompts:
    """The daemon's side: prompts of one length, stored and retrieved. Prompt n holds the bytes of
    chunks from n * chunks on."""

    def __init__(self, daemon: BenchDaemon, engine: BenchEngine) -> None:
        self.daemon = daemon
        self.engine = engine
        self.chunks = engine.shape.chunks
        self.slot_bytes = engine.shape.chunk_bytes + _HEADER_BYTES
        self._places = engine.places(0, self.chunks)
        self._keys: dict[int, ChunkKeys] = {}

    def keys(self, prompt: int) -> ChunkKeys:
        """A prompt's keys, computed once."""
        if prompt not in self._keys:
            self._keys[prompt] = self.engine.keys(self.chunks, prompt + 1)
        return self._keys[prompt]

    def fill(self, prompt: int) -> None:
        """Put a prompt's bytes into the engine's memory."""
        self.engine.fill(self._places, prompt * self.chunks)

    def keep(self, prompt: int) -> None:
        """Store a prompt, and wait until nothing moves any more."""
        finish(self.engine.store("w", self.keys(prompt), self._places))
        self.daemon.drain()

    def write(self, prompt: int) -> float:
        """Store a prompt; the seconds until all of it is on NVMe."""
        keys, before = self.keys(prompt), self.daemon.io("write_bytes")
        nbytes = self.chunks * self.slot_bytes
        all_bytes = self.daemon.written_bytes() + nbytes
        started_s = time.perf_counter()
        finish(self.engine.store("w", keys, self._places))
        self.daemon.await_written(all_bytes)
        taken_s = time.perf_counter() - started_s
        self.daemon.drain()
        written = self.daemon.io("write_bytes") - before
        assert written == nbytes, f"{written} bytes were written"
        return taken_s

    def read(self, prompt: int) -> float:
        """Retrieve a prompt that only NVMe has, and compare every byte; its seconds."""
        before = self.daemon.io("read_bytes")
        taken_s = timed(lambda: finish(self.engine.retrieve("r", self.keys(prompt), self._places)))
        read = self.daemon.io("read_bytes") - before
        assert read == self.chunks * self.slot_bytes, f"{read} bytes were read"
        self.engine.check(self._places, prompt * self.chunks)
        return taken_s


def measure(bench: Bench) -> None:
    """Rows of reading and writing."""
    sizes = _SIZES[bench.size]
    shape = chunk_shape(sizes.chunks, sizes.chunk_bytes, 64 << 10)
    with (
        BenchDaemon(bench.folder, sizes.settings) as daemon,
        BenchEngine(daemon.address, "nvme", shape) as engine,
    ):
        prompts = Prompts(daemon, engine)
        for prompt in range(_READ_SETS):
            prompts.fill(prompt)
            prompts.write(prompt)
        _read(bench, prompts)
        _write(bench, prompts, "store {} until on NVMe, by pwritev", None)
    with (
        BenchDaemon(bench.folder, sizes.settings | {"KVSTORE_NVME_ADMIT_AFTER": "2"}) as daemon,
        BenchEngine(daemon.address, "nvme", shape) as engine,
    ):
        _write(bench, Prompts(daemon, engine), "write {} to NVMe, by pwritev", at_least(0.85))


def _read(bench: Bench, prompts: Prompts) -> None:
    sizes = _SIZES[bench.size]
    with PlainIO(_READ_THREADS, prompts.chunks, prompts.slot_bytes) as plain:
        found = slots_by_key(prompts.daemon.nvme, plain)
        places = [
            [found[bytes(key)] for key in _each(prompts.keys(prompt))]
            for prompt in range(_READ_SETS)
        ]
        # In turn over all runs: by the time that a prompt comes up again the host tier has lost it.
        turn, plain_turn = itertools.cycle(range(_READ_SETS)), itertools.cycle(places)
        sides = {
            "ours": lambda n: prompts.read(next(turn)),
            "plain": lambda n: timed(lambda: plain.read(next(plain_turn))),
        }
        interleave(sides, _READ_SETS)
        runs = [interleave(sides, sizes.rounds) for _ in range(bench.runs)]
        _check_plain(plain, places[0], prompts)
    bench.row(
        f"retrieve {_what(sizes)} from NVMe, by preadv", "x", rates(runs, "ours", "plain"),
        at_least(0.85), _both(runs, prompts, "preadv", _READ_THREADS),
    )  # fmt: skip


def _check_plain(plain: PlainIO, places: list[tuple[int, int]], prompts: Prompts) -> None:
    """The plain side read the same chunks: their payloads have their headers' checksums."""
    plain.read(places)
    for buffer, key in zip(plain.buffers, _each(prompts.keys(0)), strict=True):
        header, payload = codecs.unpack(buffer[:_HEADER_BYTES])
        assert header.key == key, "the plain side read another chunk"
        assert payload.checksum == codecs.payload_checksum(buffer[_HEADER_BYTES:])


def _write(bench: Bench, prompts: Prompts, name: str, bar: Bar | None) -> None:
    """One row; with a bar, prompts are stored once before, untimed."""
    sizes = _SIZES[bench.size]
    with PlainIO(_WRITE_THREADS, prompts.chunks, prompts.slot_bytes) as plain:
        file = plain.open(bench.folder / "plain.bin")
        places = [
            [(file, (s * prompts.chunks + n) * prompts.slot_bytes) for n in range(prompts.chunks)]
            for s in range(_WRITE_SETS)
        ]
        stored = itertools.count(_READ_SETS)

        def ours(number: int) -> float:
            prompt = next(stored)
            if bar is not None:
                prompts.keep(prompt)
            return prompts.write(prompt)

        sides = {
            "ours": ours,
            "plain": lambda n: timed(lambda: plain.write(places[n % _WRITE_SETS])),
        }
        prompts.fill(_READ_SETS)
        interleave(sides, 2 * _WRITE_SETS)  # from here on every extent was written before
        runs = [interleave(sides, sizes.rounds) for _ in range(bench.runs)]
        (bench.folder / "plain.bin").unlink()
    bench.row(
        name.format(_what(sizes)), "x", rates(runs, "ours", "plain"), bar,
        _both(runs, prompts, "pwritev", _WRITE_THREADS),
    )  # fmt: skip


def slots_by_key(folder: Path, plain: PlainIO) -> dict[bytes, tuple[int, int]]:
    """Where each chunk's slot lies, (file, offset), by the headers in the daemon's slab files."""
    found: dict[bytes, tuple[int, int]] = {}
    block: Bytes = aligned_empty(_HEADER_BYTES)
    for path in sorted(folder.glob("slab_*.kv")):
        file = plain.open(path)
        for offset in range(0, path.stat().st_size, plain.slot_bytes):
            os.preadv(file, [block.data], offset)
            try:
                header, _ = codecs.unpack(block)
            except ChunkCorruptError:
                continue
            found[bytes(header.key)] = (file, offset)
    return found


def _each(keys: ChunkKeys) -> list[bytes]:
    return [bytes(keys.data[at : at + 32]) for at in range(0, len(keys.data), 32)]


def _what(sizes: _Sizes) -> str:
    return f"{sizes.chunks} x {sizes.chunk_bytes >> 20} MiB"


def _both(runs: list[dict[str, list[float]]], prompts: Prompts, call: str, threads: int) -> str:
    nbytes = prompts.chunks * prompts.slot_bytes
    ours, plain = (
        ", ".join(f"{nbytes / p50(run[side]) / 1e9:.2f}" for run in runs)
        for side in ("ours", "plain")
    )
    mode = prompts.daemon.tier("nvme")["mode"]
    return f"ours {ours} GB/s, {call} in {threads} threads {plain} GB/s; {mode}"


QUESTION = Question("nvme", "how near does the NVMe tier come to plain direct I/O?", measure)
