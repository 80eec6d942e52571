"""Tracked: what the scheduler's side knows of one request, and what its keys depend on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from vllm.v1.request import Request

from kvstore import Adapter, ChunkKeys, ContentItem, RequestHasher, SchedulerSession
from kvstore_vllm.adapters import ADAPTER_WAIT_S, AdapterFiles, Adapters, UnknownWeightsError

CHECK_S = 0.002
"""How long a lookup waits for the check of its adapter's files: some 0.1 ms once they are known."""
READ, WRITE = "kvstore.read", "kvstore.write"
"""Keys of a request's ``kv_transfer_params``: false there opts it out."""


class Readiness(Enum):
    """Whether a request can be looked up: not now, soon (ask again), or yes."""

    NOT = 0
    SOON = 1
    READY = 2


@dataclass(slots=True)
class Tracked:
    """One request. Mutable.

    ``stored`` chunks from the start are known to be at the daemon or on their way there.
    ``offer`` is the hit that vLLM was told of, ``offer_tokens`` beyond ``offered_from`` of its
    own. Until ``probed_until_s`` its lookup waits for a remote tier's answer, until
    ``others_until_s`` for another request's load of the same. A request whose load ``failed`` is
    looked up no more, so that it can't fail for ever. One with an adapter has ``files`` once
    ``adapter`` is there, for which its lookups wait until ``waits_until_s``.
    """

    request: Request
    reads: bool
    writes: bool
    hasher: RequestHasher | None = None
    stored: int = 0
    offer: ChunkKeys | None = None
    offered_from: int = 0
    offer_tokens: int = 0
    offer_ends_s: float = 0.0
    leased: bool = False
    probed_until_s: float = 0.0
    others_until_s: float = 0.0
    failed: bool = False
    items: tuple[ContentItem, ...] = ()
    adapter: Future[AdapterFiles] | None = None
    files: AdapterFiles | None = None
    waits_until_s: float = 0.0

    def keys(self) -> ChunkKeys | None:
        """Keys of all full chunks of the tokens so far; None while there are none."""
        if self.hasher is None:
            return None
        keys = self.hasher.keys(self.request.all_token_ids)
        return keys if keys else None


def track(request: Request, reads: bool, writes: bool, adapters: Adapters) -> Tracked | None:
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
    tracked = Tracked(request, reads, writes, items=items)
    if request.lora_request is not None:
        tracked.adapter = adapters.check(request.lora_request)
        tracked.waits_until_s = time.monotonic() + ADAPTER_WAIT_S
    return tracked


def prepare(tracked: Tracked, session: SchedulerSession, wait_s: float) -> bool:
    """Make the request's hasher if it isn't there yet; False while its adapter is being checked.
    A request whose adapter nobody can tell is cached no more."""
    if tracked.hasher is not None:
        return True
    adapter: Adapter | None = None
    if tracked.adapter is not None:
        try:
            tracked.files = tracked.adapter.result(wait_s)
        except TimeoutError:
            return False
        except UnknownWeightsError:
            tracked.reads = tracked.writes = False
            return False
        adapter = Adapter(tracked.files.name, tracked.files.digest)
    salt = tracked.request.cache_salt or ""
    tracked.hasher = session.hasher(salt, adapter, tracked.items)
    return True
