"""KVEvents: what the daemon gained and lost, as vLLM's KV events, for KV-aware routers.

The daemon tells of chunk keys; routers know vLLM's block hashes. Only who has seen a chunk's tokens
can say which blocks it holds, so events tell of the chunks that this engine has stored or loaded:
BlockStored when one can be loaded from host memory (medium CPU) or NVMe (STORAGE), BlockRemoved
when it can't any more. They look like those of vLLM's own blocks: the same hashes, tokens and extra
keys, per KV cache group. Groups with a sliding window come and go by themselves: what they keep of
a chunk is a part of its own at the daemon, which only the last chunks of a hit need.

What is remembered is limited. A chunk beyond it, and everything when the daemon is lost or told too
much too fast, is announced as removed: a router then expects too little, never too much.
AllBlocksCleared isn't used, as it would take vLLM's own blocks along.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from kvstore import ChunkChanges, ChunkKey, ChunkKeys, Part, TierName
from kvstore_vllm.layout import GroupShape

CHUNKS_MAX = 65_536
"""Chunks remembered: with 128 tokens each about 1 KB, 64 MB in all."""
REMOVED_MAX = 1024
"""Blocks named by one BlockRemoved."""
_Place = tuple[TierName, Part]
_MEDIUMS = {TierName.HOST: MEDIUM_CPU, TierName.NVME: MEDIUM_STORAGE}
_PLACES = tuple((tier, part) for tier in _MEDIUMS for part in Part)
_LOCALITY = "LOCAL"


@dataclass(frozen=True, slots=True)
class _Group:
    """A KV cache group whose blocks are told of."""

    number: int
    tokens_per_block: int
    part: Part
    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """One group's blocks of a chunk, as events name them."""

    group: _Group
    hashes: list[ExternalBlockHash]
    parent: ExternalBlockHash | None
    extra_keys: list[tuple[Any, ...] | None] | None


@dataclass(slots=True)
class _Known:
    """What events say of one chunk, and in which tiers which part of it was announced."""

    tokens: array[int]
    blocks: tuple[_Blocks, ...]
    lora_id: int | None
    lora_name: str | None
    announced: set[_Place] = field(default_factory=set)


class KVEvents:
    """The chunks that this engine can tell of, and the events that are due. One thread uses it."""

    def __init__(
        self, config: KVCacheConfig, shapes: Sequence[GroupShape], chunk: int, hash_tokens: int
    ) -> None:
        self._chunk = chunk
        self._hash_tokens = hash_tokens
        self._groups = tuple(_group(number, shape, config) for number, shape in enumerate(shapes))
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._due: list[KVCacheEvent] = []

    def know(self, request: Request, keys: ChunkKeys) -> None:
        """Remember what events of these chunks of the request say; its tokens are still there."""
        for place, key in enumerate(keys, keys.first):
            if key in self._known:
                self._known.move_to_end(key)
            else:
                self._known[key] = self._describe(request, place)
        while len(self._known) > CHUNKS_MAX:
            known = self._known.popitem(last=False)[1]
            for place in _PLACES:
                if place in known.announced:
                    self._due += _removed([known], place)

    def hear(self, changes: ChunkChanges) -> None:
        """The daemon has told something."""
        if changes.resync:
            self.void()
        leaving: list[_Known] = []
        last = _PLACES[0]
        for change in changes.changes:
            known, place = self._known.get(change.key), (change.tier, change.part)
            if known is None or change.present == (place in known.announced):
                continue
            if leaving and (change.present or place != last):
                self._due += _removed(leaving, last)
                leaving = []
            last = place
            if change.present:
                known.announced.add(place)
                self._due += _stored(known, place)
            else:
                known.announced.discard(place)
                leaving.append(known)
        self._due += _removed(leaving, last)

    def take(self) -> list[KVCacheEvent]:
        """The events that are due."""
        due, self._due = self._due, []
        return due

    def void(self) -> None:
        """Nothing that was announced can be counted on any more."""
        for place in _PLACES:
            leaving = [known for known in self._known.values() if place in known.announced]
            self._due += _removed(leaving, place)
        for known in self._known.values():
            known.announced.clear()

    # ------------------------------------------------------------ private

    def _describe(self, request: Request, place: int) -> _Known:
        start, stop = place * self._chunk, (place + 1) * self._chunk
        lora = request.lora_request
        return _Known(
            tokens=array("I", request.all_token_ids[start:stop]),
            blocks=tuple(self._blocks(group, request, start, stop) for group in self._groups),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
        )

    def _blocks(self, group: _Group, request: Request, start: int, stop: int) -> _Blocks:
        size = group.tokens_per_block
        hashes = resolve_block_hashes(request.block_hashes, self._hash_tokens, size)
        own = hashes[start // size : stop // size]
        extra = [_extra_keys(request, at, at + size) for at in range(start, stop, size)]
        return _Blocks(
            group,
            [maybe_convert_block_hash(block) for block in own],
            maybe_convert_block_hash(hashes[start // size - 1]) if start else None,
            to_event_extra_keys(extra),
        )


def _group(number: int, shape: GroupShape, config: KVCacheConfig) -> _Group:
    spec = config.kv_cache_groups[number].kv_cache_spec
    return _Group(
        number,
        shape.tokens_per_block,
        Part.FULL if shape.window is None else Part.WINDOW,
        get_kv_cache_spec_kind(spec).value,
        get_kv_cache_spec_sliding_window(spec),
    )


def _extra_keys(request: Request, start: int, stop: int) -> tuple[Any, ...] | None:
    first = get_mm_features_in_window(request.mm_features, start, stop)[0]
    keys: tuple[Any, ...] | None = generate_block_hash_extra_keys(request, start, stop, first)[0]
    return keys


def _stored(known: _Known, place: _Place) -> Iterator[KVCacheEvent]:
    for blocks in known.blocks:
        if blocks.group.part is not place[1]:
            continue
        yield BlockStored(
            block_hashes=list(blocks.hashes),
            parent_block_hash=blocks.parent,
            token_ids=known.tokens.tolist(),
            block_size=blocks.group.tokens_per_block,
            lora_id=known.lora_id,
            medium=_MEDIUMS[place[0]],
            lora_name=known.lora_name,
            extra_keys=blocks.extra_keys,
            group_idx=blocks.group.number,
            kv_cache_spec_kind=blocks.group.kind,
            kv_cache_spec_sliding_window=blocks.group.window,
            locality=_LOCALITY,
        )


def _removed(leaving: Sequence[_Known], place: _Place) -> Iterator[KVCacheEvent]:
    """Events of a limited size, each of one group."""
    for number, first in enumerate(leaving[0].blocks if leaving else ()):
        if first.group.part is not place[1]:
            continue
        hashes = [each for known in leaving for each in known.blocks[number].hashes]
        for start in range(0, len(hashes), REMOVED_MAX):
            yield BlockRemoved(
                block_hashes=hashes[start : start + REMOVED_MAX],
                medium=_MEDIUMS[place[0]],
                group_idx=first.group.number,
                locality=_LOCALITY,
            )
