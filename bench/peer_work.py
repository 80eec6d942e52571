"""The work that our daemon and a peer both do, each on the same pages of engine memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bench.daemon import BenchDaemon
from bench.engine import BenchEngine, finish, tokens
from bench.harness import Bench, interleave, number, p50, timed
from bench.peer import Peer, PeerServer, versus
from kvstore import Client

CHUNKS = 8
"""Of a prompt that is stored and retrieved."""
TOKENS_PER_CHUNK = 256
SMALL_POOL_BYTES = 64 << 20
PROMPTS = 6
"""Prompts in the engine's memory."""
_SETTLED_S = 0.5


class PeerEngine(Protocol):
    """An engine's calls to a peer. Each raises AssertionError unless all of it was done; a request
    is named anew each time."""

    def store(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Store the whole chunks of a prompt from these blocks."""

    def lookup(self, request: str, token_ids: list[int]) -> int:
        """The tokens that can be retrieved; what must come before a retrieve."""

    def retrieve(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Retrieve what a lookup found into these blocks."""

    def end(self, request: str) -> None:
        """The request is over."""


class Prompts:
    """Both sides' stores and retrieves on the same engine memory: ``PROMPTS`` prompts of eight
    chunks; a round's two sides use different ones."""

    def __init__(self, ours: BenchEngine, peer: PeerEngine) -> None:
        self._ours = ours
        self._peer = peer
        self._places = [ours.places(n * CHUNKS, CHUNKS) for n in range(PROMPTS)]
        self._token_ids: dict[tuple[str, int], list[int]] = {}
        self._named = 0

    def fill(self) -> None:
        """Give every prompt its bytes."""
        for prompt, places in enumerate(self._places):
            self._ours.fill(places, prompt * CHUNKS)

    def store_ours(self, number: int) -> float:
        """Store one prompt under tokens that nobody has seen; its seconds."""
        prompt, name = self._next("ours", number)
        keys = self._ours.worker.keys(self._token_ids["ours", prompt])
        return timed(lambda: finish(self._ours.store(name, keys, self._places[prompt])))

    def store_peer(self, number: int) -> float:
        """The same."""
        prompt, name = self._next("peer", number)
        token_ids = self._token_ids["peer", prompt]
        taken_s = timed(lambda: self._peer.store(name, token_ids, self._places[prompt]))
        self._peer.end(name)
        return taken_s

    def retrieve_ours(self, number: int) -> float:
        """Retrieve one prompt to where another one lay, and compare every byte; its seconds."""
        prompt = number % PROMPTS
        keys = self._ours.worker.keys(self._token_ids["ours", prompt])
        hit = self._ours.worker.lookup("retrieve", keys)
        assert hit.chunks == CHUNKS, hit
        taken_s = self._into_another(
            prompt, lambda places: finish(self._ours.retrieve("retrieve", keys, places))
        )
        self._ours.worker.release("retrieve")
        return taken_s

    def retrieve_peer(self, number: int) -> float:
        """The same."""
        prompt = (number + PROMPTS // 2) % PROMPTS
        self._named += 1
        name, token_ids = f"retrieve{self._named}", self._token_ids["peer", prompt]
        hit = self._peer.lookup(name, token_ids)
        assert hit == CHUNKS * TOKENS_PER_CHUNK, hit
        taken_s = self._into_another(
            prompt, lambda places: self._peer.retrieve(name, token_ids, places)
        )
        self._peer.end(name)
        return taken_s

    def _into_another(self, prompt: int, retrieve: Callable[[list[int]], None]) -> float:
        place = (prompt + 1) % PROMPTS
        places = self._places[place]
        taken_s = timed(lambda: retrieve(places))
        self._ours.check(places, prompt * CHUNKS)
        self._ours.fill(places, place * CHUNKS)
        return taken_s

    def _next(self, side: str, number: int) -> tuple[int, str]:
        self._named += 1
        prompt = (number + (PROMPTS // 2 if side == "peer" else 0)) % PROMPTS
        self._token_ids[side, prompt] = tokens(CHUNKS * TOKENS_PER_CHUNK, 1000 + self._named)
        return prompt, f"store{self._named}"


def starts(bench: Bench, peer: Peer, start: Callable[[], PeerServer]) -> None:
    """Rows: from the command to the first answer, and the memory that the process then has."""
    resident: dict[str, list[float]] = {"ours": [], "peer": []}

    def ours(_: int) -> float:
        started_s = time.perf_counter()
        with (
            BenchDaemon(bench.folder, settings(SMALL_POOL_BYTES)) as daemon,
            Client(daemon.address) as client,
        ):
            client.attach("first")
            taken_s = time.perf_counter() - started_s
            resident["ours"].append(_resident_mib(daemon.running.pid))
        return taken_s

    def theirs(_: int) -> float:
        with start() as server:
            resident["peer"].append(_resident_mib(server.process.pid))
            return server.healthy_s

    runs = [interleave({"ours": ours, "peer": theirs}, 1) for _ in range(bench.runs)]
    versus(bench, peer, "start to the first answer", runs)
    ratios = [b / a for a, b in zip(resident["ours"], resident["peer"], strict=True)]
    bench.row(
        "memory of the idle server", "x", ratios,
        beside=f"kvstore {number(p50(resident['ours']))} MiB, {SMALL_POOL_BYTES >> 20} of them its "
               f"pool; {peer.title} {number(p50(resident['peer']))} MiB without its pool",
    )  # fmt: skip


def moves(
    bench: Bench,
    peer: Peer,
    prompts: Prompts,
    servers: tuple[BenchDaemon, PeerServer],
    sizes: tuple[str, int],
) -> None:
    """Rows: stores and retrieves, in turn, both pools cleared before each run and their places
    written before the first. ``sizes``: what to call a prompt, and the rounds of a run."""
    what, rounds = sizes
    count = max(rounds, PROMPTS)
    prompts.fill()
    stores = {"ours": prompts.store_ours, "peer": prompts.store_peer}
    retrieves = {"ours": prompts.retrieve_ours, "peer": prompts.retrieve_peer}
    interleave(stores, count)
    stored, retrieved = [], []
    for _ in range(bench.runs):
        _clear(servers)
        stored.append(interleave(stores, count))
        interleave(retrieves, 1)
        retrieved.append(interleave(retrieves, rounds))
    _clear(servers)
    versus(bench, peer, f"store of {what}", stored)
    versus(bench, peer, f"retrieve of {what}", retrieved)


def settings(pool_bytes: int) -> dict[str, str]:
    """Of our daemon: a pool, no second tier, as many copy threads as the peer has cores."""
    return {
        "KVSTORE_HOST_SIZE": str(pool_bytes),
        "KVSTORE_HOST_SLAB_SIZE": str(max(pool_bytes // 16, 8 << 20)),
        "KVSTORE_NVME_SIZE": "off",
        "KVSTORE_THREADS_COPY": str(os.cpu_count()),
    }


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _clear(servers: tuple[BenchDaemon, PeerServer]) -> None:
    daemon, server = servers
    cleared = daemon.running.kvstore("clear", "--all", "--yes")
    assert cleared.returncode == 0, cleared.stderr
    server.clear()


def _resident_mib(pid: int) -> float:
    """A process's resident memory once it has settled, without shared memory."""
    time.sleep(_SETTLED_S)
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024
