"""PagedEngine: an engine's paged KV memory, registered at a daemon, under tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvstore import (
    Client,
    LayerGroup,
    Layout,
    Namespace,
    Shard,
    TensorSpan,
    WorkerSession,
    create_host_memory,
)

GROUP = "full"
"""The name of the one group."""
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Paging:
    """Memory of [tensors, blocks, page], and the tokens of a block and of a chunk."""

    tensors: int
    blocks: int
    page_bytes: int
    tokens_per_block: int
    tokens_per_chunk: int

    def layout(self) -> Layout:
        """As it is registered: tensor by tensor."""
        size = self.page_bytes
        spans = tuple(
            TensorSpan(number * self.blocks * size, size, size, self.blocks)
            for number in range(self.tensors)
        )
        group = LayerGroup(GROUP, self.tokens_per_block, None, spans)
        return Layout("float16", self.tokens_per_chunk, (group,))


class PagedEngine:
    """One engine with one rank; ``pages`` is its memory, [tensors, blocks, page bytes]. ``join``
    registers it. A context manager, which closes it."""

    def __init__(self, address: str, name: str, paging: Paging, lookup_timeout_s: float) -> None:
        self.paging = paging
        self._name = name
        nbytes = paging.tensors * paging.blocks * paging.page_bytes
        self._memory = create_host_memory(name, nbytes)
        whole = np.frombuffer(self._memory.buffer, np.uint8)
        self.pages = whole.reshape(paging.tensors, paging.blocks, paging.page_bytes)
        self.client = Client(address, lookup_timeout_s=lookup_timeout_s)

    def join(self, namespace: Namespace) -> WorkerSession:
        """Register the memory, and wait until the daemon knows it."""
        worker = self.client.register(
            engine_id=self._name,
            namespace=namespace,
            layout=self.paging.layout(),
            memory=self._memory.describe(),
            shard=Shard(),
        )
        assert worker.wait_ready(WAIT_S), "the daemon doesn't know the engine"
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._memory.close()
