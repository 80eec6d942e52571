"""SchedulerSide: what is loaded and stored, decided in vLLM's scheduler.

**Hits.** A lookup asks for whole chunks of all tokens but the last, so that vLLM always has one to
compute and every group's blocks end where the hit does. vLLM is told what lies beyond its own
prefix cache, and loads it asynchronously. While another request loads the same it is told to ask
again (loading.py). A request whose load failed is computed; it isn't looked up again.

**Stores.** When a step completes a chunk, its blocks are read by the daemon after that step. Until
every rank has reported the end of that store, the blocks have one more reference in vLLM's own
block pool. So neither the end of the request, nor preemption, nor a window that slides on can hand
them to somebody else, and nothing ever has to wait for the daemon: a stopped one merely keeps them,
up to ``held_blocks_max`` of all blocks. (Rejected: vLLM's delayed freeing, which covers the end of
a request only, and flushing before blocks are reused, which would stop the engine with the daemon.)
"""

from __future__ import annotations

import logging
import time
import uuid

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore import (
    ChunkKey,
    ChunkKeys,
    HitStatus,
    LayoutMismatchError,
    LookupResult,
    SchedulerSession,
)
from kvstore_vllm.adapter_reads import AdapterReads
from kvstore_vllm.adapters import Adapters
from kvstore_vllm.config import Settings
from kvstore_vllm.events import KVEvents
from kvstore_vllm.holding import Holding
from kvstore_vllm.layout import EngineShape
from kvstore_vllm.loading import OTHERS_WAIT_S, Loading
from kvstore_vllm.metrics import Counts
from kvstore_vllm.orders import GroupIDs, Load, Orders, Report, Store
from kvstore_vllm.requests import CHECK_S, Readiness, Tracked, prepare, track

LISTEN_S = 0.25
"""How long an idle vLLM steps on after a transfer, for the daemon to tell what came of it."""
OFFER_S = 1.0
"""How long an offer stands without another lookup, for a request that waits for blocks and is asked
about in every step; much less than a lease."""
_log = logging.getLogger("vllm.kvstore")


