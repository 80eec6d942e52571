"""Daemons with a Redis server: what a sick one costs lookups, and three tiers read at once.

Lookups: prompts of which the first half is here and the other half nowhere, so that each lookup
asks the server, at two daemons in turn. One has a healthy server. The other's is stopped: it takes
connections and commands, and answers nothing, whether the breaker is closed yet or open.

Thirds: a prompt whose chunks lie in host memory, on NVMe and in Redis, a third each, retrieved by
one request; beside it the thirds of another such prompt one after another, by three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.daemon import BenchDaemon
from bench.engine import WAIT_S, BenchEngine, Shape, chunk_shape, finish, tokens
from bench.harness import (
    MICRO,
    MILLI,
    Bench,
    Size,
    at_most,
    interleave,
    interleave_batches,
    p50,
    p99,
    timed,
)
from kvstore import ChunkKeys, Ticket
from kvstore.core.messages import HitStatus
from tests.redis_rig import Server, standalone

_PACE_S = 0.002
_STAGING = 4
"""Slabs of the host tier that hold no chunks."""
_PATIENT = {"KVSTORE_REDIS_TIMEOUT": "20s", "KVSTORE_REDIS_PROBE_TIMEOUT": "200ms"}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``third`` chunks of ``chunk_bytes`` lie in each tier."""

    chunks: int
    lookups: int
    batches: int
    third: int
    chunk_bytes: int
    rounds: int


_SIZES = {
    Size.FULL: _Sizes(512, 250, 4, 4, 4 << 20, 3),
    Size.SMALL: _Sizes(16, 10, 2, 2, 1 << 20, 1),
}


def measure(bench: Bench, folder: Path) -> None:
    """Rows of lookups and of thirds; servers' folders lie in ``folder``, whose path is short."""
    with standalone(folder / "h") as healthy, standalone(folder / "s") as sick:
        _lookups(bench, healthy, sick)
    with standalone(folder / "t") as server:
        _thirds(bench, server)


# ------------------------------------------------------------------ lookups


class Lookups:
    """One daemon's side: prompts of a known half and tails of their own."""

    def __init__(self, engine: BenchEngine, chunks: int, count: int) -> None:
        self._engine = engine
        self._known = chunks // 2
        size = engine.shape.tokens_per_chunk
        head = tokens(self._known * size, 1)[: self._known * size]
        self._keys: list[ChunkKeys] = [
            engine.worker.keys(head + tokens((chunks - self._known) * size, 100 + number))
            for number in range(count)
        ]
        finish(engine.store("s", self._keys[0][: self._known], engine.places(0, self._known)))
        self._asked = 0

    def calls(self, count: int) -> Callable[[int], list[float]]:
        """A side of the comparison."""
        return lambda number: self.batch(count)

    def batch(self, count: int) -> list[float]:
        """So many lookups, ``_PACE_S`` apart: the seconds of each, to HIT or PENDING."""
        taken, asked = [], []
        for _ in range(count):
            time.sleep(_PACE_S)
            self._asked += 1
            request, keys = f"r{self._asked}", self._keys[self._asked % len(self._keys)]
            started_s = time.perf_counter()
            found = self._engine.worker.lookup(request, keys)
            taken.append(time.perf_counter() - started_s)
            asked.append(request)
            known = found.status is HitStatus.HIT and found.chunks == self._known
            assert known or found.status is HitStatus.PENDING, found
        for request in asked:
            self._engine.worker.release(request)
        return taken


