"""Lookup: how long an engine's scheduler waits to learn what is there.

A real daemon on default tiers, keys computed before. Each lookup is a request of its own (a repeat
would be answered from its lease), over eight prompts in turn, so that the leading chunks of one
aren't always in the processor's cache. Beside it a bare echo of frames of the same sizes with
another process: the least that any round trip between two cores costs here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.cores import apart
from bench.daemon import BenchDaemon
from bench.echo import EchoClient, EchoServer
from bench.engine import BenchEngine, Shape, finish, tokens
from bench.harness import (
    MICRO,
    MILLI,
    Bench,
    Question,
    Size,
    at_most,
    interleave_batches,
    p50,
    p99,
    timed,
)
from kvstore import ChunkKeys
from kvstore.proto_gen import engine_pb2 as pb

_SETTINGS = {
    "KVSTORE_HOST_SIZE": "256MiB",
    "KVSTORE_NVME_SIZE": "512MiB",
    "KVSTORE_NVME_SLAB_SIZE": "64MiB",
}
_PACE_S = 0.002

Runs = Sequence[dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class _Sizes:
    chunks: int
    many: int
    batch: int
    rounds: int
    paced_rounds: int
    token_calls: int


_SIZES = {
    Size.FULL: _Sizes(512, 4096, 250, 12, 4, 40),
    Size.SMALL: _Sizes(16, 32, 10, 2, 1, 3),
}
_PROMPTS = 8


class Prompts:
    """Stored prompts of one length, to be looked up in turn; a session's side of the bench."""

    def __init__(self, engine: BenchEngine, chunks: int, prompts: int, seed: int) -> None:
        self._engine = engine
        self._chunks = chunks
        self._keys = [engine.keys(chunks, seed + n) for n in range(prompts)]
        self._asked = 0
        self._leased: list[str] = []
        for number, keys in enumerate(self._keys):
            finish(engine.store(f"s{seed + number}", keys, engine.places(0, chunks)))

    def call(self) -> float:
        """One lookup under a new name; its seconds. Raises AssertionError unless all is hit."""
        self._asked += 1
        request, keys = f"r{self._asked}", self._keys[self._asked % len(self._keys)]
        started_s = time.perf_counter()
        found = self._engine.worker.lookup(request, keys)
        taken_s = time.perf_counter() - started_s
        assert found.chunks == self._chunks, found
        self._leased.append(request)
        return taken_s

    def release(self) -> None:
        """Give the leases back, and wait until the daemon has seen it."""
        for request in self._leased:
            self._engine.worker.release(request)
        self._leased.clear()
        self._engine.worker.lookup("end", self._keys[0])
        self._engine.worker.release("end")

    def frame_bytes(self) -> tuple[int, int]:
        """The sizes of the frames that go out and come back."""
        asks = pb.ClientMessage(
            kind=pb.ClientMessage.LOOKUP, request="r10000", keys=self._keys[0].data, id=10_000
        )
        says = pb.DaemonMessage(
            kind=pb.DaemonMessage.LOOKUP, id=10_000, status=1, chunks=self._chunks
        )
        return 4 + asks.ByteSize(), 4 + says.ByteSize()


def batch_of(call: Prompts | EchoClient, count: int, pace_s: float) -> list[float]:
    """So many calls, ``pace_s`` apart; the seconds of each."""
    seconds = []
    for _ in range(count):
        if pace_s:
            time.sleep(pace_s)
        seconds.append(call.call())
    if isinstance(call, Prompts):
        call.release()
    return seconds


def compare(
    prompts: Prompts, echo: EchoClient, size: tuple[int, int], pace_s: float
) -> dict[str, list[float]]:
    """``size``: calls a batch, and batches of each side in turn."""
    count, rounds = size
    return interleave_batches(
        {
            "lookup": lambda _: batch_of(prompts, count, pace_s),
            "echo": lambda _: batch_of(echo, count, pace_s),
        },
        rounds,
    )


