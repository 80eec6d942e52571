"""PagedCache: the engine's KV in blocks, in memory that the daemon can read and write.

The memory is one tensor [layers, 2, blocks, tokens_per_block, kv_heads, head_dim] (NHD: tokens,
heads, dimension) in a sealed memfd; K is 0 and V is 1. A sequence's tokens lie in the blocks that
its table names, in any order: token t is row t % tokens_per_block of block table[t //
tokens_per_block]. Each block has one owner, from allocate to free, and nobody else may write it,
the daemon included.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvstore.core.layout import LayerGroup, Layout, TensorSpan, TokenRows
from kvstore_transformers.errors import OwnershipError

GROUP = "full"
"""The name of the one group that all layers form."""


class Memory(Protocol):
    """Memory that can be handed to the daemon: kvstore.memory's HostMemory."""

    @property
    def buffer(self) -> memoryview:
        """All of it, writable."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a paged cache: of the model (layers, heads), of a block and of the pool."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tokens_per_block: int
    num_blocks: int

    def block_bytes(self) -> int:
        """Bytes of one block of K, or of V, of one layer."""
        elements = self.tokens_per_block * self.kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    def memory_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.layers * 2 * self.num_blocks * self.block_bytes()

    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return self.layers * 2 * self.block_bytes() // self.tokens_per_block

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.tokens_per_block)

    def layout(self, tokens_per_chunk: int) -> Layout:
        """What the daemon is told of the memory."""
        size = self.block_bytes()
        span_bytes = self.num_blocks * size
        stride = self.kv_heads * self.head_dim * self.dtype.itemsize
        tensors = tuple(
            TensorSpan(
                offset_bytes=(layer * 2 + part) * span_bytes,
                block_stride_bytes=size,
                block_bytes=size,
                num_blocks=self.num_blocks,
                rows=TokenRows("kv"[part], self.kv_heads, self.head_dim, stride, "neox"),
            )
            for layer in range(self.layers)
            for part in range(2)
        )
        group = LayerGroup(GROUP, self.tokens_per_block, None, tensors)
        dtype = str(self.dtype).removeprefix("torch.")
        return Layout(dtype=dtype, tokens_per_chunk=tokens_per_chunk, groups=(group,))


class BlockAllocator:
    """The free blocks and each other block's owner. Safe from several threads."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owner: dict[int, int] = {}
        self._lock = threading.Lock()

    def allocate(self, owner: int, count: int) -> tuple[int, ...] | None:
        """Give ``count`` blocks to ``owner``, or None, and nothing changed, when too few are
        free."""
        with self._lock:
            if count > len(self._free):
                return None
            blocks = tuple(self._free.pop() for _ in range(count))
            self._owner.update(dict.fromkeys(blocks, owner))
            return blocks

    def free(self, owner: int, blocks: Sequence[int]) -> None:
        """Take blocks back from their owner. All or nothing: raises OwnershipError, and frees
        none, when one belongs to another, is free already or is named twice."""
        with self._lock:
            for block in blocks:
                if self._owner.get(block) != owner:
                    raise OwnershipError(
                        f"cache: owner {owner} frees block {block}, which belongs to "
                        f"{self._owner.get(block)}"
                    )
            if len(set(blocks)) != len(blocks):
                raise OwnershipError(f"cache: owner {owner} frees a block twice in one call")
            for block in blocks:
                del self._owner[block]
            self._free.extend(blocks)

    def available(self) -> int:
        """Free blocks."""
        with self._lock:
            return len(self._free)

    def check_invariants(self) -> None:
        """Assert that each block is either free, once, or owned."""
        with self._lock:
            free = set(self._free)
            assert len(free) == len(self._free), "a block is free twice"
            assert not free & self._owner.keys(), "a block is free and owned"
            assert free | self._owner.keys() == set(range(self._num_blocks)), "a block is lost"


class PagedCache:
    """The KV tensor over ``memory``, which it doesn't own, and the allocator of its blocks."""

    def __init__(self, shape: CacheShape, memory: Memory) -> None:
        self.shape = shape
        self.allocator = BlockAllocator(shape.num_blocks)
        sizes = (
            shape.layers, 2, shape.num_blocks, shape.tokens_per_block, shape.kv_heads,
            shape.head_dim,
        )  # fmt: skip
        flat = torch.frombuffer(memory.buffer, dtype=torch.uint8, count=shape.memory_bytes())
        self.kv: Tensor = flat.view(shape.dtype).view(sizes)

    def pages(self, blocks: Sequence[int]) -> SequencePages:
        """The KV of one sequence whose tokens lie in ``blocks``."""
        return SequencePages(self.kv, torch.tensor(blocks, dtype=torch.int64))


class SequencePages:
    """One sequence's KV through its block table; what model.KVPages asks for."""

    def __init__(self, kv: Tensor, table: Tensor) -> None:
        self._kv = kv
        self._table = table

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put the KV of tokens [start, start + len(keys)), [tokens, kv_heads, head_dim] each."""
        size = self._kv.shape[3]
        positions = torch.arange(start, start + len(keys))
        blocks, rows = self._table[positions // size], positions % size
        self._kv[layer, 0].index_put_((blocks, rows), keys)
        self._kv[layer, 1].index_put_((blocks, rows), values)

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """The KV of tokens [0, end), gathered into new memory."""
        table = self._table[: -(-end // self._kv.shape[3])]
        keys = self._kv[layer, 0].index_select(0, table).flatten(0, 1)
        values = self._kv[layer, 1].index_select(0, table).flatten(0, 1)
        return keys[:end], values[:end]
