"""A server that speaks Redis's protocol well enough for the tier, until it is told to lie: then
what it replies is damaged, half of it is missing, or it's the answer to another question."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import TypeAlias

from kvstore.tiers.redis_driver import hiredis
from tests.fuzz.mutate import LARGE, mangle

Raw: TypeAlias = bytes
_ODD = (
    b"", b"$-1\r\n", b"*-1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-OOM full\r\n", b":1\r\n",
    b":-5\r\n", b"(" + b"9" * 5000 + b"\r\n", b"%1\r\n*0\r\n:1\r\n",
    b"-MOVED 1 127.0.0.1:99999\r\n", b"-MOVED 99999 x\r\n", b"-ASK 7 [::1]:1\r\n", b"-LOADING\r\n",
    b"-WRONGTYPE is a hash\r\n", b"-READONLY\r\n", b"*0\r\n", b"*2147483647\r\n", b"*1\r\n" * 50,
    b"$999999999999\r\n", b"$99999999999999999999\r\nx",
    b"~1\r\n%0\r\n", b">2\r\n+a\r\n+b\r\n", b"#t\r\n", b",nan\r\n", b"_\r\n", b"-" + b"x" * 9000,
)  # fmt: skip


class LyingServer:
    """One server on a loopback port, with all connections to it. ``lies`` is the chance that a
    reply is no honest one; ``values`` is what it keeps."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.registry: dict[bytes, bytes] = {}
        self.lies = 0.0
        self.rng = random.Random(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> LyingServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
            self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        reader = hiredis.Reader()
        with peer, suppress(OSError):
            while data := peer.recv(1 << 16):
                reader.feed(data)
                while (command := reader.gets()) is not False:
                    reply = self._reply(command)
                    rare = 0.1 if command[0] in (b"CLIENT", b"SELECT", b"PING") else 1.0
                    lies = self.rng.random() < self.lies * rare
                    reply = self._lie(reply) if lies else reply
                    peer.sendall(reply)
                    if lies and self.rng.random() < 0.97:
                        return

    def _lie(self, reply: Raw) -> Raw:
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice(_ODD)
        if kind == 1:
            return mangle(rng, reply)
        if kind == 2:
            return _bulk(rng.choice((b"9" * 5000, b"-1", b"[" * 100_000, b"\xff" * 40, b"x" * 200)))
        if kind == 3:
            return _bulk(rng.choice([*self.values.values(), b"1"]))
        if kind == 4:
            return b":%d\r\n" % rng.choice(LARGE)
        return reply + rng.choice((b"+OK\r\n", b"\r\n", b"$1\r\nx\r\n"))

    def _reply(self, words: list[bytes]) -> Raw:
        """The honest answer."""
        verb, names = words[0].upper(), words[1:]
        if verb == b"GET":
            found = self.values.get(names[0])
            return b"$-1\r\n" if found is None else _bulk(found)
        if verb == b"SET":
            if b"NX" not in names or names[0] not in self.values:
                self.values[names[0]] = names[1]
            return b"+OK\r\n"
        if verb == b"INCRBY":
            number = int(self.values.get(names[0], b"0")) + int(names[1])
            self.values[names[0]] = b"%d" % number
            return b":%d\r\n" % number
        if verb == b"HSET":
            self.registry.update(zip(names[1::2], names[2::2], strict=True))
            return b":1\r\n"
        if verb in (b"EXISTS", b"UNLINK"):
            there = names[0] in self.values
            if verb == b"UNLINK":
                self.values.pop(names[0], None)
            return b":%d\r\n" % there
        return self._whole(verb)

    def _whole(self, verb: bytes) -> Raw:
        """What isn't about one value."""
        if verb == b"HGETALL":
            return _array([_bulk(word) for pair in self.registry.items() for word in pair])
        if verb == b"SCAN":
            return _array([_bulk(b"0"), _array(list(map(_bulk, self.values)))])
        if verb == b"INFO":
            return _bulk(b"redis_version:7.2.4\r\n")
        if verb == b"CLUSTER":
            node = _array([_bulk(b"127.0.0.1"), b":%d\r\n" % self.port, _bulk(b"id")])
            return _array([_array([b":0\r\n", b":16383\r\n", node])])
        if verb == b"SENTINEL":
            return _array([_bulk(b"127.0.0.1"), _bulk(b"%d" % self.port)])
        if verb == b"ZPOPMIN":
            return b"*0\r\n"
        return b":%d\r\n" % len(self.registry) if verb in (b"HLEN", b"ZADD") else b"+OK\r\n"


def _bulk(data: bytes) -> Raw:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _array(items: list[bytes]) -> Raw:
    return b"*%d\r\n%s" % (len(items), b"".join(items))
