"""Codecs: what lossless compression saves of real KV, and what it costs.

The KV is what the reference engine computed of this repository's own ARCHITECTURE.md, chunks as a
tier gets them. Sides: LZ4 of a chunk as it is, and the codecs of kvstore over split byte planes.
Each chunk is encoded and decoded by each side in turn, on one thread; every byte is compared.

``pays below`` is the speed of a connection up to which a codec saves time, its own included: with r
the raw bytes by the stored ones, encoding at E GB/s and then sending 1/r of the bytes is quicker
than sending all of them where the connection is slower than E * (1 - 1/r); likewise for reads. Each
connection has a thread, so a faster network with more of them may still be worth it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lz4.block
import numpy as np
from numpy.typing import NDArray

from bench.echo import ROOT
from bench.harness import Bar, Bench, Question, Size, at_least, interleave, p50, timed
from kvstore.codecs.registry import codec

if TYPE_CHECKING:
    from kvstore_transformers.model import CausalModel

_CHUNK_TOKENS = 256
_GIGA = 1e9
_COMPUTED = {"bfloat16": "bfloat16", "float16": "float16", "float8_e4m3fn": "bfloat16"}
"""The element types of the KV, and of the model that it is rounded from."""
_BARS = {
    ("bfloat16", "split zstd"): at_least(1.4),
    ("float16", "split zstd"): at_least(1.1),
    ("float8_e4m3fn", "split zstd"): at_least(1.1),
}

Bytes = NDArray[np.uint8]
Coder = tuple[Callable[[Bytes], Bytes], Callable[[Bytes, Bytes], None]]
"""Encodes a chunk; decodes what was stored into an array of the chunk's length."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``chunks`` of KV; ``rounds`` of all of them in a run."""

    chunks: int
    rounds: int


_SIZES = {Size.FULL: _Sizes(4, 5), Size.SMALL: _Sizes(1, 1)}


def measure(bench: Bench) -> None:
    """Rows of each element type."""
    from kvstore_transformers.config import share_cores

    share_cores()
    for dtype in _COMPUTED:
        chunks = _chunks(bench.size, dtype)
        for name, coder in _sides(dtype).items():
            _rows(bench, f"{dtype}, {name}", chunks, coder, _BARS.get((dtype, name)))


def _sides(dtype: str) -> dict[str, Coder]:
    ours = {f"split {name}": codec(name, dtype) for name in ("lz4", "zstd")}
    return {"plain lz4": (_plain_encode, _plain_decode)} | {
        name: (found.encode, found.decode) for name, found in ours.items()
    }


def _rows(bench: Bench, what: str, chunks: Sequence[Bytes], coder: Coder, bar: Bar | None) -> None:
    """What is saved, and how fast."""
    encode, decode = coder
    stored = [encode(raw) for raw in chunks]
    outs = [np.zeros_like(raw) for raw in chunks]
    nbytes = sum(raw.nbytes for raw in chunks)
    ratio = nbytes / sum(found.nbytes for found in stored)
    bench.row(f"{what}: raw by stored bytes", "x", [ratio], bar)
    if any(found is raw for found, raw in zip(stored, chunks, strict=True)):
        return
    sides = {
        "encode": lambda number: timed(lambda: [encode(raw) for raw in chunks]),
        "decode": lambda number: timed(
            lambda: [decode(found, out) for found, out in zip(stored, outs, strict=True)]
        ),
    }
    runs = [interleave(sides, _SIZES[bench.size].rounds) for _ in range(bench.runs)]
    for raw, out in zip(chunks, outs, strict=True):
        assert np.array_equal(raw, out), "other bytes came back"
    for side in sides:
        speeds = [nbytes / p50(run[side]) / _GIGA for run in runs]
        bench.row(
            f"{what}: {side}", "GB/s", speeds, None,
            f"pays below {p50(speeds) * max(0.0, 1 - 1 / ratio):.2f} GB/s",
        )  # fmt: skip


def _plain_encode(raw: Bytes) -> Bytes:
    return np.frombuffer(lz4.block.compress(raw, store_size=False), np.uint8)


def _plain_decode(stored: Bytes, out: Bytes) -> None:
    raw = lz4.block.decompress(stored, uncompressed_size=out.nbytes)
    np.copyto(out, np.frombuffer(raw, np.uint8))


def _chunks(size: Size, dtype: str) -> list[Bytes]:
    """The KV of a text, a chunk an array, in the order of kvstore.core.layout."""
    import torch
    from kvstore_transformers.engine import Engine, EngineOptions

    count = _SIZES[size].chunks
    model, tokens = _model(size, dtype, count * _CHUNK_TOKENS)
    options = EngineOptions(tokens_per_chunk=_CHUNK_TOKENS, store_decoded=False)
    blocks = _CHUNK_TOKENS // options.tokens_per_block
    with Engine(model, options) as engine:
        engine.generate(tokens, 1, ignore_end=True)
        kv = engine.cache.kv[:, :, : count * blocks].to(getattr(torch, dtype)).clone()
    return [
        kv[:, :, first : first + blocks].contiguous().view(torch.uint8).numpy().reshape(-1)
        for first in range(0, count * blocks, blocks)
    ]


def _model(size: Size, dtype: str, tokens: int) -> tuple[CausalModel, list[int]]:
    """SmolLM2-135M and the text; a tiny random model of float32 and any tokens at a small size."""
    if size is Size.SMALL:
        from tests.connectors.tiny import oracle, ours, random_tokens

        return ours(oracle("llama")), random_tokens(tokens)
    from kvstore_transformers.config import small_model_folder
    from kvstore_transformers.fetch import fetch
    from kvstore_transformers.loading import load_model, load_tokenizer

    folder = str(fetch(small_model_folder(), lambda line: print(line, file=sys.stderr)))
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return load_model(folder, _COMPUTED[dtype]), load_tokenizer(folder).encode(text)[:tokens]


QUESTION = Question("codecs", "what does compression save of real KV, and cost?", measure)
