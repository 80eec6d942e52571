"""Directory: what a million chunks cost the core, which answers every engine in one thread.

A Service with fake hands (directory_rig.py) in a process of its own: a prompt of 512 chunks is
looked up among a million on NVMe and among a thousand, in turn. All prompts begin with one chunk,
the head, so that dooming it dooms all others. Each event is timed by the thread's CPU time: what
the machine does meanwhile isn't the core's pause. How fast a restarted daemon finds its chunks
again is asked of a real one, with fewer.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.daemon import BenchDaemon
from bench.directory_rig import (
    BLOCK_BYTES,
    SLAB_SLOTS,
    TOKENS,
    Load,
    blocks_of,
    chain,
    record,
    restored,
)
from bench.echo import ROOT
from bench.engine import BenchEngine, Shape, finish
from bench.harness import MICRO, MILLI, Bench, Question, Size, at_most, p50
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import (
    ChunkHeader,
    MoveKind,
    MoveStatus,
    Place,
    Release,
    Retrieve,
    ScannedSlot,
    SessionID,
    Tick,
    TierName,
)

PROMPT = 512
_FEW_PROMPTS = 2
_PAGE_BYTES = 4096
_SCAN_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``prompts`` of 512 chunks in all, ``lookups`` of each side a run, ``restart`` chunks."""

    prompts: int
    lookups: int
    stores: int
    restart: int
    settings: dict[str, str]


_SIZES = {
    Size.FULL: _Sizes(1957, 2000, 50, 32_768, {
        "KVSTORE_HOST_SIZE": "256MiB", "KVSTORE_NVME_SIZE": "321MiB",
        "KVSTORE_NVME_SLAB_SIZE": "32MiB",
    }),
    Size.SMALL: _Sizes(10, 20, 2, 512, {
        "KVSTORE_HOST_SIZE": "64MiB", "KVSTORE_NVME_SIZE": "33MiB",
        "KVSTORE_NVME_SLAB_SIZE": "8MiB",
    }),
}  # fmt: skip


def prompt_keys(prompt: int) -> bytes:
    """The keys of a prompt: the head, and 511 chunks of its own."""
    return chain(1, 0) + random.Random(prompt + 1).randbytes((PROMPT - 1) * KEY_BYTES)


def other_keys(number: int) -> bytes:
    """The keys of a prompt that shares nothing with those."""
    return chain(PROMPT, 1 << 40 | number)


def forest(prompts: int) -> Iterator[ScannedSlot]:
    """What a scan finds of so many prompts: the head, then each prompt's own chunks."""
    space = record()
    number = 0
    for prompt in range(prompts):
        keys = prompt_keys(prompt)
        for depth in range(PROMPT):
            if prompt and not depth:
                continue
            key = ChunkKey(keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            above = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES] if depth else NO_PARENT
            header = ChunkHeader(
                key, ChunkKey(above), depth, space.tenant, space.namespace, space.epoch,
                "float32", TOKENS, 0, 1, Part.FULL, BLOCK_BYTES, number + 1,
            )  # fmt: skip
            slab, index = divmod(number, SLAB_SLOTS)
            number += 1
            yield ScannedSlot(Place(TierName.NVME, slab, index, 2 * BLOCK_BYTES), header)


class Side:
    """A Service that has found so many prompts again, and an engine at it."""

    def __init__(self, prompts: int, label: str) -> None:
        self.prompts = prompts
        self.chunks = prompts * (PROMPT - 1) + 1
        self.load: Load = restored(label, forest(prompts), self.chunks, SLAB_SLOTS)
        self.session: SessionID = self.load.engine()

    def hit(self, number: int) -> float:
        """Look one prompt up under a new name and release it; the lookup's seconds."""
        keys = prompt_keys(number * 7919 % self.prompts)
        label = "lookup"
        found = self.load.lookup(label, self.session, keys, f"r{number}")
        assert found == PROMPT, found
        self.load.ask("release", self.session, Release(f"r{number}"))
        return self.load.took[label][-1]


