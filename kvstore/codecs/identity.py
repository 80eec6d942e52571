"""IdentityCodec: bytes are stored as they are, without a copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import CODEC_IDS
from kvstore.core.errors import ChunkCorruptError


class IdentityCodec:
    """The codec that changes nothing; the default of every tier."""

    id = CODEC_IDS["identity"]
    version = 1

    def encode(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """``raw`` itself."""
        return raw

    def decode(self, stored: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Nothing where ``stored`` already lies in ``out``, else one copy."""
        if stored.nbytes != out.nbytes:
            raise ChunkCorruptError(f"identity: {stored.nbytes} bytes stored of {out.nbytes}")
        if stored.ctypes.data != out.ctypes.data:
            np.copyto(out, stored)
