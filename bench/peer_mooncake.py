"""Mooncake's store beside our daemon: start, existence of keys, put and get of 4 MiB values.

``python -m bench.peer_mooncake [--build] [--json]`` drives the same work through
``mooncake-transfer-engine-non-cuda`` from PyPI and through kvstore, in turn, from one process, on
the same pages of engine memory. Every get is compared byte by byte.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_vllm.pip_environment import PipEnvironment

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, Shape, chunk_shape, finish, tokens
from bench.harness import Bench, Size, interleave, timed
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
    from bench.mooncake_side import MooncakeServer

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LIBRARIES = "; it needs libibverbs1, libnuma1 and libcurl4 (Debian: apt-get install them)"


@dataclass(frozen=True, slots=True)
class _Sizes:
    chunk_bytes: int
    pool_bytes: int
    rounds: int
    lookup_chunks: int
    lookup_rounds: int


_SIZES = {
    Size.FULL: _Sizes(4 << 20, 512 << 20, 12, 512, 200),
    Size.SMALL: _Sizes(1 << 20, 128 << 20, 2, 16, 5),
}


def measure(bench: Bench) -> None:
    """All rows."""
    from bench.mooncake_side import MooncakeServer

    sizes = _SIZES[bench.size]
    log = bench.folder / "master.log"
    starts(bench, PEER, lambda: MooncakeServer(SMALL_POOL_BYTES, log))
    with ExitStack() as stack:
        daemon = stack.enter_context(BenchDaemon(bench.folder, settings(sizes.pool_bytes)))
        server = stack.enter_context(MooncakeServer(sizes.pool_bytes, log))
        _lookups(bench, daemon, server)
        megabytes = sizes.chunk_bytes >> 20
        pages = chunk_shape(CHUNKS * PROMPTS, sizes.chunk_bytes, sizes.chunk_bytes >> 6)
        whole = Shape(CHUNKS * PROMPTS, 1, sizes.chunk_bytes, 1, TOKENS_PER_CHUNK)
        of_pages = f"{CHUNKS} x {megabytes} MiB, pages of {pages.page_bytes >> 10} KiB"
        _moves(bench, (daemon, server), pages, of_pages)
        _moves(bench, (daemon, server), whole, f"{CHUNKS} x {megabytes} MiB, contiguous")


def _lookups(bench: Bench, daemon: BenchDaemon, server: MooncakeServer) -> None:
    """Which of a prompt's chunks are there; both sides have made their keys before."""
    from bench.mooncake_side import MooncakeEngine

    sizes = _SIZES[bench.size]
    shape = Shape(sizes.lookup_chunks, 2, 1024, 4, TOKENS_PER_CHUNK)
    with (
        BenchEngine(daemon.address, "lookup", shape) as ours,
        MooncakeEngine(server, ours) as peer,
    ):
        token_ids = tokens(sizes.lookup_chunks * TOKENS_PER_CHUNK, 1)
        blocks, keys = ours.places(0, sizes.lookup_chunks), ours.worker.keys(token_ids)
        finish(ours.store("fill", keys, blocks))
        peer.store("fill", token_ids, blocks)
        names = peer.keys(token_ids)

        def look_up_ours(_: int) -> float:
            taken_s = timed(lambda: ours.worker.lookup("lookup", keys))
            assert ours.worker.lookup("lookup", keys).chunks == sizes.lookup_chunks
            ours.worker.release("lookup")
            return taken_s

        def look_up_peer(_: int) -> float:
            assert all(one == 1 for one in server.store.batch_is_exist(names))
            return timed(lambda: server.store.batch_is_exist(names))

        sides = {"ours": look_up_ours, "peer": look_up_peer}
        interleave(sides, 5)
        runs = [interleave(sides, sizes.lookup_rounds) for _ in range(bench.runs)]
        versus(bench, PEER, f"lookup of {sizes.lookup_chunks} keys", runs)


def _moves(
    bench: Bench, sides: tuple[BenchDaemon, MooncakeServer], shape: Shape, what: str
) -> None:
    from bench.mooncake_side import MooncakeEngine

    sizes = _SIZES[bench.size]
    daemon, server = sides
    with (
        BenchEngine(daemon.address, what[-10:], shape) as ours,
        MooncakeEngine(server, ours) as peer,
    ):
        moves(bench, PEER, Prompts(ours, peer), sides, (what, sizes.rounds))


def fill(environment: PipEnvironment) -> None:
    """Install Mooncake and what kvstore needs."""
    environment.install(MOONCAKE, *requirements_of_ours())


PEER = Peer(
    name="mooncake",
    title="Mooncake",
    requirement=MOONCAKE,
    module="mooncake.store",
    weight="400 MB, a minute",
    fill=fill,
    libraries=LIBRARIES,
    variables={"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "WARNING"},
    differences=(
        "Mooncake's values lie in the engine's own process, which copies them itself; our daemon "
        "copies, with a thread a core",
        "Mooncake's keys are names that the caller makes up; a prompt's order is unknown to it",
        "neither has a second tier here, and no checksum is made",
    ),
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(main(PEER))
