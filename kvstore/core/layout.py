"""Layout: how an engine's paged KV memory is cut into groups, tensors and blocks, and chunks into
parts.

The canonical bytes of one part of one chunk shard are, in this order: group by group (as listed),
tensor by tensor, block by block in token order, ``block_bytes`` each. Offsets, strides and counts
say where the engine keeps those bytes and never enter the fingerprint: another memory size still
hits, another packing never does.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum

from kvstore.core.canonical import Encoder
from kvstore.core.errors import LayoutMismatchError

DTYPES: dict[str, int] = {
    "float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "float8_e4m3fnuz": 5,
    "float8_e5m2": 6, "int8": 7, "uint8": 8, "int4x2": 9, "float8_e5m2fnuz": 10,
    "float4_e2m1fn_x2": 11,
}  # fmt: skip
"""Element types and their codes, which stand in headers at rest: only ever append."""

TOKENS_PER_CHUNK_MAX = 1 << 16
GROUPS_MAX = 64
TENSORS_MAX = 4096
NULL_BLOCK = 0xFFFFFFFF
"""A block ID on the wire that names no block: a window group's block that has slid out."""


class Part(IntEnum):
    """Which groups of a chunk: FULL keeps every token, WINDOW only serves the last tokens of a
    hit."""

    FULL = 0
    WINDOW = 1


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows inside a block, which only blend needs.

    ``content`` is "k", "v" or "kv"; ``heads`` x ``head_dim`` elements a token, tokens
    ``token_stride_bytes`` apart; ``pairing`` names how rotary pairs lie ("neox": halves, "gptj":
    interleaved, "none").
    """

    content: str
    heads: int
    head_dim: int
    token_stride_bytes: int
    pairing: str = "neox"


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of one layer: ``num_blocks`` blocks of ``block_bytes``, each
    ``block_stride_bytes`` after the last."""

    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    num_blocks: int
    rows: TokenRows | None = None

    def end_bytes(self) -> int:
        """The first byte behind the span."""
        return (
            self.offset_bytes + (self.num_blocks - 1) * self.block_stride_bytes + self.block_bytes
        )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table. ``window`` is None for full attention, else the tokens it
    looks back."""

    name: str
    tokens_per_block: int
    window: int | None
    tensors: tuple[TensorSpan, ...]

    def num_blocks(self) -> int:
        """Blocks that every tensor of the group has: valid IDs are [0, num_blocks)."""
        return min(span.num_blocks for span in self.tensors)

    def token_blocks_bytes(self) -> int:
        """Bytes of one block across all tensors of the group."""
        return sum(span.block_bytes for span in self.tensors)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of an engine. ``replicas`` consecutive TP ranks hold the same KV, which is stored
    once."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    replicas: int = 1
    nodes: int = 1

    def validate(self) -> None:
        """Raise LayoutMismatchError unless ranks lie within their sizes and replicas divide
        tp_size."""
        if self.tp_size < 1 or not 0 <= self.tp_rank < self.tp_size:
            raise LayoutMismatchError(
                f"shard: tp_rank={self.tp_rank} of tp_size={self.tp_size}; "
                "valid ranks are 0..tp_size-1"
            )
        if self.pp_size < 1 or not 0 <= self.pp_rank < self.pp_size:
            raise LayoutMismatchError(
                f"shard: pp_rank={self.pp_rank} of pp_size={self.pp_size}; "
                "valid ranks are 0..pp_size-1"
            )
        if self.replicas < 1 or self.tp_size % self.replicas:
            raise LayoutMismatchError(
                f"shard: replicas={self.replicas} doesn't divide tp_size={self.tp_size}"
            )
        if self.nodes != 1:
            raise LayoutMismatchError(
                f"shard: the engine spans nodes={self.nodes}; "
                "this version serves engines on one node only"
            )

    def index(self) -> int:
        """The shard's place in [0, count()); replicas share one."""
        return self.pp_rank * (self.tp_size // self.replicas) + self.tp_rank // self.replicas

    def count(self) -> int:
        """Distinct shards of a chunk."""
        return self.pp_size * (self.tp_size // self.replicas)

    def rank(self) -> int:
        """The process's place among all ranks, replicas told apart."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def ranks(self) -> int:
        """Processes that must register before the engine is ready."""
        return self.pp_size * self.tp_size


@dataclass(frozen=True)
class Layout:
    """Groups, element type and tokens per chunk of one shard's KV memory.

    ``uncached`` names KV that the engine keeps and doesn't register ("draft"): a hit doesn't bring
    it back, which is shown, and may be made a miss (Limits.partial).
    """

    dtype: str
    tokens_per_chunk: int
    groups: tuple[LayerGroup, ...]
    uncached: tuple[str, ...] = ()

    def validate(self, memory_bytes: int) -> None:
        """Raise LayoutMismatchError, naming field, value and what is valid, unless the layout fits
        the memory."""
        if self.dtype not in DTYPES:
            raise LayoutMismatchError(
                f"layout: dtype={self.dtype[:64]!r}; valid are {', '.join(DTYPES)}"
            )
        if not 1 <= len(self.groups) <= GROUPS_MAX:
            raise LayoutMismatchError(
                f"layout: {len(self.groups)} groups; valid are 1..{GROUPS_MAX}"
            )
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names) or not all(names):
            raise LayoutMismatchError(f"layout: group names {names} must be distinct and not empty")
        tensors = sum(len(group.tensors) for group in self.groups)
        if tensors > TENSORS_MAX:
            raise LayoutMismatchError(
                f"layout: {tensors} tensors in all; valid are up to {TENSORS_MAX}"
            )
        for group in self.groups:
            _validate_group(group)
        self._validate_chunk()
        for group in self.groups:
            _validate_spans(group, memory_bytes)

    def part_groups(self, part: Part) -> tuple[int, ...]:
        """Indices of the groups in a part; a model of windows only keeps everything in FULL."""
        return self._parts[part][0]

    def part_bytes(self, part: Part) -> int:
        """Bytes of one chunk shard's part; 0 where the part doesn't exist."""
        return self._parts[part][1]

    @functools.cached_property
    def _parts(self) -> dict[Part, tuple[tuple[int, ...], int]]:
        """Groups and bytes of each part, which every chunk is asked for."""
        groups = {part: self._find_groups(part) for part in Part}
        return {part: (found, self._groups_bytes(found)) for part, found in groups.items()}

    def _find_groups(self, part: Part) -> tuple[int, ...]:
        full = tuple(i for i, group in enumerate(self.groups) if group.window is None)
        if not full:
            return tuple(range(len(self.groups))) if part is Part.FULL else ()
        if part is Part.FULL:
            return full
        return tuple(i for i, group in enumerate(self.groups) if group.window is not None)

    def _groups_bytes(self, groups: tuple[int, ...]) -> int:
        return sum(self.blocks_per_chunk(i) * self.groups[i].token_blocks_bytes() for i in groups)

    def blocks_per_chunk(self, group: int) -> int:
        """Blocks of a group that hold one chunk's tokens."""
        return self.tokens_per_chunk // self.groups[group].tokens_per_block

    def window_chunks(self) -> int:
        """Chunks at the end of a hit whose window parts are needed: ceil((w-1)/C) for the widest
        window w."""
        widths = [self.groups[i].window or 1 for i in self.part_groups(Part.WINDOW)]
        if not widths:
            return 0
        return math.ceil((max(widths) - 1) / self.tokens_per_chunk)

    def fingerprint(self) -> bytes:
        """32 bytes that name the canonical byte order of a chunk: dtype, and per group tokens and
        bytes a block."""
        encoder = Encoder("kvstore/layout/v1")
        encoder.text("dtype", self.dtype)
        encoder.number("tokens_per_chunk", self.tokens_per_chunk)
        for group in self.groups:
            encoder.number("tokens_per_block", group.tokens_per_block)
            encoder.number("window", group.window or 0)
            for span in group.tensors:
                encoder.number("block_bytes", span.block_bytes)
            encoder.number("tensors", len(group.tensors))
        return hashlib.sha256(encoder.encoded()).digest()

    def _validate_chunk(self) -> None:
        common = math.lcm(*(group.tokens_per_block for group in self.groups))
        chunk = self.tokens_per_chunk
        if not 1 <= chunk <= TOKENS_PER_CHUNK_MAX or chunk % common:
            sizes = ", ".join(f"{g.name}={g.tokens_per_block}" for g in self.groups)
            valid = f"multiples of {common} up to {TOKENS_PER_CHUNK_MAX}"
            if common > TOKENS_PER_CHUNK_MAX:
                valid = f"none up to {TOKENS_PER_CHUNK_MAX}"
            raise LayoutMismatchError(
                f"layout: tokens_per_chunk={chunk} with tokens per block {sizes}; valid are {valid}"
            )


def _validate_group(group: LayerGroup) -> None:
    if group.tokens_per_block < 1:
        raise LayoutMismatchError(
            f"layout: group {group.name!r} has tokens_per_block={group.tokens_per_block}; "
            "valid is 1 or more"
        )
    if group.window is not None and group.window < 1:
        raise LayoutMismatchError(
            f"layout: group {group.name!r} has window={group.window}; valid is None or 1 or more"
        )
    if not 1 <= len(group.tensors) <= TENSORS_MAX:
        raise LayoutMismatchError(
            f"layout: group {group.name!r} has {len(group.tensors)} tensors; "
            f"valid are 1..{TENSORS_MAX}"
        )
    for number, span in enumerate(group.tensors):
        where = f"layout: group {group.name!r} tensor {number}"
        if span.block_bytes < 1 or span.num_blocks < 1 or span.offset_bytes < 0:
            raise LayoutMismatchError(
                f"{where}: offset_bytes={span.offset_bytes} block_bytes={span.block_bytes} "
                f"num_blocks={span.num_blocks}; offsets are 0 or more, sizes and counts 1 or more"
            )
        if span.block_stride_bytes < span.block_bytes and span.num_blocks > 1:
            raise LayoutMismatchError(
                f"{where}: block_stride_bytes={span.block_stride_bytes} is less than "
                f"block_bytes={span.block_bytes}, so its blocks overlap"
            )
        if span.num_blocks >= NULL_BLOCK:
            raise LayoutMismatchError(
                f"{where}: num_blocks={span.num_blocks}; valid is less than 2^32-1"
            )


def _validate_spans(group: LayerGroup, memory_bytes: int) -> None:
    """Refuse spans outside the memory and spans that share a byte.

    Spans may interleave (block-major layouts place every layer's block side by side): those have
    one stride, and are disjoint if, and only if, their places within that stride are. So spans
    whose extents meet are kept by place, and a new one is compared with its two neighbours. Other
    groups may overlay the same bytes: engines share one pool of block IDs among their groups.
    """
    open_spans = _OpenSpans()
    for span in sorted(group.tensors, key=lambda span: (span.offset_bytes, span.end_bytes())):
        where = f"layout: group {group.name!r}"
        if span.end_bytes() > memory_bytes:
            raise LayoutMismatchError(
                f"{where} has a tensor at offset_bytes={span.offset_bytes} that ends at "
                f"{span.end_bytes()}, but the memory has {memory_bytes} bytes"
            )
        other = open_spans.add(span)
        if other is not None:
            raise LayoutMismatchError(
                f"{where} has tensors at offset_bytes={other.offset_bytes} and "
                f"{span.offset_bytes} that overlap (or interleave with different strides); "
                "register memory that several layers share once"
            )


class _OpenSpans:
    """Spans that reach beyond the one added last, by their place within their common stride."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, TensorSpan]] = []
        self._first_end = 0

    def add(self, span: TensorSpan) -> TensorSpan | None:
        """Add the span that starts next; returns a span that it shares a byte with."""
        start = span.offset_bytes
        if start >= self._first_end:
            self._places = [place for place in self._places if place[2].end_bytes() > start]
            ends = [place[2].end_bytes() for place in self._places]
            self._first_end = min(ends, default=span.end_bytes())
        for _, _, other in self._places[:1]:
            if other.num_blocks == 1 or other.block_stride_bytes != _stride(span, other):
                return other
        stride = max(span.block_stride_bytes, span.block_bytes)
        if self._places:
            stride = self._places[0][2].block_stride_bytes
        entry = (start % stride, len(self._places), span)
        index = bisect_left(self._places, entry[:2], key=lambda place: place[:2])
        for neighbour in (index - 1, index % max(1, len(self._places))):
            if self._places:
                other = self._places[neighbour][2]
                gap = (start - other.offset_bytes) % stride
                if gap < other.block_bytes or gap + span.block_bytes > stride:
                    return other
        self._places.insert(index, entry)
        self._first_end = min(self._first_end, span.end_bytes())
        return None


def _stride(span: TensorSpan, other: TensorSpan) -> int:
    """The stride of a span, which a single block takes from whatever it lies among."""
    return other.block_stride_bytes if span.num_blocks == 1 else span.block_stride_bytes
