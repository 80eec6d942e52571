"""CodecContract: what every codec does."""

from __future__ import annotations

import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.codecs.base import Codec
from kvstore.core.errors import ChunkCorruptError
from kvstore.testing.samples import pattern

Bytes = NDArray[np.uint8]
_SIZES = [1, 2, 3, 4095, 4096, 100_001, (1 << 21) + 7]
_SPARE_BYTES = 1 << 20
"""What may be allocated whatever the length."""


class CodecContract:
    """What every codec does. Fixture ``codec``."""

    @pytest.mark.parametrize("nbytes", _SIZES)
    @pytest.mark.parametrize("noise_bits", [0, 3, 8])
    def test_round_trip(self, codec: Codec, nbytes: int, noise_bits: int) -> None:
        """Every byte comes back, of sizes that aren't whole pages or elements, from bytes that
        shrink and from bytes that don't, and none is changed."""
        raw = numbers(nbytes, nbytes, noise_bits)
        before = raw.copy()
        stored = codec.encode(raw)
        np.testing.assert_array_equal(raw, before)
        assert stored is raw or stored.nbytes < raw.nbytes
        np.testing.assert_array_equal(decoded(codec, stored, raw), raw)

    def test_output_is_deterministic(self, codec: Codec) -> None:
        """The same bytes, wherever they lie and whatever was encoded before."""
        raw = numbers(1, 300_000, 3)
        shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
        first = codec.encode(raw).tobytes()
        codec.encode(numbers(2, 300_000, 3))
        assert codec.encode(shifted).tobytes() == first

    def test_output_is_written_in_place(self, codec: Codec) -> None:
        """Into the bytes given, wherever they start, and no byte beside them."""
        raw = smooth(1, 100_001)
        stored = codec.encode(raw)
        around = np.full(raw.nbytes + 2, 7, np.uint8)
        if stored is not raw:
            codec.decode(stored, around[1:-1])
            np.testing.assert_array_equal(around[1:-1], raw)
        assert around[0] == around[-1] == 7

    def test_truncated_input_is_corrupt(self, codec: Codec) -> None:
        """Whatever is cut off, decode says so."""
        raw = smooth(1, 5000)
        stored = codec.encode(raw)
        for nbytes in (0, 1, 7, 8, stored.nbytes // 2, stored.nbytes - 1):
            with pytest.raises(ChunkCorruptError):
                codec.decode(stored[:nbytes], np.zeros(raw.nbytes, np.uint8))

    def test_another_length_is_corrupt(self, codec: Codec) -> None:
        """One byte more or less than the raw length, and bytes behind the end."""
        raw = smooth(1, 600_000)
        stored = codec.encode(raw)
        for nbytes in (0, raw.nbytes - 1, raw.nbytes + 1, 2 * raw.nbytes):
            with pytest.raises(ChunkCorruptError):
                codec.decode(stored, np.zeros(nbytes, np.uint8))
        longer = np.concatenate([stored, np.zeros(1, np.uint8)])
        with pytest.raises(ChunkCorruptError):
            codec.decode(longer, np.zeros(raw.nbytes, np.uint8))

    def test_damaged_input_is_corrupt_or_other_bytes(self, codec: Codec) -> None:
        """Decode ends, as ChunkCorruptError or with bytes that a checksum must judge, and allocates
        no more than the raw length, whatever single byte is changed to whatever value."""
        raw = smooth(1, 600_000)
        stored, out = codec.encode(raw).copy(), np.zeros(raw.nbytes, np.uint8)
        generator = np.random.default_rng(1)
        places = [*range(min(64, stored.nbytes)), *generator.integers(0, stored.nbytes, 200)]
        tracemalloc.start()
        try:
            for place in places:
                kept = int(stored[place])
                stored[place] = generator.integers(0, 256)
                _decode_or_refuse(codec, stored, out)
                stored[place] = kept
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes <= raw.nbytes + _SPARE_BYTES

    def test_nothing_is_left_to_collect(self, codec: Codec) -> None:
        """The daemon collects no cycles, so neither success nor failure may leave any."""
        raw = smooth(1, 100_001)
        stored, out = codec.encode(raw), np.zeros(raw.nbytes, np.uint8)
        gc.collect()
        gc.disable()
        try:
            codec.decode(codec.encode(raw), out)
            for nbytes in range(0, stored.nbytes, 1000):
                _decode_or_refuse(codec, stored[:nbytes], out)
            assert gc.collect() == 0
        finally:
            gc.enable()

    def test_threads_share_one_codec(self, codec: Codec) -> None:
        """Several threads encode and decode at a time, each its own bytes."""

        def work(seed: int) -> bool:
            raw = numbers(seed, 200_000 + seed, 3)
            return bool(np.array_equal(decoded(codec, codec.encode(raw), raw), raw))

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(32)))


def numbers(seed: int, nbytes: int, noise_bits: int) -> Bytes:
    """Bytes like those of 2-byte numbers: noise, then ``noise_bits`` of it (8: all noise, 0: always
    the same)."""
    raw = pattern(seed, nbytes)
    raw[1::2] &= (1 << noise_bits) - 1
    return raw


def smooth(seed: int, nbytes: int) -> Bytes:
    """Bytes that any compressor shrinks: zeros and ones."""
    return pattern(seed, nbytes) & np.uint8(1)


def decoded(codec: Codec, stored: Bytes, raw: Bytes) -> Bytes:
    """What a tier reads back: where ``raw`` was stored as it is, its header names the identity."""
    if stored is raw:
        return stored
    out = np.zeros(raw.nbytes, np.uint8)
    codec.decode(stored, out)
    return out


def _decode_or_refuse(codec: Codec, stored: Bytes, out: Bytes) -> None:
    try:
        codec.decode(stored, out)
    except ChunkCorruptError:
        out[:] = 0