def run(size: Size) -> dict[str, Any]:
    """The figures, in this process."""
    sizes = _SIZES[size]
    gc.disable()  # as in the daemon
    few = Side(_FEW_PROMPTS, "scan")
    before = _resident_bytes()
    many = Side(sizes.prompts, "scan")
    entry_bytes = (_resident_bytes() - before) / many.chunks
    scan_s = sum(many.load.took["scan: scanned"])
    runs = []
    for turn in range(3):
        taken: dict[str, list[float]] = {"few": [], "many": []}
        for number in range(sizes.lookups):
            for name, side in (("few", few), ("many", many))[:: 1 if number % 2 else -1]:
                taken[name].append(side.hit(turn * sizes.lookups + number))
        runs.append({name: p50(seconds) for name, seconds in taken.items()})
    for turn in range(sizes.stores):
        many.load.store("store", many.session, other_keys(turn))
    many.load.stats("stats")
    longest = _longest(many.load)
    many.load.took.clear()
    _doom(many)
    return {
        "chunks": many.chunks, "few": few.chunks, "entry_bytes": entry_bytes,
        "scan_chunks_s": many.chunks / scan_s, "hits": runs, "longest": longest,
        "doom": _longest(many.load),
    }  # fmt: skip


def _doom(side: Side) -> None:
    """The head turns out corrupt; other engines' work goes on while all below it is swept."""
    load, root = side.load, chain(1, 0)
    load.store("doom: other store", side.session, other_keys(1 << 20))
    load.status = lambda m: MoveStatus.CORRUPT if m.kind is MoveKind.READ else MoveStatus.OK
    load.ask("doom: retrieve", side.session, Retrieve("r", root, (blocks_of(1),)))
    load.pump("doom")
    load.status = lambda m: MoveStatus.OK
    assert load.lookup("doom: lookup", side.session, prompt_keys(1), "d") == 0, "it still hits"
    turn = 0
    while load.service.next_tick_s(load.now) < 0.1:
        load.now += load.service.next_tick_s(load.now)
        load.event("doom: tick", Tick())
        load.pump("doom")
        if turn % 50 == 0:
            load.lookup("doom: lookup", side.session, prompt_keys(turn % side.prompts), "d")
            load.store("doom: other store", side.session, other_keys(1 << 21 | turn))
            found = load.lookup("doom: other lookup", side.session, other_keys(1 << 21 | turn))
            assert found == PROMPT, found
        turn += 1


def _longest(load: Load) -> tuple[str, float]:
    """The event that took longest, and its seconds."""
    times = {name: max(seconds) for name, seconds in load.took.items() if "in all" not in name}
    name = max(times, key=times.__getitem__)
    return name, times[name]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def measure(bench: Bench) -> None:
    """Rows of the core in a process of its own, and of a restarted daemon."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.directory", bench.size.value],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    chunks = f"{found['chunks']:,} chunks"
    few, many = (
        ", ".join(f"{run[side] * MICRO:.1f}" for run in found["hits"]) for side in ("few", "many")
    )
    bench.row(
        f"{chunks}: a hit of {PROMPT}, by one among {found['few']:,}",
        "x", [run["many"] / run["few"] for run in found["hits"]], at_most(1.5),
        f"p50 {many} us, by {few} us",
    )  # fmt: skip
    bench.row(f"{chunks}: memory of the index", "B/chunk", [found["entry_bytes"]])
    name, seconds = found["longest"]
    bench.row(
        f"{chunks}: longest event", "ms", [seconds * MILLI], at_most(5),
        f"{name}; of a restart's scan, lookups, stores that evict, statistics",
    )  # fmt: skip
    name, seconds = found["doom"]
    bench.row(
        f"dooming the head of {found['chunks'] - 1:,}: longest event",
        "ms", [seconds * MILLI], at_most(5), name,
    )  # fmt: skip
    _restart(bench, found["scan_chunks_s"])


def _restart(bench: Bench, core_chunks_s: float) -> None:
    """How long a daemon takes to find its chunks again."""
    sizes = _SIZES[bench.size]
    rates = []
    shape = Shape(sizes.restart, 1, _PAGE_BYTES, 1, 16)
    with BenchDaemon(bench.folder, sizes.settings) as daemon:
        with BenchEngine(daemon.address, "restart", shape) as engine:
            keys = engine.keys(sizes.restart, 1)
            finish(engine.store("s", keys, engine.places(0, sizes.restart)))
            daemon.drain()
        for _ in range(bench.runs):
            daemon.restart()
            started_s = time.perf_counter()
            while (tier := daemon.tier("nvme"))["scanning"]:
                assert time.perf_counter() - started_s < _SCAN_DEADLINE_S, "the scan doesn't end"
            assert tier["chunks"] == sizes.restart, tier
            rates.append(sizes.restart / (time.perf_counter() - started_s))
    bench.row(
        f"a restarted daemon finds {sizes.restart:,} chunks again", "chunks/s", rates, None,
        f"the core alone takes in {core_chunks_s:,.0f} chunks/s",
    )  # fmt: skip


QUESTION = Question("directory", "what do a million chunks cost the core?", measure)

if __name__ == "__main__":
    print(json.dumps(run(Size(sys.argv[1]))))
