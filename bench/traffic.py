"""Traffic: another engine's process that stores or retrieves back to back while told to.

``python -m bench.traffic SPEC`` registers an engine at a daemon and prints ``ready``. Then, line by
line on its standard input: ``go`` begins, ``stop`` ends and prints one JSON line with the seconds
of each transfer. The end of the input ends the process.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Protocol

from bench.echo import ROOT
from bench.engine import BenchEngine, chunk_shape, finish
from kvstore import Ticket

_CHECK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Spec:
    """``does``: "store" new prompts, ``depth`` of them in flight; or "retrieve" ``depth`` stored
    prompts in turn, one at a time. A prompt has ``chunks`` chunks."""

    address: str
    name: str
    does: str
    chunks: int
    chunk_bytes: int
    depth: int
    page_bytes: int = 64 << 10


class Work(Protocol):
    """What is done back to back."""

    def step(self) -> float:
        """One transfer; its seconds."""

    def end(self) -> None:
        """Finish what is under way."""


class Storing:
    """Stores prompts that nobody has seen, ``depth`` at a time."""

    def __init__(self, engine: BenchEngine, spec: Spec) -> None:
        self._engine = engine
        self._spec = spec
        self._open: deque[tuple[float, Ticket]] = deque()
        self._count = 0
        engine.fill(engine.places(0, spec.chunks * spec.depth), 0)

    def step(self) -> float:
        """Wait for the oldest store and send another."""
        spec = self._spec
        taken_s = 0.0
        if len(self._open) == spec.depth:
            taken_s = self._finish_oldest()
        place = self._count % spec.depth
        self._count += 1
        keys = self._engine.keys(spec.chunks, self._count)
        places = self._engine.places(place * spec.chunks, spec.chunks)
        started_s = time.perf_counter()
        self._open.append((started_s, self._engine.store(f"s{place}", keys, places)))
        return taken_s

    def end(self) -> None:
        """Wait for all."""
        while self._open:
            self._finish_oldest()

    def _finish_oldest(self) -> float:
        started_s, ticket = self._open.popleft()
        finish(ticket)
        return time.perf_counter() - started_s


class Retrieving:
    """Retrieves stored prompts to where others lay; some are compared. Each prompt has a lease, so
    that what others store doesn't push it out."""

    def __init__(self, engine: BenchEngine, spec: Spec) -> None:
        self._engine = engine
        self._count = 0
        self._prompts = spec.depth
        self._chunks = spec.chunks
        self._keys = [engine.keys(spec.chunks, n) for n in range(spec.depth)]
        self._places = [engine.places(n * spec.chunks, spec.chunks) for n in range(spec.depth)]
        for number, (keys, places) in enumerate(zip(self._keys, self._places, strict=True)):
            engine.fill(places, number * spec.chunks)
            finish(engine.store("fill", keys, places))
            self._look_up(number)

    def step(self) -> float:
        """Look a prompt up, as engines do, and retrieve it; the seconds of the retrieve."""
        self._count += 1
        prompt = self._count % self._prompts
        self._look_up(prompt)
        places = self._places[(self._count + self._count // self._prompts) % self._prompts]
        started_s = time.perf_counter()
        finish(self._engine.retrieve(f"r{prompt}", self._keys[prompt], places))
        taken_s = time.perf_counter() - started_s
        if self._count % _CHECK_EVERY == 0:
            self._engine.check(places, prompt * self._chunks)
        return taken_s

    def end(self) -> None:
        """Nothing is under way."""

    def _look_up(self, prompt: int) -> None:
        hit = self._engine.worker.lookup(f"r{prompt}", self._keys[prompt])
        assert hit.chunks == self._chunks, hit


def run(spec: Spec) -> None:
    """The process's whole life."""
    shape = chunk_shape(spec.chunks * spec.depth, spec.chunk_bytes, spec.page_bytes)
    with BenchEngine(spec.address, spec.name, shape) as engine:
        work: Work = Storing(engine, spec) if spec.does == "store" else Retrieving(engine, spec)
        print("ready", flush=True)
        while sys.stdin.readline():
            seconds = []
            while not select.select([sys.stdin], [], [], 0)[0]:
                seconds.append(work.step())
            work.end()
            sys.stdin.readline()
            print(json.dumps(seconds), flush=True)


class TrafficProcess:
    """The process, as the bench sees it. A context manager."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> TrafficProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.traffic", json.dumps(asdict(self._spec))],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._line() == "ready", f"{self._spec.name} didn't start"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        self._process.communicate()

    def go(self) -> None:
        """Begin."""
        self._say("go")

    def stop(self) -> list[float]:
        """End; the seconds of each transfer (0.0 where a store was the first of its place)."""
        self._say("stop")
        found: list[float] = json.loads(self._line())
        return found

    def _say(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


if __name__ == "__main__":
    run(Spec(**json.loads(sys.argv[1])))
