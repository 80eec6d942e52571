"""Damaged encodings: an error of one line, or bytes that the checksum judges, and nothing else."""

from __future__ import annotations

import random

import numpy as np

from kvstore.codecs.registry import codec
from kvstore.core.errors import ChunkCorruptError
from kvstore.testing.codecs import smooth
from tests.fuzz.mutate import EXAMPLES, fuzz, mangle, only_lines


@fuzz(EXAMPLES // 4)
def test_hostile_bytes_are_refused_in_one_line(seed: int) -> None:
    """Encodings with a few changes, at their head above all; never another error than ours."""
    rng = random.Random(seed)
    name, size = rng.choice(("lz4", "zstd")), rng.choice((1, 2, 4))
    raw = smooth(seed % 7, rng.choice((500, 5001, 70_000, 600_000)))
    chosen = codec(name, {1: "int8", 2: "float16", 4: "float32"}[size])
    stored = chosen.encode(raw).tobytes()
    assert len(stored) < raw.nbytes
    cut = rng.choice((8, 24, 60, len(stored)))
    hostile = mangle(rng, stored[:cut]) + stored[cut:]
    out = np.zeros(raw.nbytes + rng.choice((0, 0, 0, 1, -1)), np.uint8)
    with only_lines(ChunkCorruptError):
        chosen.decode(np.frombuffer(hostile, np.uint8), out)
