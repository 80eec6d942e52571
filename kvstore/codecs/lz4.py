"""Lz4Codec: LZ4 blocks over split byte planes. Quick to undo; finds repetitions only."""

from __future__ import annotations

import lz4.block
import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import CODEC_IDS
from kvstore.codecs.planes import PlaneCodec
from kvstore.core.errors import ChunkCorruptError


class Lz4Codec(PlaneCodec):
    """See planes.py; each compressed plane is one LZ4 block without a length before it."""

    id = CODEC_IDS["lz4"]

    def _compress(self, plane: NDArray[np.uint8]) -> bytes:
        return bytes(lz4.block.compress(plane, store_size=False))

    def _expand(self, stored: NDArray[np.uint8], plane_bytes: int) -> bytes:
        try:
            plane = bytes(lz4.block.decompress(stored, uncompressed_size=plane_bytes))
        except lz4.block.LZ4BlockError as error:
            raise ChunkCorruptError(f"lz4: {error}") from error
        if len(plane) != plane_bytes:
            raise ChunkCorruptError(f"lz4: {len(plane)} bytes of {plane_bytes}")
        return plane
