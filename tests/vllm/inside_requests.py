"""The connector's parts against vLLM's own requests, as tests/vllm/inside.py against its
configurations: keys and KV events.
"""

from __future__ import annotations

from typing import Any

from kvstore_vllm.adapters import Adapters
from kvstore_vllm.events import KVEvents
from kvstore_vllm.layout import group_shapes
from kvstore_vllm.requests import prepare, track
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvstore import Adapter, ChunkChange, ChunkChanges, ContentItem, TierName
from kvstore.core.keys import ChunkKeys, KeyContext, prefix_keys
from kvstore.core.messages import LOCAL_TIERS
from tests.vllm.inside import KV, run


class Hashing:
    """What a session does for keys, without a daemon."""

    def hasher(self, salt: str, adapter: Adapter | None, items: tuple[ContentItem, ...]) -> Hashing:
        """The hasher of one request."""
        self.context = KeyContext(salt, adapter, items)
        return self

    def keys(self, tokens: list[int]) -> ChunkKeys:
        """Keys of chunks of 64 tokens."""
        return prefix_keys(b"d" * 32, 64, list(tokens), self.context)


def check_images_of_a_request_are_part_of_its_keys() -> None:
    """From the chunk on that an image begins in: another image, the same in another place, and none
    give other keys, though the tokens are the same; the same image gives the same."""

    def keys(*images: tuple[str, int]) -> list[bytes]:
        features = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 30))
            for name, offset in images
        ]
        tracked = track(request("r", mm_features=features), True, True, Adapters())
        assert tracked is not None
        assert prepare(tracked, Hashing(), 0.0)
        found = tracked.keys()
        assert found is not None
        return list(found)

    none, one, two = keys(), keys(("a", 70)), keys(("a", 70), ("b", 140))
    assert one == keys(("a", 70))
    assert [one[0], two[:2]] == [none[0], one[:2]]
    for other in (keys(("b", 70)), keys(("a", 71)), none):
        assert other[0] == one[0]
        assert not set(other[1:]) & set(one[1:])
    assert two[2] != one[2]


def request(name: str, **options: Any) -> Request:
    """A request of 200 tokens, as vLLM's scheduler has it."""
    init_none_hash(sha256)
    tokens = [(7 * n) % 1000 for n in range(200)]
    sampling = SamplingParams(max_tokens=1)
    return Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(16, sha256),
                   **options)  # fmt: skip


def own_events(asked: Request, size: int, group: int) -> list[BlockStored]:
    """What vLLM says of its own blocks when it has computed the request."""
    pool = BlockPool(64, True, 16, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(192 // size)
    pool.cache_full_blocks(asked, blocks, 0, 192 // size, size, group)
    return list(pool.take_events())


def check_events_name_blocks_as_vllm_does() -> None:
    """Hashes, parents, tokens, adapter, salt and images of each chunk's blocks are those that vLLM
    publishes of its own, for groups of other block sizes too; windows aren't told of."""
    image = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(20, 30))
    options: list[dict[str, Any]] = [
        {},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("a", 3, "/adapters/a")},
        {"mm_features": [image], "cache_salt": "salt"},
    ]
    specs = [FullAttentionSpec(**(KV | {"block_size": 16})),
             SlidingWindowSpec(**(KV | {"block_size": 16}), sliding_window=64),
             FullAttentionSpec(**KV)]  # fmt: skip
    groups = [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)]
    config = KVCacheConfig(64, [], groups)
    for number, option in enumerate(options):
        asked = request(f"r{number}", **option)
        events = KVEvents(config, group_shapes(config), 64, 16)
        keys = keys_of(asked)
        events.know(asked, keys[:2])
        events.know(asked, keys[2:])
        told = told_of(keys, TierName.HOST, True)
        events.hear(ChunkChanges(told))
        found = events.take()
        for group, size in ((0, 16), (2, 32)):
            (wanted,) = own_events(asked, size, group)
            mine = [e for e in found if e.group_idx == group]
            assert len(mine) == 3
            assert [h for e in mine for h in e.block_hashes] == wanted.block_hashes
            assert [t for e in mine for t in e.token_ids] == list(wanted.token_ids)
            assert [k for e in mine for k in e.extra_keys or ()] == wanted.extra_keys
            parents = [None] + [e.block_hashes[-1] for e in mine[:-1]]
            assert [e.parent_block_hash for e in mine] == parents
            for event in mine:
                assert event.block_size == size == wanted.block_size
                assert (event.lora_id, event.lora_name) == (wanted.lora_id, wanted.lora_name)
                assert event.medium == "CPU"
        assert {e.group_idx for e in found} == {0, 2}


def check_what_was_announced_is_taken_back() -> None:
    """By tier, once; nothing that wasn't announced; on a resync, and when too much is remembered,
    all of it."""
    config = KVCacheConfig(64, [], [KVCacheGroupSpec(["l"], FullAttentionSpec(**KV))])
    events = KVEvents(config, group_shapes(config), 64, 16)
    asked = request("r")
    keys = keys_of(asked)
    events.hear(ChunkChanges(told_of(keys, TierName.NVME, True)))
    assert events.take() == []
    events.know(asked, keys)
    for tier in LOCAL_TIERS:
        events.hear(ChunkChanges(told_of(keys, tier, True)))
        events.hear(ChunkChanges(told_of(keys, tier, True)))
    stored = events.take()
    assert [type(e) for e in stored] == [BlockStored] * 6
    hashes = [h for e in stored[:3] for h in e.block_hashes]
    for _ in range(2):
        events.hear(ChunkChanges(told_of(keys[1:2], TierName.NVME, False)))
    (gone,) = events.take()
    assert (gone.block_hashes, gone.medium, gone.group_idx) == (hashes[2:4], "STORAGE", 0)
    events.hear(ChunkChanges(resync=True))
    everything = events.take()
    assert all(type(e) is BlockRemoved for e in everything)
    assert {e.medium: sorted(e.block_hashes) for e in everything} == {
        "CPU": sorted(hashes), "STORAGE": sorted(hashes[:2] + hashes[4:]),
    }  # fmt: skip
    events.hear(ChunkChanges(resync=True))
    assert events.take() == []
    events.hear(ChunkChanges(told_of(keys, TierName.HOST, True)))
    assert len(events.take()) == 3
    import kvstore_vllm.events as module

    module.CHUNKS_MAX = 3
    other = request("other", cache_salt="other")
    events.know(other, keys_of(other)[:1])
    (forgotten,) = events.take()
    assert type(forgotten) is BlockRemoved
    assert forgotten.block_hashes == hashes[:2]


def keys_of(asked: Request) -> ChunkKeys:
    """Keys of its three chunks of 64 tokens."""
    salt = asked.cache_salt or ""
    return prefix_keys(b"d" * 32, 64, list(asked.all_token_ids), KeyContext(salt, None, ()))


def told_of(keys: ChunkKeys, tier: TierName, present: bool) -> tuple[ChunkChange, ...]:
    """The same of each."""
    return tuple(ChunkChange(key, tier, present) for key in keys)


if __name__ == "__main__":
    run(globals())
