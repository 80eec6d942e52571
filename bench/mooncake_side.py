"""Mooncake's master and its store, which lives in the engine's own process.

Runs in the environment that bench/peer_mooncake.py builds. Values lie in a segment of this process;
the master only knows where. Keys are the caller's.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import mooncake
from mooncake.store import MooncakeDistributedStore

from bench.engine import BenchEngine
from bench.peer import PeerServer
from bench.peer_work import free_ports

WAIT_S = 60.0
_BUFFER_BYTES = 16 << 20
_POLL_S = 0.005


class MooncakeServer(PeerServer):
    """``mooncake_master`` and a store in this process with a segment of ``pool_bytes``."""

    def __init__(self, pool_bytes: int, log: Path) -> None:
        self._pool_bytes = pool_bytes
        self._log = log
        self._port, metrics_port = free_ports(2)
        self.store = MooncakeDistributedStore()
        super().__init__([
            str(Path(mooncake.__file__).parent / "mooncake_master"),
            "-rpc_address=127.0.0.1", f"-rpc_port={self._port}",
            "-metrics_host=127.0.0.1", f"-metrics_port={metrics_port}",
        ])  # fmt: skip

    def close(self) -> None:
        """End the store, then the master."""
        self.store.close()
        super().close()

    def clear(self) -> None:
        """Forget everything."""
        self.store.remove_all(force=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def _wait(self) -> None:
        self._listening()
        status = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", self._pool_bytes, _BUFFER_BYTES, "tcp", "",
            f"127.0.0.1:{self._port}",
        )  # fmt: skip
        assert status == 0, f"setup gave {status}"
        assert self.store.is_exist("nothing") == 0

    def _listening(self) -> None:
        until_s = time.monotonic() + WAIT_S
        while True:
            said = self._log.read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < until_s, f"the master didn't listen in {WAIT_S:g} s"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(_POLL_S)


class MooncakeEngine:
    """An engine's puts and gets, from and into the pages of one of ours. A context manager."""

    def __init__(self, server: MooncakeServer, ours: BenchEngine) -> None:
        self._store = server.store
        self._ours = ours
        self._address = ours.pages.ctypes.data

    def __enter__(self) -> MooncakeEngine:
        status = self._store.register_buffer(self._address, self._ours.pages.nbytes)
        assert status == 0, f"register_buffer gave {status}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.unregister_buffer(self._address)

    def store(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Put a value for each chunk; raises AssertionError unless all were put."""
        keys, (pointers, sizes) = self.keys(token_ids), self._pages(blocks)
        if len(pointers[0]) == 1:
            done = self._store.batch_put_from(keys, [p[0] for p in pointers], [s[0] for s in sizes])
        else:
            done = self._store.batch_put_from_multi_buffers(keys, pointers, sizes)
        assert not any(done), f"Mooncake didn't put it: {done}"

    def lookup(self, request: str, token_ids: list[int]) -> int:
        """The tokens of the leading chunks that are there."""
        found = self._store.batch_is_exist(self.keys(token_ids))
        missing = next((n for n, one in enumerate(found) if one != 1), len(found))
        return missing * self._ours.shape.tokens_per_chunk

    def retrieve(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Get every chunk's value; raises AssertionError unless all came whole."""
        keys, (pointers, sizes) = self.keys(token_ids), self._pages(blocks)
        if len(pointers[0]) == 1:
            done = self._store.batch_get_into(keys, [p[0] for p in pointers], [s[0] for s in sizes])
        else:
            done = self._store.batch_get_into_multi_buffers(keys, pointers, sizes)
        assert all(one == self._ours.shape.chunk_bytes for one in done), f"Mooncake gave {done}"

    def end(self, request: str) -> None:
        """Nothing is kept for a request."""

    def keys(self, token_ids: list[int]) -> list[str]:
        """A name for each chunk that no other prompt has."""
        prompt = "-".join(str(token) for token in token_ids[:4])
        count = len(token_ids) // self._ours.shape.tokens_per_chunk
        return [f"{prompt}/{n}" for n in range(count)]

    def _pages(self, blocks: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of each chunk's pages, in the order in which ours takes them."""
        shape = self._ours.shape
        pointers = []
        for first in range(0, len(blocks), shape.blocks_per_chunk):
            chunk = blocks[first : first + shape.blocks_per_chunk]
            pointers.append(
                [
                    self._address + (tensor * shape.blocks + block) * shape.page_bytes
                    for tensor in range(shape.tensors)
                    for block in chunk
                ]
            )
        return pointers, [[shape.page_bytes] * len(one) for one in pointers]
