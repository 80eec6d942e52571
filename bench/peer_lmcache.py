"""LMCache's multiprocess server beside our daemon: start, lookup, store and retrieve.

``python -m bench.peer_lmcache [--build] [--json]`` drives the same work through ``lmcache`` from
PyPI and through kvstore, in turn, from one process, on the same pages of engine memory. Lookups
begin with a list of tokens on both sides. Every retrieve is compared byte by byte.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_vllm.environment import TORCH
from kvstore_vllm.pip_environment import PipEnvironment

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Shape, chunk_shape, finish, tokens
from bench.harness import Bench, Size, interleave
from bench.peer import Peer, main, requirements_of_ours, versus
from bench.peer_work import (
    CHUNKS,
    PROMPTS,
    SMALL_POOL_BYTES,
    TOKENS_PER_CHUNK,
    Prompts,
    moves,
    settings,
    starts,
)

if TYPE_CHECKING:
    from bench.lmcache_side import LMCacheEngine, LMCacheServer

LMCACHE = "lmcache==0.5.6"
LEFT_OUT = ("torch", "cuda-python", "cufile-python", "cupy-cuda13x")
"""Requirements of lmcache that a CPU doesn't need."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    chunk_bytes: int
    pool_bytes: int
    rounds: int
    short_tokens: int
    long_tokens: int
    short_rounds: int
    long_rounds: int


_SIZES = {
    Size.FULL: _Sizes(4 << 20, 512 << 20, 12, 1024, 131_072, 40, 12),
    Size.SMALL: _Sizes(1 << 20, 128 << 20, 2, 1024, 4096, 3, 2),
}


def measure(bench: Bench) -> None:
    """All rows."""
    from bench.lmcache_side import LMCacheServer

    sizes = _SIZES[bench.size]
    starts(bench, PEER, lambda: LMCacheServer(SMALL_POOL_BYTES, TOKENS_PER_CHUNK))
    with ExitStack() as stack:
        daemon = stack.enter_context(BenchDaemon(bench.folder, settings(sizes.pool_bytes)))
        server = stack.enter_context(LMCacheServer(sizes.pool_bytes, TOKENS_PER_CHUNK))
        _lookups(bench, daemon, server)
        _moves(bench, daemon, server)


def _lookups(bench: Bench, daemon: BenchDaemon, server: LMCacheServer) -> None:
    """Lookups of a short and a long prompt that is all there."""
    from bench.lmcache_side import LMCacheEngine

    sizes = _SIZES[bench.size]
    shape = Shape(sizes.long_tokens // TOKENS_PER_CHUNK, 2, 1024, 4, TOKENS_PER_CHUNK)
    with (
        BenchEngine(daemon.address, "lookup", shape) as ours,
        LMCacheEngine(server, ours, "lookup") as peer,
    ):
        for count, rounds in (
            (sizes.short_tokens, sizes.short_rounds),
            (sizes.long_tokens, sizes.long_rounds),
        ):
            token_ids = tokens(count, count)
            blocks = ours.places(0, count // TOKENS_PER_CHUNK)
            finish(ours.store("fill", ours.worker.keys(token_ids), blocks))
            peer.store(f"fill{count}", token_ids, blocks)
            peer.end(f"fill{count}")
            calls = Lookups(ours, peer, token_ids)
            interleave({"ours": calls.ours, "peer": calls.peer}, 2)
            runs = [
                interleave({"ours": calls.ours, "peer": calls.peer}, rounds)
                for _ in range(bench.runs)
            ]
            versus(bench, PEER, f"lookup of {count:,} tokens", runs)


class Lookups:
    """Both sides' lookups of one prompt, from its list of tokens."""

    def __init__(self, ours: BenchEngine, peer: LMCacheEngine, token_ids: list[int]) -> None:
        self._ours = ours
        self._peer = peer
        self._token_ids = token_ids
        self._asked = 0

    def ours(self, _: int) -> float:
        """One lookup, its keys included; its seconds. Raises AssertionError unless all is there."""
        worker = self._ours.worker
        started_s = time.perf_counter()
        hit = worker.lookup("lookup", worker.keys(self._token_ids))
        taken_s = time.perf_counter() - started_s
        assert hit.tokens == len(self._token_ids) - 1, hit
        worker.release("lookup")
        return taken_s

    def peer(self, _: int) -> float:
        """The same."""
        self._asked += 1
        name = f"lookup{len(self._token_ids)}-{self._asked}"
        started_s = time.perf_counter()
        hit = self._peer.lookup(name, self._token_ids)
        taken_s = time.perf_counter() - started_s
        assert hit == len(self._token_ids) - 1, hit
        self._peer.unlock(name, self._token_ids, hit)
        return taken_s


def _moves(bench: Bench, daemon: BenchDaemon, server: LMCacheServer) -> None:
    from bench.lmcache_side import LMCacheEngine

    sizes = _SIZES[bench.size]
    shape = chunk_shape(CHUNKS * PROMPTS, sizes.chunk_bytes, sizes.chunk_bytes >> 6)
    what = f"{CHUNKS} x {sizes.chunk_bytes >> 20} MiB, pages of {shape.page_bytes >> 10} KiB"
    with (
        BenchEngine(daemon.address, "moves", shape) as ours,
        LMCacheEngine(server, ours, "moves") as peer,
    ):
        prompts = Prompts(ours, peer)
        moves(bench, PEER, prompts, (daemon, server), (what, sizes.rounds))


def fill(environment: PipEnvironment) -> None:
    """Install LMCache for a CPU, and what kvstore needs."""
    environment.install(TORCH)
    environment.install("--no-deps", LMCACHE)
    needed = environment.requirements("lmcache", LEFT_OUT)
    environment.install(TORCH, *needed, *requirements_of_ours())


PEER = Peer(
    name="lmcache",
    title="LMCache",
    requirement=LMCACHE,
    module="lmcache.v1.multiprocess.transport.factory",
    weight="1.7 GB with the CPU build of PyTorch, some minutes",
    fill=fill,
    libraries="",
    variables={
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    },
    differences=(
        "on a CPU LMCache's engine copies into the server's shared memory itself, with PyTorch's "
        "threads; our daemon copies, with its own threads; both may use one a core",
        "LMCache's server hashes the tokens, our client does; both begin with a list",
        "LMCache's calls are those of its vLLM connector, but a reply is waited for where vLLM "
        "polls once a step",
        "neither has a second tier here, and no checksum is made",
    ),
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(main(PEER))