def _lookups(bench: Bench, healthy: Server, sick: Server) -> None:
    sizes = _SIZES[bench.size]
    shape = Shape(sizes.chunks, 1, 4096, 1, 16)
    with ExitStack() as stack:
        sides = {}
        for name, server in (("healthy", healthy), ("sick", sick)):
            daemon = stack.enter_context(
                BenchDaemon(bench.folder, {"KVSTORE_REDIS_URL": server.url} | _TIERS)
            )
            _await_up(daemon)
            engine = stack.enter_context(BenchEngine(daemon.address, "lookup", shape))
            sides[name] = Lookups(engine, sizes.chunks, sizes.lookups)
            daemon.drain()
            _await_shared(daemon, sizes.chunks // 2)
        sick.stop()
        stack.callback(sick.go_on)
        with bench.control() as control:
            runs = [
                interleave_batches(
                    {name: side.calls(sizes.lookups) for name, side in sides.items()}, sizes.batches
                )
                for _ in range(bench.runs)
            ]
    halves = "; ".join(
        f"{name} p50 {_list([p50(run[name]) * MICRO for run in runs])}, "
        f"p99 {_list([p99(run[name]) * MICRO for run in runs])} us"
        for name in sides
    )
    bench.row(
        f"{sizes.chunks}-chunk lookup, server is sick, p99 by a healthy one's",
        "x", [p99(run["sick"]) / p99(run["healthy"]) for run in runs], at_most(1.5),
        f"{halves}; {control.beside()}",
    )  # fmt: skip


_TIERS = {
    "KVSTORE_HOST_SIZE": "256MiB", "KVSTORE_NVME_SIZE": "512MiB",
    "KVSTORE_NVME_SLAB_SIZE": "64MiB",
}  # fmt: skip


def _await_up(daemon: BenchDaemon) -> None:
    _await(lambda: daemon.stats()["redis"]["state"] == "up", "the Redis tier is up")


def _await_shared(daemon: BenchDaemon, parts: int) -> None:
    def shared() -> bool:
        redis = daemon.stats()["redis"]
        return redis["chunks_written"] + redis["chunks_present"] >= parts

    _await(shared, f"{parts} chunk parts are in Redis")


# ------------------------------------------------------------------ thirds


class Thirds:
    """Prompts, each a third in each tier; every prompt can be used once, as it is promoted then."""

    def __init__(self, engine: BenchEngine, third: int) -> None:
        self._engine = engine
        self._third = third
        self._used = 0

    def keys(self, prompt: int) -> ChunkKeys:
        """Of all three thirds."""
        return self._engine.keys(3 * self._third, prompt + 1)

    def together(self, number: int) -> float:
        """All by one request; its seconds."""
        prompt, keys = self._next()
        places = self._engine.places(0, 3 * self._third)
        taken_s = timed(lambda: finish(self._engine.retrieve(f"p{prompt}", keys, places)))
        self._done(prompt, places)
        return taken_s

    def apart(self, number: int) -> float:
        """Third by third; the sum of their seconds."""
        prompt, keys = self._next()
        places, taken_s = self._engine.places(0, 3 * self._third), 0.0
        blocks = self._third * self._engine.shape.blocks_per_chunk
        for part in range(3):
            some = keys[part * self._third : (part + 1) * self._third]
            where = places[part * blocks : (part + 1) * blocks]
            taken_s += timed(lambda s=some, w=where: finish(self._retrieve(prompt, s, w)))
        self._done(prompt, places)
        return taken_s

    def _retrieve(self, prompt: int, keys: ChunkKeys, places: list[int]) -> Ticket:
        return self._engine.retrieve(f"p{prompt}", keys, places)

    def _next(self) -> tuple[int, ChunkKeys]:
        """The next prompt, looked up: its last third is found in Redis."""
        prompt, keys = self._used, self.keys(self._used)
        self._used += 1

        def hit() -> bool:
            found = self._engine.worker.lookup(f"p{prompt}", keys)
            return found.status is HitStatus.HIT and found.chunks == len(keys)

        _await(hit, "the whole prompt is found")
        return prompt, keys

    def _done(self, prompt: int, places: list[int]) -> None:
        self._engine.check(places, prompt * 3 * self._third)
        self._engine.worker.release(f"p{prompt}")
        self._engine.pages[:] = 0


def _thirds(bench: Bench, server: Server) -> None:
    sizes = _SIZES[bench.size]
    prompts = 2 * (bench.runs * sizes.rounds + 1)
    shape = chunk_shape(3 * sizes.third, sizes.chunk_bytes, 64 << 10)
    with ExitStack() as stack:
        _share(bench, server, shape, prompts)
        daemon = stack.enter_context(BenchDaemon(bench.folder, _third_settings(server, sizes)))
        _await_up(daemon)
        with BenchEngine(daemon.address, "thirds", shape) as engine:
            thirds = Thirds(engine, sizes.third)
            for prompt in range(prompts):
                _store(engine, thirds, prompt, 2 * sizes.third)
                daemon.drain()
        daemon.restart()
        _await_up(daemon)
        engine = stack.enter_context(BenchEngine(daemon.address, "thirds", shape))
        thirds = Thirds(engine, sizes.third)
        for prompt in range(prompts):
            head = thirds.keys(prompt)[: sizes.third]
            finish(engine.retrieve(f"h{prompt}", head, engine.places(0, sizes.third)))
        sides = {"together": thirds.together, "apart": thirds.apart}
        interleave(sides, 1)
        before = daemon.io("read_bytes"), daemon.tier("redis")["io"]["read_bytes"]
        runs = [interleave(sides, sizes.rounds) for _ in range(bench.runs)]
        after = daemon.io("read_bytes"), daemon.tier("redis")["io"]["read_bytes"]
    chunks = 2 * bench.runs * sizes.rounds * sizes.third
    for tier, (start, end) in zip(("NVMe", "Redis"), zip(before, after, strict=True), strict=True):
        assert chunks <= (end - start) // sizes.chunk_bytes <= chunks + 1, f"{tier}: {end - start}"
    each = [f"{_list([p50(run[side]) * MILLI for run in runs])} ms {side}" for side in sides]
    bench.row(
        f"{3 * sizes.third} x {sizes.chunk_bytes >> 20} MiB, a third in each tier, by one by one",
        "x", [p50(run["together"]) / p50(run["apart"]) for run in runs], at_most(0.8),
        "; ".join(each),
    )  # fmt: skip


def _share(bench: Bench, server: Server, shape: Shape, prompts: int) -> None:
    """Another node puts all prompts into Redis."""
    third = shape.chunks // 3
    settings = _third_settings(server, _SIZES[bench.size]) | {"KVSTORE_NVME_SIZE": "off"}
    with BenchDaemon(bench.folder, settings) as daemon:
        _await_up(daemon)
        with BenchEngine(daemon.address, "thirds", shape) as engine:
            thirds = Thirds(engine, third)
            for prompt in range(prompts):
                _store(engine, thirds, prompt, 3 * third)
                _await_shared(daemon, (prompt + 1) * 3 * third)


def _store(engine: BenchEngine, thirds: Thirds, prompt: int, chunks: int) -> None:
    places = engine.places(0, chunks)
    engine.fill(places, prompt * engine.shape.chunks)
    finish(engine.store(f"s{prompt}", thirds.keys(prompt)[:chunks], places))


def _third_settings(server: Server, sizes: _Sizes) -> dict[str, str]:
    """Room for every prompt, so that nothing is evicted under way."""
    chunks = 2 * (3 * sizes.rounds + 1) * 3 * sizes.third
    slab_mib = 8 * (sizes.chunk_bytes >> 20)
    room = f"{(chunks * (sizes.chunk_bytes + 4096) * 5 // 4 >> 20) + _STAGING * slab_mib}MiB"
    slab = f"{slab_mib}MiB"
    return {
        "KVSTORE_REDIS_URL": server.url,
        "KVSTORE_HOST_SIZE": room, "KVSTORE_HOST_SLAB_SIZE": slab,
        "KVSTORE_NVME_SIZE": room, "KVSTORE_NVME_SLAB_SIZE": slab,
    } | _PATIENT  # fmt: skip


def _await(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"still not so after a minute: {what}"
        time.sleep(0.002)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)