def measure(bench: Bench) -> None:
    """Rows of 512 and 4,096 chunks, back to back and paced, and from the token list."""
    sizes = _SIZES[bench.size]
    shape = Shape(max(sizes.chunks, sizes.many), 1, 4096, 1, 256)
    with ExitStack() as stack:
        daemon = stack.enter_context(BenchDaemon(bench.folder, _SETTINGS))
        engine = stack.enter_context(BenchEngine(daemon.address, "lookup", shape))
        server = stack.enter_context(EchoServer(str(daemon.running.folder / "echo.sock")))
        prompts = Prompts(engine, sizes.chunks, _PROMPTS, 1)
        many = Prompts(engine, sizes.many, 1, 100)
        daemon.drain()
        stack.enter_context(apart(daemon.running.pid, server.pid))
        with EchoClient(server.path, *prompts.frame_bytes()) as echo:
            compare(prompts, echo, (sizes.batch, 1), 0.0)
            _back_to_back(bench, prompts, echo)
            _paced(bench, prompts, echo)
        with EchoClient(server.path, *many.frame_bytes()) as echo:
            _many(bench, many, echo)
        _from_tokens(bench, engine)


def _back_to_back(bench: Bench, prompts: Prompts, echo: EchoClient) -> None:
    sizes = _SIZES[bench.size]
    with bench.control() as control:
        runs = [compare(prompts, echo, (sizes.batch, sizes.rounds), 0.0) for _ in range(bench.runs)]
    name = f"{sizes.chunks:,} chunks, back to back"
    bench.row(f"{name}, p50", "us", _us(p50(run["lookup"]) for run in runs), at_most(150))
    bench.row(
        f"{name}, p50 by the echo's", "x", [p50(r["lookup"]) / p50(r["echo"]) for r in runs],
        at_most(4), _echo(runs, p50, "p50"),
    )  # fmt: skip
    _tail(bench, name, runs, control.beside())


def _paced(bench: Bench, prompts: Prompts, echo: EchoClient) -> None:
    sizes = _SIZES[bench.size]
    with bench.control() as control:
        runs = [
            compare(prompts, echo, (sizes.batch, sizes.paced_rounds), _PACE_S)
            for _ in range(bench.runs)
        ]
    name = f"{sizes.chunks:,} chunks, 2 ms apart"
    bench.row(
        f"{name}, p50", "us", _us(p50(run["lookup"]) for run in runs), at_most(250),
        _echo(runs, p50, "p50"),
    )  # fmt: skip
    _tail(bench, name, runs, control.beside())


def _tail(bench: Bench, name: str, runs: Runs, control: str) -> None:
    ours = ", ".join(f"{p99(run['lookup']) * MICRO:.0f}" for run in runs)
    bench.row(
        f"{name}, p99 by the echo's", "x", [p99(r["lookup"]) / p99(r["echo"]) for r in runs],
        at_most(3), f"p99 {ours} us; {_echo(runs, p99, 'p99')}; {control}",
    )  # fmt: skip


def _many(bench: Bench, many: Prompts, echo: EchoClient) -> None:
    sizes = _SIZES[bench.size]
    size = (max(1, sizes.batch // 4), sizes.rounds)
    runs = [compare(many, echo, size, 0.0) for _ in range(bench.runs)]
    bench.row(
        f"{sizes.many:,} chunks, back to back, p50", "us",
        _us(p50(run["lookup"]) for run in runs), at_most(500), _echo(runs, p50, "p50"),
    )  # fmt: skip


def _from_tokens(bench: Bench, engine: BenchEngine) -> None:
    """The keys of a Python list of tokens, from the beginning, and the lookup."""
    sizes = _SIZES[bench.size]
    token_ids = tokens(sizes.chunks * engine.shape.tokens_per_chunk, 1)

    def once() -> None:
        keys: ChunkKeys = engine.worker.keys(token_ids)
        found = engine.worker.lookup("tokens", keys)
        assert found.chunks == sizes.chunks, found

    runs = []
    for _ in range(bench.runs):
        seconds = []
        for _ in range(sizes.token_calls):
            seconds.append(timed(once))
            engine.worker.release("tokens")
        runs.append(p50(seconds) * MILLI)
    bench.row(
        f"{sizes.chunks:,} chunks, from a list of {len(token_ids) - 1:,} tokens, p50", "ms", runs,
        at_most(6), "LMCache beside it: python -m bench.peer_lmcache",
    )  # fmt: skip


def _us(seconds: Iterable[float]) -> list[float]:
    return [value * MICRO for value in seconds]


def _echo(runs: Runs, which: Callable[[Sequence[float]], float], name: str) -> str:
    values = ", ".join(f"{which(run['echo']) * MICRO:.0f}" for run in runs)
    return f"echo {name} {values} us"


QUESTION = Question("lookup", "how long does a scheduler wait to learn what is there?", measure)
