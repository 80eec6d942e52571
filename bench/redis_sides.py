"""Sides that put values into a Redis server and get them back: our tier, a raw loop, redis-py.

All move the same values, header and payload, under names of their own, by as many threads with a
connection each. The raw loop is what a socket can do: the same commands by ``sendmsg`` and
``recv_into``, into the same kind of slot, and nothing is verified. redis-py is given each value as
one buffer; what it returns is copied into the slot, where ours ends, too.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import redis
from numpy.typing import NDArray

from bench.harness import timed
from kvstore.codecs.base import HEADER_BYTES
from kvstore.core.messages import Place, TierName
from kvstore.core.remote_messages import Probe
from kvstore.testing.samples import pattern, sample_header
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_settings import RedisSettings
from tests.redis_rig import wait_until

WAIT_S = 60.0

Bytes = NDArray[np.uint8]


class Values(Protocol):
    """One side. Thread ``n`` has slot ``n``; a slot is header and payload."""

    def put(self, n: int) -> None:
        """Write the value of slot n."""

    def get(self, n: int) -> None:
        """Fill slot n."""


class Slots:
    """A slot a thread: header and payload, touched."""

    def __init__(self, threads: int, payload_bytes: int) -> None:
        self.threads = threads
        self.payload_bytes = payload_bytes
        whole = np.zeros((threads, HEADER_BYTES + payload_bytes), np.uint8)
        self.slots: list[Bytes] = list(whole)
        self._expected = [pattern(n, payload_bytes) for n in range(threads)]

    def payload(self, n: int) -> Bytes:
        """The payload of slot n."""
        return self.slots[n][HEADER_BYTES:]

    def fill(self) -> None:
        """Give every slot its bytes."""
        for n in range(self.threads):
            self.payload(n)[:] = self._expected[n]

    def forget(self) -> None:
        """Overwrite them."""
        for n in range(self.threads):
            self.payload(n)[:] = 0

    def check(self) -> None:
        """Raise AssertionError unless every slot has its bytes."""
        for n in range(self.threads):
            assert np.array_equal(self.payload(n), self._expected[n]), "wrong bytes came back"


class TierValues:
    """Our tier. ``close`` it."""

    def __init__(self, url: str, slots: Slots) -> None:
        self._slots = slots
        up = threading.Event()
        settings = RedisSettings(
            url, operation_timeout_s=WAIT_S, connections=slots.threads, split_bytes=128 << 20
        )
        self.tier = RedisTier(settings, lambda is_up: up.set())
        self.tier.open()
        assert up.wait(WAIT_S), self.tier.stats().state
        wait_until(lambda: (s := self.tier.stats()).nodes_up == s.nodes, "all servers are up")
        self._headers = [sample_header(n + 1, slots.payload_bytes) for n in range(slots.threads)]
        first = self._headers[0]
        probe = Probe(1, first.tenant, first.namespace, first.key, (0,), (first.part,))
        probed = self.tier.probe(probe)
        assert not probed.error, probed.error
        self.place = Place(TierName.REDIS, probed.epoch, 0, 0)

    def put(self, n: int) -> None:
        self.tier.write(self.place, self._headers[n], self._slots.payload(n))

    def get(self, n: int) -> None:
        self.tier.read(self.place, self._headers[n], self._slots.payload(n))

    def close(self) -> None:
        self.tier.close()


class RawValues:
    """A loop over sockets. ``close`` it."""

    def __init__(self, port: int, slots: Slots) -> None:
        self._slots = slots
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in slots.slots]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, n: int) -> None:
        name, value = b"raw%d" % n, self._slots.slots[n].data
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, value.nbytes)
        left = [memoryview(head), value, memoryview(b"\r\n")]
        while left:
            done = self._sockets[n].sendmsg(left)
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if done:
                left[0] = left[0][done:]
        assert self._sockets[n].recv(64) == b"+OK\r\n"

    def get(self, n: int) -> None:
        sock, name, slot = self._sockets[n], b"raw%d" % n, self._slots.slots[n].data
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        line, _, rest = sock.recv(HEADER_BYTES).partition(b"\r\n")
        assert int(line[1:]) == slot.nbytes, line
        slot[: len(rest)] = rest
        done = len(rest)
        while done < slot.nbytes:
            done += sock.recv_into(slot[done:])
        assert sock.recv(2, socket.MSG_WAITALL) == b"\r\n"

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class ClientValues:
    """Plain redis-py with hiredis. ``close`` it."""

    def __init__(self, port: int, slots: Slots) -> None:
        self._slots = slots
        self._clients = [redis.Redis(host="127.0.0.1", port=port) for _ in slots.slots]

    def put(self, n: int) -> None:
        assert self._clients[n].set(b"py%d" % n, self._slots.slots[n].data)

    def get(self, n: int) -> None:
        value = self._clients[n].get(b"py%d" % n)
        assert isinstance(value, bytes)
        np.copyto(self._slots.slots[n], np.frombuffer(value, np.uint8))

    def close(self) -> None:
        for client in self._clients:
            client.close()


class Rounds:
    """Does a side's work by threads that live on: each moves its value so many times."""

    def __init__(self, threads: int, times: int) -> None:
        self._threads = threads
        self._times = times
        self._pool = ThreadPoolExecutor(threads)

    def side(self, work: Callable[[int], None]) -> Callable[[int], float]:
        """The seconds until all threads are through."""
        return lambda number: timed(lambda: self._all(work))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _all(self, work: Callable[[int], None]) -> None:
        def several(n: int) -> None:
            for _ in range(self._times):
                work(n)

        list(self._pool.map(several, range(self._threads)))
