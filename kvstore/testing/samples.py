"""Samples: bytes, headers and block IDs that contract suites work with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import NO_PARENT, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def sample_header(seed: int, payload_bytes: int) -> ChunkHeader:
    """A chunk header of its own for each seed; the seed is its sequence, too."""
    return ChunkHeader(
        key=ChunkKey(pattern(seed, 32).tobytes()), parent=NO_PARENT, depth=0, tenant="tenant",
        namespace=bytes(range(32)), epoch=1, dtype="bfloat16", tokens=16, shard=0, shards=1,
        part=Part.FULL, payload_bytes=payload_bytes, sequence=seed,
    )  # fmt: skip


def packed(*ids: int) -> bytes:
    """Block IDs as a Move carries them."""
    return np.array(ids, "<u4").tobytes()
