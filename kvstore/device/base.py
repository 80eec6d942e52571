"""Pages: an engine's paged KV memory as the daemon sees it, whatever device it lies on."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Blocks: TypeAlias = tuple[tuple[int, bytes], ...]
"""(group index, packed little-endian u32 block IDs in token order), by rising group index."""


class Pages(Protocol):
    """One shard's registered memory: gathers blocks into one run of canonical bytes, and back.

    Canonical order (core/layout.py): group by group, tensor by tensor, block by block in token
    order, ``block_bytes`` each.

    Guaranteed by the caller: the memory stays mapped during a call; nobody else writes the blocks
    of a gather or uses those of a scatter meanwhile; ``out`` and ``source`` are contiguous uint8
    and lie outside the memory.

    The implementation is responsible for: checking groups, counts, IDs and sizes *before* the
    first byte moves (LayoutMismatchError, and nothing was written); working from several threads
    at once; holding no interpreter lock while bytes move; having moved everything when it returns.
    """

    def gather(self, blocks: Blocks, out: NDArray[np.uint8]) -> None:
        """Copy blocks into ``out`` [bytes of the blocks]. Refuses NULL_BLOCK. Mutates ``out``."""

    def scatter(self, blocks: Blocks, source: NDArray[np.uint8]) -> None:
        """Copy ``source`` [bytes of the blocks] into blocks, except those named NULL_BLOCK.
        Mutates the engine's memory."""
