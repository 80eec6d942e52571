"""ChunkKey: what a chunk *is*. Two chunks share a key only if their KV must be the same bytes.

A key is SHA-256, chained chunk by chunk from a root that covers the namespace (model, revision,
configuration, format, layout fingerprints, parallel shape), the adapter and the request salt. Each
link covers the previous key, the chunk's token IDs as u32 and the multi-modal items that overlap
it. Every field is tagged and length-prefixed (canonical.Encoder), so nothing depends on
``hash()``, on PYTHONHASHSEED or on the process. Fields that are absent are left out: keys of
requests without adapter, salt or items don't change when such a field is added.

``tests/golden_keys.json`` pins the values for ever.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType, overload

from kvstore.core.canonical import Encoder
from kvstore.core.layout import Shard

ChunkKey = NewType("ChunkKey", bytes)
KEY_BYTES = 32
NO_PARENT = ChunkKey(bytes(KEY_BYTES))
"""Stands for the parent of a root chunk."""
HASH_ALGORITHM = "sha256/chain-v1"
"""Named in the handshake: sides that hash differently are refused at once."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose KV it is: everything that must be equal before one engine may use another's chunks.

    ``model`` is the path or repository of the weights, ``revision`` their commit or digest,
    ``format`` engine, layout name, backend and packing, ``config`` a digest of the effective model
    configuration (rope, quantisation, KV scales). ``alias`` is the name shown to people; it is no
    part of the identity.
    """

    model: str
    revision: str
    format: str
    config: str = ""
    alias: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or other adapter: its name and a digest of its weights. Engine-local integer IDs
    never enter."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class ContentItem:
    """A multi-modal item: the placeholder tokens [start, start + length) stand for content with
    this digest."""

    digest: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class KeyContext:
    """What a request's keys depend on beside its tokens."""

    salt: str = ""
    adapter: Adapter | None = None
    items: tuple[ContentItem, ...] = ()


def namespace_digest(
    namespace: Namespace,
    dtype: str,
    tokens_per_chunk: int,
    shard: Shard,
    fingerprints: Sequence[bytes],
) -> bytes:
    """32 bytes that name a namespace: its fields, KV dtype, chunk size, parallel shape and each
    shard's fingerprint."""
    encoder = Encoder("kvstore/namespace/v1")
    for tag in ("model", "revision", "format", "config"):
        encoder.text(tag, getattr(namespace, tag))
    encoder.text("dtype", dtype)
    encoder.number("tokens_per_chunk", tokens_per_chunk)
    for tag in ("tp_size", "pp_size", "replicas"):
        encoder.number(tag, getattr(shard, tag))
    for fingerprint in fingerprints:
        encoder.raw("fingerprint", fingerprint)
    return hashlib.sha256(encoder.encoded()).digest()


class ChunkKeys(Sequence[ChunkKey]):
    """Consecutive chunk keys of one token sequence: key *i* covers all tokens up to the end of
    chunk ``first + i``.

    ``data`` is ``len * 32`` bytes and travels as it is. A slice keeps its place in the chain
    (``first`` and ``parent``), which a store needs. ``num_tokens`` counts the whole sequence, the
    tail of no chunk included. Immutable.
    """

    __slots__ = ("data", "first", "num_tokens", "parent", "tokens_per_chunk")

    def __init__(
        self,
        data: bytes,
        tokens_per_chunk: int,
        num_tokens: int,
        first: int = 0,
        parent: ChunkKey = NO_PARENT,
    ) -> None:
        if len(data) % KEY_BYTES:
            raise ValueError(f"keys: {len(data)} bytes; valid are multiples of {KEY_BYTES}")
        self.data = data
        self.tokens_per_chunk = tokens_per_chunk
        self.num_tokens = num_tokens
        self.first = first
        self.parent = parent

    def __len__(self) -> int:
        return len(self.data) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> ChunkKeys: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | ChunkKeys:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"keys: slice step {step}; valid is 1, as keys are a chain")
            stop = max(start, stop)
            parent = self.parent if start == 0 else self[start - 1]
            data = self.data[start * KEY_BYTES : stop * KEY_BYTES]
            return ChunkKeys(
                data, self.tokens_per_chunk, self.num_tokens, self.first + start, parent
            )
        place = range(len(self))[index] * KEY_BYTES
        return ChunkKey(self.data[place : place + KEY_BYTES])

    def __iter__(self) -> Iterator[ChunkKey]:
        data = self.data
        return (ChunkKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkKeys):
            return NotImplemented
        return (self.data, self.first, self.parent) == (other.data, other.first, other.parent)

    def __hash__(self) -> int:
        return hash((self.data, self.first))

    def __repr__(self) -> str:
        return f"ChunkKeys(first={self.first}, len={len(self)}, tokens={self.num_tokens})"


