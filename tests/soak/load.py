"""A real daemon under load for long: ``python -m tests.soak.load --seconds 240``.

Engines of two models with chunks of different size work on more prompts than fit, so that
everything is evicted all the time. First come troubles: the daemon is restarted, killed, stopped;
models are cleared; engines are killed. Then it is left alone but for engines that die, and must
not grow. Every byte that an engine retrieves is compared.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import RunningDaemon, private_environment
from tests.crash.engine_process import EngineProcess, Life
from tests.crash.watch import Watch
from tests.small_engine import SmallEngine, tokens
from tests.soak.load_engine import LARGE_MODEL, live

MODELS = ("org/small", LARGE_MODEL)
ENGINES = 4
CHUNKS = 32
PROMPTS = 64
"""Of each model, of 1 and of 5 MiB, where the host has 20 MiB and NVMe 96: they alternate in the
same slabs."""
SETTINGS = {
    "KVSTORE_HOST_SIZE": "24MiB",
    "KVSTORE_HOST_SLAB_SIZE": "2MiB",
    "KVSTORE_NVME_SIZE": "97MiB",
    "KVSTORE_NVME_SLAB_SIZE": "4MiB",
}
GROWTH_MAX_BYTES = 24 << 20
THREADS_MAX, DESCRIPTORS_MAX = 100, 400
EVENT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """What the daemon's process takes up."""

    resident_bytes: int
    threads: int
    descriptors: int


class Load:
    """One run: a daemon, its engines, and what is done to them. ``counts`` sums up all of it."""

    def __init__(self, daemon: RunningDaemon, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._daemon = daemon
        self._watch = Watch(daemon)
        self._randomness = random.Random(seed)
        self._engines: list[EngineProcess] = []
        self._names = 0

    def run(self, seconds: float) -> None:
        """Troubles for half of the time, then quiet; raises AssertionError for what is wrong."""
        for _ in range(ENGINES):
            self._start_engine()
        troubles = (self._restart, self._kill, self._stop, self._clear, self._kill_engine)
        self._events(seconds / 2, troubles)
        self._events(seconds / 10, (self._kill_engine, self._clear))
        before = self._size()
        self._events(seconds * 4 / 10, (self._kill_engine, self._clear, self._stop))
        after = self._size()
        self._end(before, after)

    def _events(self, seconds: float, kinds: tuple[Callable[[], None], ...]) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for engine in self._engines:
                assert not engine.is_due(EVENT_EVERY_S / ENGINES), "an engine has ended by itself"
            kind = self._randomness.choice(kinds)
            kind()
            self.counts[kind.__name__.strip("_")] += 1
            assert self._daemon.process is not None
            assert self._daemon.process.poll() is None, "the daemon has ended by itself"

    def _start_engine(self) -> None:
        self._names += 1
        seeds = tuple(range(PROMPTS))
        model = MODELS[self._names % len(MODELS)]
        life = Life(self._daemon.socket, model, seeds, CHUNKS, f"engine{self._names}")
        engine = EngineProcess(life, live)
        event = engine.next_event()
        assert event is not None
        assert event.step == "registered"
        self._engines.append(engine)

    def _restart(self) -> None:
        assert self._daemon.stop() == 0
        self._daemon.start()

    def _kill(self) -> None:
        self._daemon.kill()
        self._daemon.start()

    def _stop(self) -> None:
        os.kill(self._daemon.pid, signal.SIGSTOP)
        self._engines[0].is_due(self._randomness.random())
        os.kill(self._daemon.pid, signal.SIGCONT)

    def _kill_engine(self) -> None:
        engine = self._randomness.choice(self._engines)
        engine.end()
        self._engines.remove(engine)
        self._start_engine()

    def _clear(self) -> None:
        """Clear a model that everybody uses, and one whose prompt nobody stores meanwhile: that
        one is gone."""
        with SmallEngine(self._daemon.socket, CHUNKS, "org/cleared", name="clearing") as engine:
            keys = engine.keys(tokens(CHUNKS, self._names))
            engine.fill(keys)
            kept = engine.store(keys).leading_chunks
            assert engine.hits(keys) <= kept
            with self._watch.admin() as admin:
                admin.clear("org/cleared", "")
                admin.clear(self._randomness.choice(MODELS), "")
            assert engine.hits(keys) == 0

    def _size(self) -> Size:
        process = Path(f"/proc/{self._daemon.pid}")
        pages = int((process / "statm").read_text().split()[1])
        return Size(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir(process / "task")),
            len(os.listdir(process / "fd")),
        )

    def _end(self, before: Size, after: Size) -> None:
        """Engines end in order; nothing of them is left, nothing was wrong, nothing has grown."""
        for engine in self._engines:
            for event in engine.finish():
                self.counts[event.step] += event.chunks
            engine.end()
        self.counts["wrong"] += 0
        assert self.counts["wrong"] == 0, f"{self.counts['wrong']} chunks were wrong"
        assert self.counts["retrieved"] > 0
        self._watch.wait_for(lambda s: s["traffic"]["sessions"] == 0)
        self._watch.written()
        left = self._watch.holdings()
        assert (left.leases, left.pinned, left.moves, left.memories) == (0, 0, 0, ()), left
        growth = after.resident_bytes - before.resident_bytes
        self.counts["resident KiB grown"] = growth >> 10
        self.counts["resident MiB"] = after.resident_bytes >> 20
        assert growth < GROWTH_MAX_BYTES, f"{before} became {after}"
        assert after.threads < THREADS_MAX, after
        assert after.descriptors < DESCRIPTORS_MAX, after
        figures = self._watch.stats()
        assert figures["process"]["state"] == "ok", figures["process"]
        self.counts.update({f"dropped: {k}": n for k, n in figures["drops"].items() if n})
        bad = {"dropped: corrupt", "dropped: key_collision"} & set(self.counts)
        assert not bad, figures["drops"]
        assert self._daemon.stop() == 0
        check = self._daemon.kvstore("verify")
        assert check.returncode == 0, check.stdout


def main() -> int:
    """Run it; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=None, help="of what is done to them")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    daemon = RunningDaemon(folder, private_environment(folder, SETTINGS), ())
    daemon.start()
    load = Load(daemon, seed)
    print(f"seed {seed}", flush=True)
    try:
        load.run(options.seconds)
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
        print("  ".join(f"{name} {count}" for name, count in sorted(load.counts.items())))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
