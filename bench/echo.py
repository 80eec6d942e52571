"""Echo: the least that a round trip through a Unix socket costs two Python processes.

``python -m bench.echo serve PATH`` answers each frame (length and bytes, as on the engine link)
with as many bytes as the frame's first four bytes after the length ask for. Blocking sockets, no
event loop, no parsing. ``python -m bench.echo ping PATH PACE_S`` asks at a pace until its standard
input ends and then prints the seconds of each call as JSON: the control beside our figures.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_HEAD = struct.Struct("<II")
CONTROL_BYTES = 64
_WARM_UP = 20


def serve(path: str) -> None:
    """Answer one client after the other until killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            peer, _ = listener.accept()
            with peer:
                _answer(peer)


def _answer(peer: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    while True:
        have = 0
        need = _HEAD.size
        while have < need:
            count = peer.recv_into(view[have:])
            if not count:
                return
            have += count
            if have >= _HEAD.size:
                length, reply_bytes = _HEAD.unpack_from(buffer)
                need = 4 + length
        peer.sendall(view[:reply_bytes])


class EchoClient:
    """A connection to an echo server that sends frames of one size. A context manager."""

    def __init__(self, path: str, request_bytes: int, reply_bytes: int) -> None:
        self._path = path
        self._request = _HEAD.pack(request_bytes - 4, reply_bytes).ljust(request_bytes, b"k")
        self._reply = memoryview(bytearray(reply_bytes))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> EchoClient:
        self._socket.connect(self._path)
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def call(self) -> float:
        """One round trip; its seconds."""
        started_s = time.perf_counter()
        self._socket.sendall(self._request)
        have = 0
        while have < len(self._reply):
            have += self._socket.recv_into(self._reply[have:])
        return time.perf_counter() - started_s


class EchoServer:
    """A process that answers echoes at ``path``. A context manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> EchoServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo", "serve", self.path],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the echo server didn't start"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def ping(path: str, pace_s: float) -> None:
    """Call at a pace until standard input ends; print the seconds of each call."""
    seconds = []
    with EchoClient(path, CONTROL_BYTES, CONTROL_BYTES) as client:
        for _ in range(_WARM_UP):
            client.call()
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], pace_s)[0]:
            seconds.append(client.call())
    print(json.dumps(seconds))


if __name__ == "__main__":
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the parent may be kept on one core
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        ping(sys.argv[2], float(sys.argv[3]))
