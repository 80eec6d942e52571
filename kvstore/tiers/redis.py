"""RedisTier: chunks on a Redis or Valkey server, a Sentinel's master or a Cluster; many nodes share
it.

A chunk part of one shard is one value, header and payload together, under a name that holds tenant,
namespace, the fleet's epoch and key (``redis_names``). Nothing is believed before the header, every
field of it and the payload's checksum are verified, so whatever a server, proxy or other writer
does is at worst a miss. Values move on connections that redis-py made and a small lane of ours uses
(``redis_lane``); each server has a bounded pool of them and a circuit breaker (``redis_node``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.registry import codec
from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    InvariantError,
    TierUnavailableError,
)
from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.core.remote_messages import Probe, Probed, RemoteClear, RemoteCleared, RemoteEnter
from kvstore.tiers.base import IOCounter, IOKind, TierIOStats
from kvstore.tiers.redis_errors import AUTH_FAILED
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_node import CONNECTING
from kvstore.tiers.redis_probe import RedisProber
from kvstore.tiers.redis_settings import RedisSettings
from kvstore.tiers.redis_usage import Entry, RedisUsage
from kvstore.tiers.redis_values import ChunkAbsentError, ChunkUnreadableError, RedisValues
from kvstore.tiers.redis_watch import RedisWatch

_log = logging.getLogger(__name__)
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RedisStats(TierIOStats):
    """TierIOStats of a Redis tier, and: ``state`` is "up", "connecting", "closed", "auth failed" or
    "down: why"; ``server`` its kind and version; ``nodes_up`` of ``nodes`` servers work.
    ``raw_bytes`` of chunks were written as ``stored_bytes``; ``connection_waits`` operations waited
    ``connection_wait_s`` for a connection; ``splits`` chunks were cut into pieces; ``evicted`` by
    the limit of a namespace."""

    state: str = ""
    server: str = ""
    server_mode: str = ""
    nodes: int = 0
    nodes_up: int = 0
    codec: str = ""
    raw_bytes: int = 0
    stored_bytes: int = 0
    breaker_openings: int = 0
    connections: int = 0
    connection_waits: int = 0
    connection_wait_s: float = 0.0
    probes: int = 0
    splits: int = 0
    evicted: int = 0


class RedisTier:
    """The tier that nodes share. Thread-safe; every call ends within ``operation_timeout_s`` and a
    ``connect_timeout_s``, and at once while the breakers are open or after ``close``.

    ``report_state`` is told, from any thread, whenever the tier can be used (True) or can't.
    """

    name = TierName.REDIS

    def __init__(self, settings: RedisSettings, report_state: Callable[[bool], None]) -> None:
        self._settings = settings
        self._report_state = report_state
        expiry_ms = int(settings.ttl_s * 1000)
        self._names = RedisNames(settings.prefix)
        self._watch = RedisWatch(settings, self._names, self._node_changed)
        servers = self._servers = self._watch.servers
        self._epochs = self._watch.epochs
        self._prober = RedisProber(servers, self._names, self._epochs)
        self._values = RedisValues(servers, settings.codec, expiry_ms, settings.split_bytes)
        self._usage = RedisUsage(servers, self._names, settings.namespace_bytes, expiry_ms)
        self._counter = IOCounter()
        self._telling = threading.Lock()
        self._is_up = False
        self._counting = threading.Lock()
        self._raw_bytes = self._stored_bytes = self._probes = self._splits = self._evicted = 0

    def open(self) -> None:
        """Connect, in the tier's own thread; returns at once. Raises ConfigError for a codec that
        isn't installed."""
        codec(self._settings.codec, "uint8")
        self._watch.start()

    def close(self) -> None:
        """End the thread and all connections; what runs in other threads ends at once with
        TierUnavailableError. Idempotent."""
        self._watch.close()

    def read(self, place: Place, header: ChunkHeader, out: _Bytes) -> None:
        """Fill ``out`` with the verified payload of ``header`` in the epoch ``place.slab``.

        Raises ChunkCorruptError (absent, too), ChunkForeignError or TierUnavailableError; what
        ``out`` holds is undefined then. What is damaged is deleted, so that it's written anew.
        """
        header = self._at(place, header, out)
        name = self._names.chunk(header)
        with self._operation(IOKind.READ, out.nbytes):
            try:
                self._values.get(name, header, out)
            except (ChunkAbsentError, ChunkUnreadableError):
                raise
            except ChunkCorruptError:
                self._values.forget(name, 0)
                raise

    def write(self, place: Place, header: ChunkHeader, payload: _Bytes) -> None:
        """Put a chunk into the epoch ``place.slab``. Raises CapacityError (the server's memory is
        full) or TierUnavailableError; nothing that a reader believes was written then."""
        header = self._at(place, header, payload)
        name = self._names.chunk(header)
        with self._operation(IOKind.WRITE, payload.nbytes):
            self._epochs.ensure_entered((header.tenant, header.namespace))
            written = self._values.put(name, header, payload)
        with self._counting:
            self._raw_bytes += payload.nbytes
            self._stored_bytes += written.value_bytes
            self._splits += bool(written.pieces)
        if self._settings.namespace_bytes:
            self._limit(header, Entry(name, written))

    def probe(self, probe: Probe) -> Probed:
        """Which of the keys are there, by part and for all shards; an error where nothing can be
        said."""
        with self._counting:
            self._probes += 1
        try:
            return self._prober.run(probe)
        except TierUnavailableError as error:
            return Probed(probe.id, 0, (), str(error))

    def enter(self, enter: RemoteEnter) -> None:
        """Make a namespace known to the fleet. Raises CapacityError or TierUnavailableError; the
        tier's own thread tries it again then, and so does each write."""
        space = (enter.tenant, enter.namespace)
        self._epochs.enter(space, enter.model, enter.alias)

    def clear(self, clear: RemoteClear) -> RemoteCleared:
        """Raise the epoch of each namespace that matches, for the whole fleet."""
        done = 0
        try:
            spaces = self._epochs.matching(clear.tenant, clear.model)
            for space in spaces:
                self._epochs.raise_above(space)
                self._watch.sweep(space)
                done += 1
        except TierUnavailableError as error:
            return RemoteCleared(clear.number, done, str(error))
        return RemoteCleared(clear.number, done)

    def stats(self) -> RedisStats:
        """A snapshot."""
        base = self._counter.stats(self.name.value, self._settings.address.shown)
        nodes = [(node, node.stats()) for node in self._servers.nodes()]
        with self._counting:
            return RedisStats(
                **asdict(base),
                state=self._state(),
                server=self._watch.server,
                server_mode=self._servers.mode.value,
                nodes=len(nodes),
                nodes_up=sum(not stats.reason for _, stats in nodes),
                codec=self._settings.codec,
                raw_bytes=self._raw_bytes,
                stored_bytes=self._stored_bytes,
                breaker_openings=sum(stats.openings for _, stats in nodes),
                connections=sum(stats.lanes for _, stats in nodes),
                connection_waits=sum(stats.waits for _, stats in nodes),
                connection_wait_s=sum(stats.wait_s for _, stats in nodes),
                probes=self._probes,
                splits=self._splits,
                evicted=self._evicted,
            )

    def _state(self) -> str:
        if self._watch.is_closed:
            return "closed"
        nodes = self._servers.nodes()
        if any(node.is_up for node in nodes):
            return "up"
        reasons = [*(node.stats().reason for node in nodes), self._servers.reason]
        reason = next(filter(None, reasons), "")
        if AUTH_FAILED in reason:
            return AUTH_FAILED
        return "connecting" if reason in ("", CONNECTING) else f"down: {reason}"

    def _node_changed(self) -> None:
        """A node went up or down. Told in order, and each change once."""
        with self._telling:
            is_up = any(node.is_up for node in self._servers.nodes())
            if self._watch.is_closed:
                is_up = False
            changed, self._is_up = is_up != self._is_up, is_up
            if changed:
                state = self._state()
                _log.log(logging.INFO if is_up else logging.WARNING, "redis: %s", state)
                self._report_state(is_up)

    def _limit(self, header: ChunkHeader, entry: Entry) -> None:
        space = (header.tenant, header.namespace)
        try:
            evicted = self._usage.added(space, header.epoch, header.depth, entry)
        except (CapacityError, TierUnavailableError) as error:
            _log.debug("redis: a chunk isn't counted: %s", error)
            return
        with self._counting:
            self._evicted += evicted

    def _at(self, place: Place, header: ChunkHeader, payload: _Bytes) -> ChunkHeader:
        """The header as it stands in the fleet; checks the caller's side of the bargain."""
        if place.tier is not TierName.REDIS or place.slab < 0:
            raise InvariantError(f"redis: {place} lies in another tier")
        if payload.nbytes != header.payload_bytes or not payload.nbytes:
            raise InvariantError(
                f"redis: {payload.nbytes} bytes for a chunk of {header.payload_bytes}"
            )
        return replace(header, epoch=place.slab)

    @contextmanager
    def _operation(self, kind: IOKind, nbytes: int) -> Iterator[None]:
        """Times and counts one operation."""
        start_s = time.perf_counter()
        self._counter.begin()
        try:
            yield
        except TierUnavailableError as error:
            self._counter.refuse(kind, str(error))
            raise
        except (ChunkCorruptError, CapacityError):
            self._counter.fail()
            raise
        finally:
            self._counter.end()
        self._counter.add(kind, nbytes, time.perf_counter() - start_s)
