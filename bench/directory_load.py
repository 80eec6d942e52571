"""Loads for the core's directory: how long single events take, by label, at many chunks.

``python bench/directory_load.py [LOAD ...] [--chunks N]`` prints count, p50, p99 and the longest
of each label, the longest first. Cyclic collection is off, as in the daemon.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Callable

from directory_rig import (
    PROMPT,
    SLAB_SLOTS,
    TENANT,
    Load,
    blocks_of,
    chain,
    fill,
    limits,
    record,
    records,
    report,
    restored,
)

from kvstore.core.keys import KEY_BYTES, NO_PARENT, Namespace
from kvstore.core.messages import (
    ADMIN,
    Clear,
    MoveKind,
    MoveStatus,
    Release,
    Retrieve,
    ScannedSlot,
    SessionClosed,
    SpaceRecord,
    Store,
    Tick,
)

# ---------------------------------------------------------------- loads


def prompts_and_hits(chunks: int) -> Load:
    """Fill with prompts, look them up, evict, take statistics, clear."""
    load = Load(limits(chunks))
    session = load.engine()
    prompts: list[bytes] = []
    for size in (1000, chunks // 10, chunks):
        before = len(prompts) * PROMPT
        prompts += fill(load, session, size - before, len(prompts))
        load.hits(f"hit at {size}", session, prompts[: len(prompts)], 2000)
    for turn, keys in enumerate(prompts):
        load.lookup("leases", session, keys, f"l{turn}")
    load.stats("stats")
    for turn in range(len(prompts)):
        load.ask("release", session, Release(f"l{turn}"))
    for keys in (chain(PROMPT, -n) for n in range(1, 50)):
        load.store("evict: store", session, keys)
    load.event("tick", Tick())
    load.ask("clear", ADMIN, Clear(None, None))
    load.settle("clear")
    return load


def many_leaves(chunks: int) -> Load:
    """One root and all others below it: used again in another order, leased, evicted."""
    load = Load(limits(chunks))
    session = load.engine()
    root = chain(1, 1)
    load.store("root", session, root)
    leaves = [chain(1, -n) for n in range(1, chunks)]
    for leaf in leaves:
        load.store("leaf: store", session, leaf, 1, root)
    for leaf in reversed(leaves[1:]):
        load.lookup("leaf: lookup", session, root + leaf, "same")
    for turn, leaf in enumerate(leaves[:60000]):
        load.lookup("leaf: lease", session, root + leaf, f"r{turn}")
    for turn in range(SLAB_SLOTS + 2000):
        load.store("leaf: evict", session, chain(1, 1 << 60 | turn), 1, root)
    load.stats("stats")
    load.now += 100
    load.settle("leases expire")
    return load


def doomed_head(chunks: int) -> Load:
    """A chain of all chunks on NVMe whose head turns out corrupt; lookups meanwhile."""
    load = restored("deep scan", records(chunks, chunks, record()), chunks, SLAB_SLOTS)
    session = load.engine()
    keys = random.Random(0).randbytes(chunks * KEY_BYTES)
    load.lookup("deep: lookup", session, keys[: 4096 * KEY_BYTES])
    load.store("other: store", session, chain(PROMPT, -1))
    load.status = lambda move: MoveStatus.CORRUPT if move.kind is MoveKind.READ else MoveStatus.OK
    load.ask("deep: retrieve", session, Retrieve("r", keys[:KEY_BYTES], (blocks_of(1),)))
    load.pump("doom")
    for turn in range(100):
        load.lookup("doomed: lookup", session, keys[: 65536 * KEY_BYTES], f"d{turn}")
        load.lookup("doomed: other lookup", session, chain(PROMPT, -1), f"o{turn}")
        deep = slice((chunks - 2) * KEY_BYTES, (chunks - 1) * KEY_BYTES)
        load.store("doomed: deep store", session, chain(1, turn - 99999), chunks - 1, keys[deep])
        load.event("doomed: tick", Tick())
    load.settle("doomed")
    return load


def scans(chunks: int) -> Load:
    """Restarts whose slots come in bad orders."""
    space = record()
    load = Load(limits(SLAB_SLOTS))

    def scan(label: str, found: list[ScannedSlot]) -> None:
        load.took |= restored(label, found, chunks, SLAB_SLOTS).took
        gc.collect()

    found = list(records(chunks, PROMPT, space))
    scan("head first", found)
    found.reverse()
    scan("tail first", found)
    random.Random(1).shuffle(found)
    scan("shuffled", found)
    found = list(records(chunks, chunks, space))
    scan("one chain, root last", found[1:] + found[:1])
    scan("one chain, tail half", found[chunks // 2 :])
    return load


def lost_session(chunks: int) -> Load:
    """Sessions lost with many transfers under way: reads, stores, leases."""
    load = restored("scan", records(chunks, PROMPT, record()), chunks, 2 * SLAB_SLOTS)
    engine = load.engine()
    for number in range(40):
        keys = random.Random(number).randbytes(PROMPT * KEY_BYTES)[: 250 * KEY_BYTES]
        load.lookup("lookup", engine, keys, f"r{number}")
        load.ask("retrieve", engine, Retrieve(f"r{number}", keys, (blocks_of(250),)))
    while load.service.next_tick_s(load.now) == 0.0:
        load.event("retrieve: tick", Tick())
    load.event("lost: reads", SessionClosed(engine))
    load.pump("lost: reads")
    load = load_after(load, chunks)
    return load


def load_after(load: Load, chunks: int) -> Load:
    """The same for stores of one long chain, many short ones, and many leases."""
    engine = load.engine("long")
    for number in range(0, 65536, 16384):
        keys = chain(16384, -1)[: 16384 * KEY_BYTES]
        load.ask("long store", engine, Store(f"{number}", keys, 0, NO_PARENT, (blocks_of(16384),)))
    for _ in range(120):
        load.event("long store: tick", Tick())
    load.event("lost: long store", SessionClosed(engine))
    load.pump("lost: long store")
    engine = load.engine("short")
    for number in range(4000):
        keys = chain(4, -10 - number)
        load.ask("short store", engine, Store("s", keys, 0, NO_PARENT, (blocks_of(4),)))
    load.event("lost: short stores", SessionClosed(engine))
    load.pump("lost: short stores")
    engine = load.engine("leases")
    for number in range(65000):
        keys = random.Random(number % 1900).randbytes(PROMPT * KEY_BYTES)
        load.lookup("lease", engine, keys[: KEY_BYTES * (1 + number // 1900)], f"r{number}")
    load.event("lost: leases", SessionClosed(engine))
    load.settle("lost: leases")
    return load


def namespaces(chunks: int) -> Load:
    """As many namespaces as there may be: statistics, a new one, a clear of all."""
    count = min(65536, chunks)
    spaces = tuple(
        SpaceRecord(TENANT, n.to_bytes(32, "big"), f"m{n}", "", 0) for n in range(count - 4)
    )
    start_s = time.thread_time()
    load = Load(limits(SLAB_SLOTS, SLAB_SLOTS), spaces)
    load.note("start", time.thread_time() - start_s)
    for number in range(8):
        load.engine(f"e{number}", space=Namespace("org/model", f"r{number}", "test/rows"))
    load.stats("stats")
    load.ask("clear", ADMIN, Clear(None, None))
    load.settle("clear")
    return load


def two_sizes(chunks: int) -> Load:
    """Two models with chunks of different sizes take turns in a full tier."""
    load = Load(limits(chunks, pages=3))
    small, large = load.engine("small"), load.engine("large", 3, Namespace("b", "r", "f"))
    for turn in range(4):
        for number in range(chunks // PROMPT // 4):
            load.store("small: store", small, chain(PROMPT, turn << 40 | number))
        for number in range(chunks // PROMPT // 4):
            keys = chain(PROMPT, turn << 40 | 1 << 39 | number)
            data = blocks_of(3 * PROMPT)
            load.ask("large: store", large, Store("s", keys, 0, NO_PARENT, (data,)))
            load.pump("large: store")
    load.settle("two sizes")
    return load


LOADS: dict[str, Callable[[int], Load]] = {
    "prompts": prompts_and_hits,
    "leaves": many_leaves,
    "doom": doomed_head,
    "scan": scans,
    "lost": lost_session,
    "namespaces": namespaces,
    "sizes": two_sizes,
}


def main() -> None:
    """Run the loads that are asked for and print what took longest."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("loads", nargs="*", default=list(LOADS), help=", ".join(LOADS))
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--over-ms", type=float, default=5.0)
    parser.add_argument("--all", action="store_true", help="every label, not the longest ten")
    options = parser.parse_args()
    gc.disable()
    for name in options.loads:
        load = LOADS[name](options.chunks)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps({"load": name, "chunks": options.chunks, "resident_max_mib": resident}))
        lines = report(load.took, options.over_ms / 1e3)
        for line in lines if options.all else lines[:12]:
            print("  " + json.dumps(line), flush=True)
        del load


if __name__ == "__main__":
    main()
