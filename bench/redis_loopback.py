"""What the machine's loopback moves without any Redis: the same bytes between two processes.

The other process has a thread and a buffer for each connection and does nothing but ``recv_into``
and ``sendall``; a server does that and more, in one thread. No client of a server on this machine
can be faster than this.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from bench.redis_sides import Slots

_PUT, _GET = b"P", b"G"


class LoopbackValues:
    """A side of the benchmark. ``close`` it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        nbytes = slots.slots[0].nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.redis_loopback", str(nbytes)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in slots.slots]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, n: int) -> None:
        sock = self._sockets[n]
        sock.sendall(_PUT)
        sock.sendall(self._slots.slots[n].data)
        assert sock.recv(1) == _PUT

    def get(self, n: int) -> None:
        self._sockets[n].sendall(_GET)
        _fill(self._sockets[n], self._slots.slots[n].data)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve(nbytes: int, told: Callable[[int], None]) -> None:
    """Take and give values of so many bytes until killed; ``told`` gets the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told(listener.getsockname()[1])
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer, args=(sock, nbytes), daemon=True).start()


def _answer(sock: socket.socket, nbytes: int) -> None:
    value = memoryview(bytearray(nbytes))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        while wanted := sock.recv(1):
            if wanted == _GET:
                sock.sendall(value)
                continue
            _fill(sock, value)
            sock.sendall(_PUT)


def _fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        done += sock.recv_into(view[done:])


if __name__ == "__main__":
    serve(int(sys.argv[1]), lambda port: print(port, flush=True))
