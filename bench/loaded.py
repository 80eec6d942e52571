"""Loaded: the tail of lookups and retrieves while other engines store.

Lookups of 512 chunks, 2 ms apart, while another engine keeps 8 stores of 32 MiB in flight and the
daemon writes what they bring to NVMe. Retrieves of 8 chunks of 4 MiB from host memory by two
engines, back to back, while a third one stores.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Shape
from bench.harness import MICRO, MILLI, Bench, Question, Size, at_most, p50, p99
from bench.lookup import Prompts, batch_of
from bench.traffic import Spec, TrafficProcess

_PACE_S = 0.002
_PROMPTS = 8
_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class _Sizes:
    lookup_chunks: int
    lookups: int
    chunk_bytes: int
    stores: int
    seconds: float
    settings: dict[str, str]


_SIZES = {
    Size.FULL: _Sizes(512, 1500, 4 << 20, 8, 4.0, {
        "KVSTORE_HOST_SIZE": "1GiB", "KVSTORE_HOST_SLAB_SIZE": "64MiB",
        "KVSTORE_NVME_SIZE": "2GiB", "KVSTORE_NVME_SLAB_SIZE": "128MiB",
    }),
    Size.SMALL: _Sizes(16, 50, 1 << 20, 2, 0.3, {
        "KVSTORE_HOST_SIZE": "128MiB", "KVSTORE_HOST_SLAB_SIZE": "8MiB",
        "KVSTORE_NVME_SIZE": "129MiB", "KVSTORE_NVME_SLAB_SIZE": "16MiB",
    }),
}  # fmt: skip


def measure(bench: Bench) -> None:
    """Rows of lookups beside stores, and of retrieves beside stores."""
    settings = _SIZES[bench.size].settings
    with BenchDaemon(bench.folder, settings) as daemon:
        _lookups(bench, daemon)
    with BenchDaemon(bench.folder, settings) as daemon:
        _retrieves(bench, daemon)


def _lookups(bench: Bench, daemon: BenchDaemon) -> None:
    sizes = _SIZES[bench.size]
    shape = Shape(sizes.lookup_chunks, 1, 4096, 1, 256)
    load = Spec(daemon.address, "load", "store", _CHUNKS, sizes.chunk_bytes, sizes.stores)
    runs, stored_bytes, load_s, before = [], 0, 0.0, 0
    with ExitStack() as stack:
        engine = stack.enter_context(BenchEngine(daemon.address, "lookup", shape))
        prompts = Prompts(engine, sizes.lookup_chunks, _PROMPTS, 1)
        traffic = stack.enter_context(TrafficProcess(load))
        daemon.drain()
        before = daemon.io("write_bytes")
        with bench.control(_PACE_S) as control:
            for _ in range(bench.runs):
                started_s = time.perf_counter()
                traffic.go()
                runs.append(batch_of(prompts, sizes.lookups, _PACE_S))
                stored_bytes += len(traffic.stop()) * _CHUNKS * sizes.chunk_bytes
                load_s += time.perf_counter() - started_s
        written = daemon.io("write_bytes") - before
    assert stored_bytes, "nothing was stored meanwhile"
    assert written, "nothing was written to NVMe meanwhile"
    half = ", ".join(f"{p50(run) * MICRO:.0f}" for run in runs)
    bench.row(
        f"{sizes.lookup_chunks} chunks beside {sizes.stores} stores of "
        f"{_CHUNKS * sizes.chunk_bytes >> 20} MiB and NVMe writes, p99",
        "ms", [p99(run) * MILLI for run in runs], at_most(5),
        f"p50 {half} us; longest {max(map(max, runs)) * MILLI:.1f} ms; stored "
        f"{stored_bytes / load_s / 1e9:.1f} GB/s, written {written / load_s / 1e9:.1f} GB/s; "
        f"{control.beside()}",
    )  # fmt: skip


def _retrieves(bench: Bench, daemon: BenchDaemon) -> None:
    sizes = _SIZES[bench.size]
    readers = [
        Spec(daemon.address, f"reader{n}", "retrieve", _CHUNKS, sizes.chunk_bytes, 4)
        for n in range(2)
    ]
    writer = Spec(daemon.address, "writer", "store", _CHUNKS, sizes.chunk_bytes, 1)
    ratios, halves, tails, stores = [], [], [], 0
    with ExitStack() as stack:
        processes = [stack.enter_context(TrafficProcess(spec)) for spec in [*readers, writer]]
        daemon.drain()
        before = daemon.io("read_bytes")
        with bench.control(_PACE_S) as control:
            for _ in range(bench.runs):
                for process in processes:
                    process.go()
                time.sleep(sizes.seconds)
                *reads, stored = [process.stop() for process in processes]
                taken = [seconds for reader in reads for seconds in reader]
                ratios.append(p99(taken) / p50(taken))
                halves.append(p50(taken) * MILLI)
                tails.append(p99(taken) * MILLI)
                stores += len(stored)
        assert daemon.io("read_bytes") == before, "not every retrieve was a hit in host memory"
    assert stores, "nothing was stored meanwhile"
    bench.row(
        f"2 engines retrieve {_CHUNKS} x {sizes.chunk_bytes >> 20} MiB, 1 stores, p99 by p50",
        "x", ratios, at_most(3),
        f"p50 {_list(halves)} ms, p99 {_list(tails)} ms; {stores} stores; {control.beside()}",
    )  # fmt: skip


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


QUESTION = Question("loaded", "what becomes of the tail while other engines store?", measure)