class SchedulerSide:
    """The scheduler's half. One thread uses it, vLLM's engine loop; the only wait is a lookup's
    round trip, which the client bounds."""

    def __init__(
        self,
        session: SchedulerSession,
        settings: Settings,
        shape: EngineShape,
    ) -> None:
        self.counts = Counts()
        self._session = session
        self._settings = settings
        self._groups = shape.groups
        self._chunk = shape.chunk
        self._ranks = shape.ranks
        self._retreat = shape.retreat()
        self._adapters = Adapters()
        self._reads = AdapterReads()
        self._requests: dict[str, Tracked] = {}
        self._wanted: dict[str, Load | None] = {}
        self._loading = Loading()
        self.held = Holding(shape, settings.held_blocks_max)
        self._revision = ""
        self._events: KVEvents | None = None
        self._listen_until_s = 0.0
        self._asked_again = False

    def bind(self, cache: KVCacheManager) -> None:
        """vLLM's cache manager, which knows each request's blocks."""
        self.held.bind(cache)

    def publish(self, config: KVCacheConfig, hash_tokens: int) -> None:
        """From now on tell of what the daemon gains and loses; vLLM hashes ``hash_tokens`` at a
        time."""
        self._events = KVEvents(config, self._groups, self._chunk, hash_tokens)

    def events(self) -> list[KVCacheEvent]:
        """vLLM's events of what the daemon gained and lost since the last call."""
        if self._events is None:
            return []
        self._events.hear(self._session.changes())
        found = self._events.take()
        self.counts.add("kv_events", len(found))
        return found

    def start(self, request: Request) -> None:
        """A request has come."""
        tracked = track(request, self._settings.read, self._settings.write, self._adapters)
        if tracked is not None:
            self._requests[request.request_id] = tracked

    def offer(self, request: Request, computed: int) -> int | None:
        """Tokens that can be loaded beyond the first ``computed``; None: ask again. Takes or renews
        the request's lease."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        now_s = time.monotonic()
        asked_again = tracked.offer is not None and tracked.offered_from == computed
        if asked_again and tracked.offer is not None and now_s < tracked.offer_ends_s:
            return tracked.offer_tokens
        tracked.offer = None
        chunks = (request.num_tokens - 1) // self._chunk
        least = max(1, self._settings.min_hit_tokens)
        if not tracked.reads or tracked.failed or chunks * self._chunk - computed < least:
            return 0
        ready = self._readiness(tracked, now_s)
        if ready is not Readiness.READY:
            return None if ready is Readiness.SOON else 0
        keys = tracked.keys()
        if keys is None or keys.tokens_per_chunk != self._chunk:
            return 0
        if self._waits_for_another(tracked, keys[computed // self._chunk], now_s):
            return None
        if self._events is not None:  # so that what the load leads to is told
            self._events.hear(self._session.changes())
        found = self._look_up(request.request_id, keys[:chunks])
        self.counts.add("lookup_seconds", time.monotonic() - now_s)
        if found.status is HitStatus.PENDING:
            return self._ask_again(tracked, now_s)
        self.counts.add("lookups", 1)
        tracked.probed_until_s = 0.0
        tracked.leased = found.status is HitStatus.HIT
        tracked.stored = found.chunks
        gain = found.chunks * self._chunk - self._retreat % self._chunk - computed
        if gain < least:
            self._release(tracked)
            return 0
        tracked.offer, tracked.offered_from = keys[: found.chunks], computed
        tracked.offer_tokens = gain
        tracked.offer_ends_s = now_s + OFFER_S
        self.counts.add("hits", 1)
        self.counts.add("hit_tokens", gain)
        return gain

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> bool:
        """vLLM has blocks for the request, and waits for ``tokens`` to be loaded into them; true
        where that can be ordered."""
        name = request.request_id
        tracked = self._requests.get(name)
        if tokens:
            if tracked is None or tracked.offer is None:
                raise LayoutMismatchError(f"vLLM waits for {tokens} tokens that weren't offered")
            end = tracked.offered_from + tokens
            first, last = tracked.offered_from // self._chunk, -(-end // self._chunk)
            ids = self._load_ids(blocks, (first, last), tracked.offered_from, end)
            self._wanted[name] = Load(name, tracked.offer[first:last], ids)
            self._loading.begin(name, tracked.offer[first:last])
            if self._events is not None:
                self._events.know(request, tracked.offer[first:last])
        elif tracked is not None:
            self._release(tracked)
        return True

    def lose(self, request: Request) -> None:
        """What vLLM waits for can't be ordered: have it reported as failed."""
        self._wanted[request.request_id] = None

    def orders(self, output: SchedulerOutput) -> Orders:
        """This step's orders for the workers. What was wanted is ordered, or given up, once."""
        wanted, self._wanted = self._wanted, {}
        loads = tuple(load for load in wanted.values() if load is not None)
        lost = tuple(name for name, load in wanted.items() if load is None)
        stores: list[Store] = []
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.writes:
                store = self._plan_store(tracked, scheduled)
                if store is not None:
                    stores.append(store)
        revision, self._revision = self._revision, ""
        idle = not output.num_scheduled_tokens
        listens = idle and (self._asked_again or time.monotonic() < self._listen_until_s)
        self._asked_again = False
        return Orders(loads, tuple(stores), lost, idle, listens, revision)

    def given_up(self) -> Orders:
        """Orders for when ``orders`` failed: all that vLLM waits for is lost, so it goes on."""
        wanted, self._wanted = self._wanted, {}
        revision, self._revision = self._revision, ""
        return Orders(lost=tuple(wanted), revision=revision)

    def forget(self) -> bool:
        """vLLM drops its connector's cache, for instance as its weights have changed: go on under a
        revision that nobody else has. The daemon is told at once, the workers with their next
        orders; until then lookups are misses."""
        self._revision = f"reset:{uuid.uuid4().hex}"
        self._session.set_revision(self._revision, timeout_s=self._settings.lookup_timeout_s)
        for tracked in self._requests.values():
            tracked.stored, tracked.offer, tracked.failed = 0, None, True
            tracked.writes = False
        return True

    def ended(self, output: KVConnectorOutput) -> None:
        """The workers' results of a step."""
        report = output.kv_connector_worker_meta
        if self._events is not None and (report is not None or output.finished_recving):
            self._listen_until_s = time.monotonic() + LISTEN_S
        if isinstance(report, Report):
            for number, ranks in report.ended.items():
                self.held.let_go(number, ranks)
            self._reads.add(report.read)
            for name in report.failed:
                tracked = self._requests.get(name)
                if tracked is not None:
                    tracked.failed, tracked.stored = True, 0
        for name in output.finished_recving or ():
            self._loading.end(name)
            tracked = self._requests.get(name)
            if tracked is not None:
                self._release(tracked)

    def finish(self, request: Request) -> None:
        """The request has ended, in whatever way."""
        self._loading.end(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._release(tracked)

    def busy(self) -> bool:
        """Whether stores are in flight, whose ends only further steps bring; or events of what has
        just ended, which vLLM publishes in its steps only."""
        return bool(self.held) or time.monotonic() < self._listen_until_s

    def close(self) -> None:
        """End the thread that reads adapters; the session is the client's."""
        self._adapters.close()

    # ------------------------------------------------------------ private

    def _readiness(self, tracked: Tracked, now_s: float) -> Readiness:
        """Whether what the request's keys depend on is known: its adapter's weights, which must be
        those that all ranks have read."""
        lora = tracked.request.lora_request
        if lora is not None and not self._reads.has(lora.lora_int_id, self._ranks):
            return Readiness.NOT
        if not prepare(tracked, self._session, CHECK_S):
            waits = tracked.reads and now_s < tracked.waits_until_s
            self._asked_again = self._asked_again or waits
            return Readiness.SOON if waits else Readiness.NOT
        if tracked.files is not None and not self._reads.are_of(tracked.files):
            self._adapters.refuse(
                tracked.files.number, tracked.files.name, "vLLM has read other files of it"
            )
            tracked.reads = tracked.writes = False
            return Readiness.NOT
        return Readiness.READY

    def _waits_for_another(self, tracked: Tracked, chunk: ChunkKey, now_s: float) -> bool:
        """Whether another request loads what this one would: vLLM asks again when it has."""
        if not self._loading.is_for_another(tracked.request.request_id, chunk):
            return False
        if not tracked.others_until_s:
            tracked.others_until_s = now_s + OTHERS_WAIT_S
        return now_s < tracked.others_until_s

    def _look_up(self, name: str, keys: ChunkKeys) -> LookupResult:
        """The hit, or where its last chunk has to be computed anyway, the hit without: asked for,
        as its windows must be whole at its end."""
        found = self._session.lookup(name, keys)
        if self._retreat < self._chunk or found.status is not HitStatus.HIT:
            return found
        if found.chunks < 2:
            self._session.release(name)
            return LookupResult(HitStatus.MISS, 0, 0)
        return self._session.lookup(name, keys[: found.chunks - 1])

    def _ask_again(self, tracked: Tracked, now_s: float) -> int | None:
        """What a lookup is answered with while the daemon asks a remote tier: None, vLLM goes on
        with other requests; past the time that a lookup may take, a miss."""
        tracked.leased = True  # or will be, when the tier has answered
        if not tracked.probed_until_s:
            tracked.probed_until_s = now_s + self._settings.lookup_timeout_s
        if now_s < tracked.probed_until_s:
            self._asked_again = True
            return None
        self.counts.add("lookups", 1)
        tracked.probed_until_s = 0.0
        self._release(tracked)
        return 0

    def _release(self, tracked: Tracked) -> None:
        tracked.offer = None
        if tracked.leased:
            tracked.leased = False
            self._session.release(tracked.request.request_id)

    def _load_ids(
        self, blocks: KVCacheBlocks, chunks: tuple[int, int], start: int, end: int
    ) -> GroupIDs:
        """Block IDs of chunks [first, last): those that hold tokens of [start, end), which are this
        request's alone; None for the others, and in window groups for what has slid out."""
        found = []
        for group, own in zip(self._groups, blocks.blocks, strict=True):
            size = group.tokens_per_block
            from_token = start if group.window is None else max(start, end - group.window + 1)
            ids: list[int | None] = []
            for place in range(chunks[0] * self._chunk // size, chunks[1] * self._chunk // size):
                needed = (place + 1) * size > from_token and place * size < end
                block = own[place] if needed and place < len(own) else None
                real = block is not None and not block.is_null
                if needed and not real and group.window is None:
                    raise LayoutMismatchError(f"vLLM has no block {place} in group {group.name}")
                ids.append(block.block_id if block is not None and real else None)
            found.append(tuple(ids))
        return tuple(found)

    def _plan_store(self, tracked: Tracked, scheduled: int) -> Store | None:
        """A store of the chunks that this step completes, and the blocks held for it."""
        request = tracked.request
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self._settings.store_decoded:
            tokens = min(tokens, request.num_prompt_tokens)
        first, last = tracked.stored, tokens // self._chunk
        if last <= first:
            return None
        if not prepare(tracked, self._session, 0.0):
            return None
        keys = tracked.keys()
        if keys is None or keys.tokens_per_chunk != self._chunk or len(keys) < last:
            return None
        cut = self.held.cut(request.request_id, first, last)
        if cut is None:
            self.counts.add("stores_put_off", 1)
            return None
        last = first + self.held.chunks(cut)
        number = self.held.hold(cut)
        tracked.stored = last
        self.counts.add("stores", 1)
        if self._events is not None:
            self._events.know(request, keys[first:last])
        ids = tuple(
            tuple(None if block is None else block.block_id for block in group) for group in cut
        )
        return Store(number, request.request_id, keys[first:last], ids, tracked.files)
