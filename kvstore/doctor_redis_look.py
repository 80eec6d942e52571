"""What the doctor sees of one Redis server: its own account of itself, round trips, and a chunk
that goes there and comes back. ``doctor_redis`` says what that means.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CapacityError, KVStoreError, TierUnavailableError
from kvstore.tiers.redis_lane import Lane, Reply
from kvstore.tiers.redis_node import RedisNode
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_wire import Views

CHUNK_BYTES = 4 << 20
TRIES = 5
PINGS = 200
EXPIRY_MS = 60_000

Info = dict[str, str]


@dataclass(slots=True)
class Looked:
    """What was seen of one server. ``error`` is empty where it could be used."""

    address: str
    error: str = ""
    info: Info = field(default_factory=dict)
    cluster: Info = field(default_factory=dict)
    ping_s: list[float] = field(default_factory=list)
    set_s: float = 0.0
    get_s: float = 0.0
    refused: str = ""
    wrong: bool = False

    def number(self, name: str) -> int:
        """A figure of INFO; 0 where there is none."""
        text = self.info.get(name, "")
        return int(text) if text.isdigit() else 0


def look(servers: RedisServers, node: RedisNode, prefix: str) -> Looked:
    """Look at a server; never raises."""
    looked = Looked(node.address)
    node.check(lambda lane: _ask(lane, looked))
    reason = node.stats().reason
    if reason:
        looked.error = reason
        return looked
    try:
        _try_chunk(servers, node, prefix, looked)
    except CapacityError:
        looked.refused = "its memory is full"
    except KVStoreError as error:
        looked.refused = plain(error)
    return looked


def _ask(lane: Lane, looked: Looked) -> None:
    """INFO and round trips. Raises ReplyError or OSError."""
    looked.info = _fields(lane.call([(b"INFO",)])[0])
    if looked.info.get("cluster_enabled") == "1":
        looked.cluster = _fields(lane.ask((b"CLUSTER", b"INFO")))
    for _ in range(PINGS):
        started_s = time.perf_counter()
        lane.begin()
        lane.ask((b"PING",))
        looked.ping_s.append(time.perf_counter() - started_s)


def _try_chunk(servers: RedisServers, node: RedisNode, prefix: str, looked: Looked) -> None:
    """The best of some SETs and GETs of one value, and that it comes back as it was."""
    name = next((n for n in _names(prefix) if _holds(servers, node, n)), None)
    if name is None:
        looked.refused = "it holds no slots"
        return
    value = np.random.default_rng().integers(0, 256, CHUNK_BYTES, np.uint8)
    out = np.zeros(CHUNK_BYTES, np.uint8)
    landing = _Whole(out)
    try:
        looked.set_s = _best(
            lambda: servers.run(name, lambda lane: lane.set(name, [value.data], EXPIRY_MS))
        )
        looked.get_s = _best(lambda: servers.run(name, lambda lane: lane.get(name, landing)))
    finally:
        servers.run(name, lambda lane: lane.ask((b"UNLINK", name)))
    looked.wrong = not np.array_equal(value, out)


def _names(prefix: str) -> Iterator[bytes]:
    unique = os.urandom(8).hex()
    return (f"{prefix}:doctor:{unique}:{number}".encode() for number in range(1000))


def _holds(servers: RedisServers, node: RedisNode, name: bytes) -> bool:
    try:
        return servers.holder(name) is node
    except TierUnavailableError:
        return False


def _best(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(TRIES):
        started_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_s)
    return min(taken)


class _Whole:
    """Takes a value of exactly the right length."""

    def __init__(self, out: NDArray[np.uint8]) -> None:
        self._out = out

    def place(self, nbytes: int) -> Views:
        """Where it lands. Raises TierUnavailableError for another length."""
        if nbytes != self._out.nbytes:
            raise TierUnavailableError(f"redis: a value of {nbytes} bytes came back")
        return [self._out.data]

    def landed(self, view: memoryview) -> None:
        """Nothing to do."""


def plain(error: Exception) -> str:
    """An error's text for the table."""
    return str(error).removeprefix("redis: ")


def _fields(reply: Reply) -> Info:
    if not isinstance(reply, bytes):
        return {}
    lines = reply.decode("utf-8", "replace").splitlines()
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    return {name: value.strip() for name, value in pairs}
