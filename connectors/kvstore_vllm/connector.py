"""KVStoreConnector: what vLLM calls. Each entry goes to one of the two sides, behind one guard.

A cache may always miss, so an unexpected error in an entry is logged once, counted and answered
with a miss, or with a load that vLLM has to compute itself. Nothing raises into vLLM's loop but
wrong settings, at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.version import __version__ as vllm_version

from kvstore import Client, KVStoreError
from kvstore.core.guard import guarded
from kvstore_vllm.allocation import SharedAllocation
from kvstore_vllm.config import settings_from
from kvstore_vllm.drafts import drafting
from kvstore_vllm.identity import check_engine
from kvstore_vllm.layout import EngineShape, group_shapes, tokens_per_chunk
from kvstore_vllm.metrics import Counts, KVStoreMetrics, KVStoreStats
from kvstore_vllm.orders import Orders
from kvstore_vllm.scheduler import SchedulerSide
from kvstore_vllm.versions import check_version
from kvstore_vllm.worker import WorkerSide, engine_id

Answer = TypeVar("Answer")
_log = logging.getLogger("vllm.kvstore")
check_version(vllm_version)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One side of the connector, by its role: the scheduler's or a worker's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings = settings_from(transfer.kv_connector_extra_config)
        settings = replace(
            settings,
            read=settings.read and transfer.is_kv_consumer,
            write=settings.write and transfer.is_kv_producer,
        )
        self._settings = settings
        self._client: Client | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._errors = Counts()
        self._logged: set[tuple[str, str]] = set()
        _log_as_vllm()
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)
        else:
            transfer.kv_load_failure_policy = settings.load_failure_policy
            _log.info("kvstore: kv_load_failure_policy=%s", settings.load_failure_policy)
            self._scheduler = self._attach()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later on, never a loss."""
        return False

    # ------------------------------------------------------------ the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's cache manager is there."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)
            wishes = self._vllm_config.kv_events_config
            if wishes is not None and wishes.enable_kv_cache_events:
                hash_tokens = kv_cache_manager.block_pool.hash_block_size
                self._scheduler.publish(self._kv_cache_config, hash_tokens)

    def on_new_request(self, request: Request) -> None:
        """A request has come."""
        side = self._scheduler
        if side is not None:
            self._guarded("on_new_request", lambda: side.start(request), None)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond vLLM's own, and that they are loaded asynchronously."""
        side = self._scheduler
        if side is None:
            return 0, False
        miss: int | None = 0
        gain = self._guarded("lookup", lambda: side.offer(request, num_computed_tokens), miss)
        return gain, bool(gain)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The blocks to load into."""
        side = self._scheduler
        if side is None:
            return
        done = self._guarded(
            "allocated", lambda: side.allocated(request, blocks, num_external_tokens), False
        )
        if num_external_tokens and not done:
            side.lose(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders."""
        side = self._scheduler
        if side is None:
            return Orders()
        orders = self._guarded("orders", lambda: side.orders(scheduler_output), None)
        return side.given_up() if orders is None else orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers report."""
        side = self._scheduler
        if side is not None:
            self._guarded("ended", lambda: side.ended(connector_output), None)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; its blocks may be freed, as stores hold theirs by themselves."""
        side = self._scheduler
        if side is not None:
            self._guarded("finish", lambda: side.finish(request), None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Everything that was stored so far is this engine's no more."""
        side = self._scheduler
        if side is None:
            return True
        return self._guarded("reset", side.forget, False)

    def has_pending_push_work(self) -> bool:
        """Keeps vLLM stepping until the stores in flight have ended."""
        return self._scheduler is not None and self._scheduler.busy()

    # ------------------------------------------------------------ the worker's side

    def get_mem_pool_context(self) -> SharedAllocation | None:
        """The context in which vLLM allocates KV memory that the daemon can map."""
        return None if self._worker is None else self._worker.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV memory is there."""
        side = self._worker
        if side is not None:
            self._guarded("register", lambda: side.register(kv_caches), None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        side = self._worker
        if side is not None and isinstance(connector_metadata, Orders):
            self._guarded("begin", lambda: side.begin(connector_metadata, self._guarded), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Ask for this step's loads."""
        side = self._worker
        if side is not None:
            self._guarded("start_loads", lambda: side.start_loads(self._guarded), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: stores are asked for when the step has been computed."""

    def wait_for_save(self) -> None:
        """Ask for this step's stores. Waits for nothing: their blocks are held."""
        side = self._worker
        if side is not None:
            self._guarded("start_stores", lambda: side.start_stores(self._guarded), None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The loads that have ended."""
        side = self._worker
        nothing = KVConnectorTransferResults()
        return nothing if side is None else self._guarded("results", side.results, nothing)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load didn't fill."""
        return set() if self._worker is None else self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's side must know."""
        return None if self._worker is None else self._worker.report()

    # ------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """What this side counted since the last call."""
        side = self._scheduler or self._worker
        stats = None if side is None else side.counts.take()
        errors = self._errors.take()
        if stats is not None and errors is not None:
            return stats.aggregate(errors)
        return stats or errors

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """Statistics of another process."""
        return KVStoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVStoreMetrics:
        """The connector's metrics."""
        return KVStoreMetrics(*arguments)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the daemon gained and lost, where vLLM publishes KV events."""
        side = self._scheduler
        nothing: list[KVCacheEvent] = []
        return nothing if side is None else self._guarded("events", side.events, nothing)

    def shutdown(self) -> None:
        """vLLM ends."""
        self._guarded("shutdown", self._close, None)

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._client is not None:
            self._client.close()

    def _attach(self) -> SchedulerSide | None:
        """The scheduler's side; None, and the reason in the log, where nothing can be cached."""
        config, settings = self._vllm_config, self._settings
        try:
            groups = group_shapes(self._kv_cache_config)
            chunk = tokens_per_chunk(groups, settings.tokens_per_chunk)
            check_engine(config)
            drafts = drafting(config)
            self._client = Client(
                settings.socket,
                credential=settings.credential,
                lookup_timeout_s=settings.lookup_timeout_s,
            )
            session = self._client.attach(engine_id(config))
        except KVStoreError as error:
            _log.warning("kvstore: nothing is reused: %s", error)
            return None
        ranks = config.parallel_config.world_size
        return SchedulerSide(session, settings, EngineShape(groups, chunk, ranks, drafts))

    def _guarded(self, verb: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The connector's one boundary: an error is logged once, counted, and is a miss."""

        def missed(error: Exception) -> Answer:
            self._errors.add("errors", 1)
            kind = (verb, type(error).__name__)
            if kind not in self._logged:
                self._logged.add(kind)
                _log.error("kvstore: %s failed; vLLM goes on without it", verb, exc_info=error)
            return otherwise

        return guarded(call, missed)


def _log_as_vllm() -> None:
    """Let what the client says (connected, lost, refused) appear where vLLM's own lines do."""
    client, handlers = logging.getLogger("kvstore"), logging.getLogger("vllm").handlers
    if client.handlers or not handlers:
        return
    for handler in handlers:
        client.addHandler(handler)
    client.setLevel(logging.INFO)
    client.propagate = False
