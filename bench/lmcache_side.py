"""LMCache's multiprocess server and the calls with which its vLLM connector drives it.

Runs in the environment that bench/peer_lmcache.py builds. The adapters are LMCache's own; their
futures are waited for where vLLM polls once a step, so that no poll counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from bench.engine import BenchEngine
from bench.peer import PeerServer
from bench.peer_work import free_ports

WAIT_S = 60.0
_NO_NULL_BLOCK = "--null-block-id=-1"
_EXTRA = {"lmcache.mp.mq_timeout": WAIT_S}
_ONE_RANK = ParallelStrategy(
    mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
)


class LMCacheServer(PeerServer):
    """``lmcache server`` with a pool of host memory of ``pool_bytes``, workers as many as cores,
    and no second tier."""

    def __init__(self, pool_bytes: int, tokens_per_chunk: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._shm = f"kvb{os.getpid()}-{time.monotonic_ns()}"
        self._context = zmq.Context()
        self._port, http_port = free_ports(2)
        self._client: Any = None
        super().__init__([
            str(Path(sys.executable).parent / "lmcache"), "server", "--port", str(self._port),
            "--http-port", str(http_port), "--l1-size-gb", str(pool_bytes / 2**30),
            "--no-l1-use-lazy", "--shm-name", self._shm, "--eviction-policy", "LRU",
            "--chunk-size", str(tokens_per_chunk), "--max-workers", str(os.cpu_count()),
            "--supported-transfer-mode", "auto", _NO_NULL_BLOCK,
        ])  # fmt: skip

    @property
    def url(self) -> str:
        """Where adapters reach it."""
        return f"tcp://localhost:{self._port}"

    def close(self) -> None:
        """End the process, and remove its shared memory."""
        if self._client is not None:
            self._client.close()
        super().close()
        self._context.destroy(linger=0)
        self._log.close()
        Path("/dev/shm", self._shm).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything."""
        self._client.clear(force=True).result(timeout=WAIT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)

    def _wait(self) -> None:
        self._client = RequestClientFactory.create(self.url, context=self._context)
        try:
            self._client.get_chunk_size().result(timeout=WAIT_S)
        except TimeoutError as error:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"the server didn't answer in {WAIT_S:g} s:\n{said}") from error


class LMCacheEngine:
    """An engine's worker and scheduler at an LMCache server, on the pages of one of ours.

    A page is [tokens, heads, head dimension] of float16 ("NHD"), so that LMCache copies a page as
    it lies. A context manager.
    """

    def __init__(self, server: LMCacheServer, ours: BenchEngine, name: str) -> None:
        self._context = zmq.Context()
        self._ours = ours
        arguments: tuple[Any, ...] = (
            self._context, name, ours.shape.tokens_per_chunk // ours.shape.blocks_per_chunk,
            _ONE_RANK,
        )  # fmt: skip
        self._worker = LMCacheMPWorkerAdapter(server.url, *arguments, extra_config=_EXTRA)
        self._scheduler = LMCacheMPSchedulerAdapter([server.url], *arguments, extra_config=_EXTRA)
        self._client = self._scheduler.req_clients[server.url]

    def __enter__(self) -> LMCacheEngine:
        shape = self._ours.shape
        tokens = shape.tokens_per_chunk // shape.blocks_per_chunk
        values = shape.page_bytes // 2 // tokens
        heads = min(8, values // 8)
        pages = self._ours.pages.view(np.float16).reshape(
            shape.tensors // 2, 2, shape.blocks, tokens, heads, values // heads
        )
        layers = {f"layer.{n}": torch.from_numpy(layer) for n, layer in enumerate(pages)}
        self._worker.register_kv_caches(layers, layout_hints={"kv_layout": "NHD"})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scheduler.shutdown()
        self._worker.shutdown()
        self._context.destroy(linger=0)

    def lookup(self, request: str, token_ids: list[int]) -> int:
        """The tokens of whole chunks that can be retrieved; locks them for the request."""
        size = self._ours.shape.tokens_per_chunk
        end = len(token_ids) // size * size
        key = self._scheduler._create_key(token_ids, 0, end, request).no_worker_id_version()
        self._client.lookup(key, 1).result(timeout=WAIT_S)
        while True:
            chunks = self._client.query_prefetch_status(request).result(timeout=WAIT_S)
            if chunks is not None:
                return int(chunks) * size

    def unlock(self, request: str, token_ids: list[int], hit: int) -> None:
        """Give up what a lookup has locked."""
        self._scheduler.free_lookup_locks(token_ids, 0, hit, request)
        self._client.end_session(request).result(timeout=WAIT_S)

    def store(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Store whole chunks; raises AssertionError unless it was done."""
        operation = self._operation(token_ids, blocks)
        event = self._worker.create_recorded_event()
        self._worker.submit_store_request(request, operation, event)
        done = self._worker.store_futures.pop(request).result(timeout=WAIT_S)
        assert done, "LMCache didn't store it"

    def retrieve(self, request: str, token_ids: list[int], blocks: Sequence[int]) -> None:
        """Retrieve what a lookup found; raises AssertionError unless it was done."""
        operation = self._operation(token_ids, blocks)
        event = self._worker.create_recorded_event()
        self._worker.submit_retrieve_request(request, operation, event)
        future, _ = self._worker.retrieve_futures.pop(request)
        assert future.result(timeout=WAIT_S), "LMCache didn't retrieve it"

    def end(self, request: str) -> None:
        """The request is over."""
        self._client.end_session(request).result(timeout=WAIT_S)

    def _operation(self, token_ids: list[int], blocks: Sequence[int]) -> LoadStoreOp:
        shape = self._ours.shape
        end = len(blocks) // shape.blocks_per_chunk * shape.tokens_per_chunk
        return LoadStoreOp(
            token_ids=token_ids[:end], block_ids=[list(blocks)], start=0, end=end
        )  # fmt: skip
