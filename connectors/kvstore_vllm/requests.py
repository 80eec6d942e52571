"""Tracked: what the scheduler's side knows of one request, and what its keys depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.request import Request

from kvstore import Adapter, ChunkKeys, ContentItem, RequestHasher, SchedulerSession
from kvstore_vllm.adapters import AdapterDigests

READ, WRITE = "kvstore.read", "kvstore.write"
"""Keys of a request's ``kv_transfer_params``: false there opts it out."""


@dataclass(slots=True)
class Tracked:
    """One request. Mutable.

    ``stored`` chunks from the start are known to be at the daemon or on their way there.
    ``offer`` is the hit that vLLM was told of, beyond ``offered_from`` tokens of its own. A
    request whose load ``failed`` is looked up no more, so that it can't fail for ever.
    """

    request: Request
    reads: bool
    writes: bool
    hasher: RequestHasher | None = None
    stored: int = 0
    offer: ChunkKeys | None = None
    offered_from: int = 0
    offer_ends_s: float = 0.0
    leased: bool = False
    failed: bool = False
    items: tuple[ContentItem, ...] = field(default_factory=tuple)

    def keys(self) -> ChunkKeys | None:
        """Keys of all full chunks of the tokens so far; None while there are none."""
        if self.hasher is None:
            return None
        keys = self.hasher.keys(self.request.all_token_ids)
        return keys if keys else None


def track(request: Request, reads: bool, writes: bool) -> Tracked | None:
    """Begin with a request; None for one whose KV isn't named by its tokens, or that opted out."""
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return None
    if request.resumable or not request.prompt_token_ids:
        return None
    wishes = request.kv_transfer_params
    if isinstance(wishes, Mapping):
        reads = reads and wishes.get(READ, True) is not False
        writes = writes and wishes.get(WRITE, True) is not False
    if request.skip_reading_prefix_cache:
        reads = False
    if not reads and not writes:
        return None
    items = tuple(
        ContentItem(item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features
    )
    return Tracked(request, reads, writes, items=items)


def prepare(tracked: Tracked, session: SchedulerSession, adapters: AdapterDigests) -> bool:
    """Make the request's hasher if it isn't there yet; False while its adapter's digest is being
    computed."""
    if tracked.hasher is not None:
        return True
    request = tracked.request
    adapter: Adapter | None = None
    if request.lora_request is not None:
        lora = request.lora_request
        digest = adapters.digest(lora.lora_int_id, lora.lora_name, lora.lora_path)
        if digest is None:
            return False
        adapter = Adapter(lora.lora_name, digest)
    tracked.hasher = session.hasher(request.cache_salt or "", adapter, tracked.items)
    return True