@dataclass(slots=True)
class PrefixHasher:
    """Computes keys incrementally: feed the tokens seen so far again and again, only new chunks
    are hashed.

    One hasher serves one request; ``keys(tokens)`` expects the same tokens with more behind them
    (decoding). Token IDs are integers in [0, 2^32), in a list, tuple, ``array('I')`` or any buffer
    of u32.
    """

    digest: bytes
    tokens_per_chunk: int
    context: KeyContext = field(default_factory=KeyContext)
    _data: bytearray = field(default_factory=bytearray)
    _last: bytes = b""
    _items: tuple[ContentItem, ...] = ()
    _starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tokens_per_chunk < 1:
            raise ValueError(f"keys: tokens_per_chunk={self.tokens_per_chunk}; valid is 1 or more")
        self._items = tuple(sorted(self.context.items, key=lambda i: (i.start, i.length, i.digest)))
        self._starts = [item.start for item in self._items]
        self._last = self._root()

    def keys(self, tokens: Sequence[int]) -> ChunkKeys:
        """Keys of all full chunks of ``tokens``; raises ValueError for a token that isn't a u32."""
        size = self.tokens_per_chunk
        done = len(self._data) // KEY_BYTES
        full = len(tokens) // size
        pack = struct.Struct(f"<{size}I").pack
        prefix = _chunk_prefix(size)
        sha256, data = hashlib.sha256, self._data
        native = isinstance(tokens, array) and tokens.typecode == "I"
        for number in range(done, full):
            start = number * size
            part = tokens[start : start + size]
            try:
                packed = part.tobytes() if native else pack(*part)  # type: ignore[attr-defined]
            except struct.error as error:
                raise ValueError(f"keys: tokens {start}..{start + size - 1}: {error}") from error
            digest = sha256(prefix)
            digest.update(self._last)
            digest.update(packed)
            if self._items:
                digest.update(self._overlapping(start, start + size))
            self._last = digest.digest()
            data += self._last
        return ChunkKeys(bytes(data[: full * KEY_BYTES]), size, len(tokens))

    def _root(self) -> bytes:
        encoder = Encoder("kvstore/root/v1")
        encoder.raw("namespace", self.digest)
        if self.context.adapter is not None:
            encoder.text("adapter_name", self.context.adapter.name)
            encoder.text("adapter_digest", self.context.adapter.digest)
        if self.context.salt:
            encoder.text("salt", self.context.salt)
        return hashlib.sha256(encoder.encoded()).digest()

    def _overlapping(self, start: int, end: int) -> bytes:
        """Canonical bytes of the items that overlap tokens [start, end), placed relative to
        ``start``."""
        encoder: Encoder | None = None
        for item in self._items[: bisect_left(self._starts, end)]:
            if item.start + item.length <= start:
                continue
            encoder = encoder or Encoder("items")
            encoder.text("digest", item.digest)
            encoder.number("start", item.start - start)
            encoder.number("length", item.length)
        return encoder.encoded() if encoder else b""


def prefix_keys(
    digest: bytes, tokens_per_chunk: int, tokens: Sequence[int], context: KeyContext | None = None
) -> ChunkKeys:
    """Keys of all full chunks of ``tokens`` in the namespace ``digest``."""
    return PrefixHasher(digest, tokens_per_chunk, context or KeyContext()).keys(tokens)


PROBE_TOKENS: tuple[int, ...] = tuple((i * 2654435761) % 151_936 for i in range(512))


def golden_probe() -> bytes:
    """The last key of a fixed list of 512 tokens with every kind of field: what each side must
    compute alike."""
    context = KeyContext(
        salt="probe", adapter=Adapter("adapter", "digest"), items=(ContentItem("item", 100, 200),)
    )
    return prefix_keys(hashlib.sha256(b"kvstore/probe").digest(), 128, PROBE_TOKENS, context)[-1]


def _chunk_prefix(tokens_per_chunk: int) -> bytes:
    """What stands before each link: its length is fixed by the chunk size, so fields can't run
    into one another."""
    encoder = Encoder("kvstore/chunk/v1")
    encoder.number("parent_bytes", KEY_BYTES)
    encoder.number("token_bytes", tokens_per_chunk * 4)
    return encoder.encoded()
