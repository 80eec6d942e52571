"""BenchEngine: an engine's paged KV memory at a real daemon, with bytes that show any mix-up.

Memory is [tensors, blocks, page], as engines lay it out: a block's K or V of one layer is one page,
and a chunk is ``blocks_per_chunk`` blocks that lie anywhere. A chunk's bytes are a function of its
number; every 8 of them differ between chunks and between places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore import ChunkKeys, Namespace, Ticket
from tests.paged_engine import GROUP, WAIT_S, PagedEngine, Paging

_STEP, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine's memory is cut: room for ``chunks`` chunks of ``blocks_per_chunk`` blocks of
    ``tensors`` pages."""

    chunks: int
    tensors: int = 4
    page_bytes: int = 64 << 10
    blocks_per_chunk: int = 16
    tokens_per_chunk: int = 256

    @property
    def chunk_bytes(self) -> int:
        """Of KV."""
        return self.tensors * self.blocks_per_chunk * self.page_bytes

    @property
    def blocks(self) -> int:
        """Block IDs."""
        return self.chunks * self.blocks_per_chunk


def chunk_shape(chunks: int, chunk_bytes: int, page_bytes: int) -> Shape:
    """Chunks of 16 blocks and ``chunk_bytes``, in pages of this size."""
    tensors = chunk_bytes // (16 * page_bytes)
    assert tensors * 16 * page_bytes == chunk_bytes, "a chunk is whole pages of 16 blocks"
    return Shape(chunks, tensors, page_bytes)


class BenchEngine(PagedEngine):
    """One engine with one rank. ``places(first, n)`` names room for n chunks, whose blocks lie
    scattered. A context manager."""

    def __init__(self, address: str, name: str, shape: Shape) -> None:
        self.shape = shape
        tokens_per_block = shape.tokens_per_chunk // shape.blocks_per_chunk
        paging = Paging(
            shape.tensors, shape.blocks, shape.page_bytes, tokens_per_block, shape.tokens_per_chunk
        )
        super().__init__(address, name, paging, lookup_timeout_s=30.0)
        self._space = Namespace(model=f"bench/{name}", revision="1", format="bench/1")
        generator = np.random.default_rng(7)
        self._order = generator.permutation(shape.blocks)
        self._base = generator.integers(0, 1 << 63, shape.chunk_bytes // 8, np.uint64)

    def __enter__(self) -> Self:
        self.worker = self.join(self._space)
        return self

    def keys(self, chunks: int, seed: int) -> ChunkKeys:
        """The keys of a prompt of so many chunks that only this seed has."""
        return self.worker.keys(tokens(chunks * self.shape.tokens_per_chunk, seed))

    def places(self, first: int, chunks: int) -> list[int]:
        """The block IDs of chunk places [first, first + chunks)."""
        size = self.shape.blocks_per_chunk
        ids: list[int] = self._order[first * size : (first + chunks) * size].tolist()
        return ids

    def pattern(self, number: int) -> Bytes:
        """The bytes of chunk ``number``, [tensors, blocks per chunk, page]."""
        shape = self.shape
        words = self._base + np.uint64(_STEP * (number + 1) & _WORD)
        return words.view(np.uint8).reshape(shape.tensors, shape.blocks_per_chunk, shape.page_bytes)

    def fill(self, blocks: Sequence[int], first: int) -> None:
        """Write the patterns of chunks ``first``, ``first + 1``, ... into blocks."""
        size = self.shape.blocks_per_chunk
        for n in range(len(blocks) // size):
            self.pages[:, blocks[n * size : (n + 1) * size]] = self.pattern(first + n)

    def check(self, blocks: Sequence[int], first: int) -> None:
        """Raise AssertionError unless blocks hold these chunks' patterns."""
        size = self.shape.blocks_per_chunk
        for n in range(len(blocks) // size):
            found = self.pages[:, blocks[n * size : (n + 1) * size]]
            assert np.array_equal(found, self.pattern(first + n)), f"wrong bytes in chunk {n}"

    def store(self, request: str, keys: ChunkKeys, blocks: Sequence[int]) -> Ticket:
        """Ask for a store."""
        return self.worker.store(request, keys, {GROUP: blocks})

    def retrieve(self, request: str, keys: ChunkKeys, blocks: Sequence[int]) -> Ticket:
        """Ask for a retrieve."""
        return self.worker.retrieve(request, keys, {GROUP: blocks})


def finish(ticket: Ticket) -> None:
    """Wait for a transfer; raises AssertionError unless every chunk was done."""
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None, "the transfer didn't end"
    assert all(outcome.done), f"not every chunk was done: {outcome.reason}"


def tokens(count: int, seed: int) -> list[int]:
    """So many token IDs and one more, so that all whole chunks can be reused."""
    found: list[int] = np.random.default_rng(seed).integers(0, 150_000, count + 1).tolist()
    return found
