"""Holding: the blocks of stores in flight, which stay vLLM's and are nobody else's meanwhile.

Each has one more reference in vLLM's own block pool until every rank has reported the store's end
(see scheduler.py for what was rejected).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvstore_vllm.layout import EngineShape, GroupShape

Cut = list[list[KVCacheBlock | None]]
"""Per group the blocks of some chunks; None for those that have slid out of a window."""


@dataclass(slots=True)
class _Held:
    """Blocks of a store in flight, and how many ranks haven't reported its end."""

    blocks: list[KVCacheBlock]
    ranks: int


class Holding:
    """The stores in flight, by number, and the share of all blocks that they may hold. One thread
    uses it."""

    def __init__(self, shape: EngineShape, share: float) -> None:
        self.blocks = 0
        self._groups = shape.groups
        self._chunk = shape.chunk
        self._ranks = shape.ranks
        self._share = share
        self._cache: KVCacheManager | None = None
        self._held: dict[int, _Held] = {}
        self._numbers = count(1)

    def bind(self, cache: KVCacheManager) -> None:
        """vLLM's cache manager, which knows each request's blocks."""
        self._cache = cache

    def __len__(self) -> int:
        return len(self._held)

    def cut(self, request: str, first: int, last: int) -> Cut | None:
        """The request's blocks of chunks [first, last), or of as many of them as may be held. None
        where that is none, or where a full group lacks one."""
        if self._cache is None:
            return None
        blocks = self._cache.get_blocks(request).blocks
        last = self._affordable(first, last)
        if last <= first:
            return None
        found: Cut = []
        for group, own in zip(self._groups, blocks, strict=True):
            cut = self._of_group(group, own, first, last)
            if cut is None:
                return None
            found.append(cut)
        return found

    def chunks(self, cut: Cut) -> int:
        """Of how many chunks a cut is."""
        return len(cut[0]) * self._groups[0].tokens_per_block // self._chunk

    def hold(self, cut: Cut) -> int:
        """Hold a cut until all ranks have let go of the number that this returns."""
        number = next(self._numbers)
        held = [block for group in cut for block in group if block is not None]
        self._pool().touch(held)
        self._held[number] = _Held(held, self._ranks)
        self.blocks += len(held)
        return number

    def let_go(self, number: int, ranks: int) -> None:
        """Ranks have ended a store: with the last one its blocks are vLLM's alone again."""
        held = self._held.get(number)
        if held is None:
            return
        held.ranks -= ranks
        if held.ranks <= 0:
            del self._held[number]
            self.blocks -= len(held.blocks)
            self._pool().free_blocks(reversed(held.blocks))

    def _affordable(self, first: int, last: int) -> int:
        """Up to which chunk the blocks may be held, as many are already."""
        share = int(self._share * self._pool().num_gpu_blocks)
        per_chunk = sum(self._chunk // group.tokens_per_block for group in self._groups)
        return min(last, first + max(0, share - self.blocks) // per_chunk)

    def _of_group(
        self, group: GroupShape, own: Sequence[KVCacheBlock], first: int, last: int
    ) -> list[KVCacheBlock | None] | None:
        per_chunk = self._chunk // group.tokens_per_block
        cut = [
            None if block.is_null else block for block in own[first * per_chunk : last * per_chunk]
        ]
        whole = len(cut) == (last - first) * per_chunk and (group.window or None not in cut)
        return cut if whole else None

    def _pool(self) -> BlockPool:
        assert self._cache is not None
        return self._cache.block_pool
