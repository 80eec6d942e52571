"""``python -m bench.timeline``: where the time of a store and of a retrieve goes.

Eight chunks of 4 MiB, pages of 64 KiB, at a daemon that notes what it does (``timed_daemon``, which
costs it some per cent). Before each request other memory is read, so that caches hold neither the
bytes nor the program, as behind an engine's step; ``--warm`` leaves that out. Medians of the parts:

- ``asked``: from the call until the daemon's loop reads the request
- ``decided``: until the first chunk's copy begins
- ``copied``: until the last one's has ended; beside it the sum of all eight
- ``told``: until the answer is sent
- ``known``: until the caller has it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Bytes, chunk_shape, finish
from bench.harness import MILLI
from kvstore import Ticket

_CHUNKS = 8
_OTHER_BYTES = 64 << 20
_SETTINGS = {"KVSTORE_HOST_SIZE": "1GiB", "KVSTORE_NVME_SIZE": "off"}
PARTS = ("asked", "decided", "copied", "told", "known")

Noted = list[tuple[str, int, int]]
Call = tuple[str, int, int]


def parts_of(call: Call, noted: Noted) -> dict[str, float] | None:
    """Seconds of each part of one call; None where what was noted isn't a whole request's.
    ``noted`` is in order of the begins."""
    _, begin_ns, end_ns = call
    begins = [begin for _, begin, _ in noted]
    mine = noted[bisect_left(begins, begin_ns) : bisect_left(begins, end_ns)]
    reads, copies, sends = (
        [n for n in mine if n[0] == name] for name in ("receive", "copy", "send")
    )
    if not reads or not sends or len(copies) != _CHUNKS:
        return None
    copied_ns = max(end for _, _, end in copies)
    marks = (begin_ns, reads[0][1], copies[0][1], copied_ns, sends[-1][2], end_ns)
    seconds = [(b - a) / 1e9 for a, b in pairwise(marks)]
    together = sum(end - begin for _, begin, end in copies) / 1e9
    return dict(zip(PARTS, seconds, strict=True)) | {"sum": together}


class _Rounds:
    """Stores and retrieves, one after the other, and when each was called and answered."""

    def __init__(self, engine: BenchEngine, warm: bool) -> None:
        self._engine = engine
        self._places = [engine.places(n * _CHUNKS, _CHUNKS) for n in range(2)]
        self._other: Bytes = np.ones(0 if warm else _OTHER_BYTES, np.uint8)
        self.calls: list[Call] = []
        self.memcpy_s: list[float] = []

    def run(self, number: int) -> None:
        """One of each, and one memcpy of as many bytes."""
        engine, (source, target) = self._engine, self._places
        keys = engine.keys(_CHUNKS, number + 1)
        self._call("store", lambda: engine.store("s", keys, source))
        self._call("retrieve", lambda: engine.retrieve("r", keys, target))
        half = engine.pages.nbytes // 2
        flat = engine.pages.reshape(-1)
        self._other.sum()
        begin_s = time.perf_counter()
        np.copyto(flat[half:], flat[:half])
        self.memcpy_s.append(time.perf_counter() - begin_s)

    def _call(self, kind: str, begin: Callable[[], Ticket]) -> None:
        self._other.sum()
        begin_ns = time.monotonic_ns()
        finish(begin())
        self.calls.append((kind, begin_ns, time.monotonic_ns()))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm", action="store_true", help="leave the caches alone")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        os.environ["BENCH_TIMELINE"] = str(file)
        command = (sys.executable, "-m", "bench.timed_daemon")
        shape = chunk_shape(2 * _CHUNKS, 4 << 20, 64 << 10)
        with BenchDaemon(Path(folder), _SETTINGS, command) as daemon:
            with BenchEngine(daemon.address, "timeline", shape) as engine:
                rounds = _Rounds(engine, options.warm)
                for number in range(options.rounds):
                    rounds.run(number)
            daemon.running.stop()
        noted = sorted(map(tuple, json.loads(file.read_text())), key=lambda n: n[1])
    print(f"memcpy    {statistics.median(rounds.memcpy_s) * MILLI:.2f} ms")
    for kind in ("store", "retrieve"):
        _show(kind, [c for c in rounds.calls if c[0] == kind][options.rounds // 6 :], noted)
    return 0


def _show(kind: str, calls: list[Call], noted: Noted) -> None:
    parts = [found for call in calls if (found := parts_of(call, noted)) is not None]
    whole_s = statistics.median((end - begin) / 1e9 for _, begin, end in calls)
    text = ", ".join(
        f"{part} {statistics.median(p[part] for p in parts) * MILLI:.2f}"
        + (f" (sum {statistics.median(p['sum'] for p in parts) * MILLI:.2f})" * (part == "copied"))
        for part in PARTS
    )
    print(f"{kind:9} {whole_s * MILLI:.2f} ms: {text} ({len(parts)} of {len(calls)})")


if __name__ == "__main__":
    sys.exit(main())
