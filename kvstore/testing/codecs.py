"""CodecContract: what every codec does."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.base import Codec
from kvstore.core.errors import ChunkCorruptError
from kvstore.testing.samples import pattern


class CodecContract:
    """What every codec does. Fixture ``codec``."""

    @pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096, 100_001])
    def test_round_trip(self, codec: Codec, nbytes: int) -> None:
        """Every byte comes back, of sizes that aren't whole pages, and none is changed."""
        raw = pattern(nbytes, nbytes)
        before, out = raw.copy(), np.zeros(nbytes, np.uint8)
        stored = codec.encode(raw)
        codec.decode(stored, out)
        np.testing.assert_array_equal(raw, before)
        np.testing.assert_array_equal(out, raw)

    def test_truncated_input_is_corrupt(self, codec: Codec) -> None:
        """Whatever is cut off, decode says so."""
        stored = codec.encode(pattern(1, 5000))
        for nbytes in (0, 1, stored.nbytes // 2, stored.nbytes - 1):
            with pytest.raises(ChunkCorruptError):
                codec.decode(stored[:nbytes], np.zeros(5000, np.uint8))
