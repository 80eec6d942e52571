"""WorkerSide: one rank's registered memory, and the transfers under way in it.

It carries out the scheduler's orders and reports each one exactly once, when its blocks have come
back: with the transfer's outcome, with the acknowledgement of its cancel, or with the end of the
connection. A deadline only ever asks for a cancel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_node_count
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstore import Client, KVStoreError, LayoutMismatchError, Ticket, WorkerSession
from kvstore_vllm.adapter_reads import AdapterRead, AdapterReads, watch_loader
from kvstore_vllm.allocation import SharedAllocation
from kvstore_vllm.config import Settings
from kvstore_vllm.identity import check_engine, check_nodes, namespace_of
from kvstore_vllm.layout import describe, group_shapes, tokens_per_chunk
from kvstore_vllm.metrics import Counts
from kvstore_vllm.orders import GroupIDs, Load, Orders, Report, Store
from kvstore_vllm.ranks import shard_of

IDLE_WAIT_S = 0.005
"""How long a step without anything to compute waits for a transfer, so that the engine's loop
doesn't spin; a new request waits for that long at most."""
Guarded = Callable[[str, Callable[[], bool], bool], Any]
"""Calls something behind the connector's boundary: its name, the call, what an error is answered
with."""
SAY_AGAIN_S = 60.0
SAID_MAX = 64
_log = logging.getLogger("vllm.kvstore")


@dataclass(slots=True)
class _Open:
    """A transfer that hasn't ended, and when it is asked to stop."""

    ticket: Ticket
    started_s: float
    deadline_s: float
    cancelled: bool = False


class WorkerSide:
    """The worker's half. One thread uses it, vLLM's worker loop; it never waits for the daemon for
    longer than IDLE_WAIT_S but in ``register`` and ``close``."""

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig, settings: Settings) -> None:
        self.counts = Counts()
        self._config = config
        self._kv_config = kv_config
        self._settings = settings
        self._allocation = SharedAllocation("vllm-kv")
        self._client: Client | None = None
        self._session: WorkerSession | None = None
        self._names: tuple[str, ...] = ()
        self._orders = Orders()
        self._loads: dict[str, _Open] = {}
        self._stores: dict[int, _Open] = {}
        self._ended: list[int] = []
        self._failed: set[str] = set()
        self._unsaved: tuple[Store, ...] = ()
        self._unasked: list[str] = []
        self._failed_blocks: set[int] = set()
        self._said: dict[str, float] = {}
        self._reads = AdapterReads()
        self._read: list[AdapterRead] = []
        if config.lora_config is not None:
            watch_loader(config.parallel_config.rank, self._read.append)

    def allocation(self) -> SharedAllocation:
        """The context in which vLLM allocates its KV cache."""
        return self._allocation

    def register(self, views: Mapping[str, torch.Tensor]) -> None:
        """Register the KV memory with the daemon; refused, it says why once, and the engine runs on
        without the cache."""
        try:
            self._session = self._register(views)
        except KVStoreError as error:
            _log.warning("kvstore: the KV cache isn't registered, so nothing is reused: %s", error)

    def begin(self, orders: Orders, guarded: Guarded) -> None:
        """Take one step's orders. What isn't asked for in this step is reported as failed, or as
        ended. Stores of the step before that nobody asked for (vLLM doesn't end each step where it
        decodes speculatively) are asked for now: their blocks are held."""
        late, self._unsaved = self._unsaved, orders.stores
        self._orders = orders
        self._unasked = [load.request for load in orders.loads]
        self._ask_for(late, guarded)
        if orders.revision and self._session is not None:
            self._session.set_revision(orders.revision, timeout_s=0.0)

    def start_loads(self, guarded: Guarded) -> None:
        """Ask for this step's loads."""
        self._unasked = [
            load.request
            for load in self._orders.loads
            if not guarded("retrieve", partial(self._load, load), False)
        ]

    def start_stores(self, guarded: Guarded) -> None:
        """Ask for this step's stores: what they read was computed in this step or before."""
        stores, self._unsaved = self._unsaved, ()
        self._ask_for(stores, guarded)

    def results(self) -> KVConnectorTransferResults:
        """What has ended: each load once, also one that was never asked for."""
        orders, results = self._orders, KVConnectorTransferResults()
        self._orders = Orders()
        for request in (*self._unasked, *orders.lost):
            self._fail(request, results)
        self._unasked = []
        if orders.idle and not results.failed_recving:
            self._wait_a_moment(orders.listens)
        self._take_in()
        now_s = time.monotonic()
        for request, load in list(self._loads.items()):
            if self._is_over(load, now_s):
                del self._loads[request]
                self._finish_load(request, load, results, now_s)
        for number, store in list(self._stores.items()):
            if self._is_over(store, now_s):
                del self._stores[number]
                self._ended.append(number)
                outcome = store.ticket.outcome()
                done = sum(outcome.done) if outcome is not None else 0
                self.counts.add("stored_chunks", done)
                self.counts.add("dropped_chunks", store.ticket.chunks - done)
        return results

    def failed_blocks(self) -> set[int]:
        """Blocks that a load didn't fill, since the last call."""
        found, self._failed_blocks = self._failed_blocks, set()
        return found

    def report(self) -> Report | None:
        """What the scheduler's side must know of this step; None where nothing ended."""
        if not self._ended and not self._failed and not self._read:
            return None
        report = Report(dict.fromkeys(self._ended, 1), self._failed, tuple(self._read))
        self._ended, self._failed = [], set()
        self._reads.add(self._read)
        self._read.clear()
        return report

    def close(self) -> None:
        """Leave the daemon; waits for it two seconds at most."""
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ private

    def _register(self, views: Mapping[str, torch.Tensor]) -> WorkerSession:
        memory = self._allocation.memory
        if memory is None:
            raise LayoutMismatchError(self._allocation.reason)
        check_engine(self._config)
        if self._config.parallel_config.data_parallel_size == 1:
            check_nodes(get_node_count())
        shapes = group_shapes(self._kv_config)
        chunk = tokens_per_chunk(shapes, self._settings.tokens_per_chunk)
        layout = describe(self._kv_config, views, self._allocation.base, chunk)
        namespace = namespace_of(self._config, layout.dtype, self._settings.revision)
        self._names = tuple(shape.name for shape in shapes)
        self._client = Client(
            self._settings.socket,
            credential=self._settings.credential,
            lookup_timeout_s=self._settings.lookup_timeout_s,
        )
        session = self._client.register(
            engine_id=engine_id(self._config),
            namespace=namespace,
            layout=layout,
            memory=memory.describe(),
            shard=shard_of(self._config, self._kv_config),
        )
        _log.info(
            "kvstore: registered %d bytes, %d tokens a chunk, as %s",
            memory.nbytes, chunk, namespace.format,
        )  # fmt: skip
        return session

    def _ask_for(self, stores: Iterable[Store], guarded: Guarded) -> None:
        """Ask for stores; those that can't be asked for have ended."""
        for store in stores:
            if not guarded("store", partial(self._store, store), False):
                self._ended.append(store.number)

    def _load(self, load: Load) -> bool:
        """Ask for a load; tells whether it was."""
        if self._session is None:
            return False
        ticket = self._session.retrieve(load.request, load.keys, self._named(load.blocks))
        self._loads[load.request] = _opened(ticket, self._settings.load_timeout_s)
        return True

    def _store(self, store: Store) -> bool:
        """Ask for a store; tells whether it was."""
        if self._session is None:
            return False
        self._reads.add(self._read)
        if store.adapter is not None and not self._reads.are_of(store.adapter):
            self.counts.add("dropped_chunks", len(store.keys))
            self._say(f"nothing of adapter {store.adapter.name} is stored: vLLM read other files")
            return False
        ticket = self._session.store(store.request, store.keys, self._named(store.blocks))
        self._stores[store.number] = _opened(ticket, self._settings.store_timeout_s)
        return True

    def _named(self, blocks: GroupIDs) -> dict[str, tuple[int | None, ...]]:
        return dict(zip(self._names, blocks, strict=True))

    def _wait_a_moment(self, listens: bool) -> None:
        """Wait for the oldest load, or else store, or for what only the scheduler's side hears."""
        waiting = next(iter(self._loads.values()), None) or next(iter(self._stores.values()), None)
        if waiting is not None:
            waiting.ticket.wait(IDLE_WAIT_S)
        elif listens:
            time.sleep(IDLE_WAIT_S)

    def _take_in(self) -> None:
        """Take in what the daemon has said: looking after the oldest transfer settles all that have
        ended on its connection, the next one's turn comes when it has ended."""
        for transfers in (self._loads, self._stores):
            for oldest in transfers.values():
                if not oldest.ticket.done():
                    break

    def _is_over(self, transfer: _Open, now_s: float) -> bool:
        """Whether the blocks have come back; past the deadline it is asked to stop, once."""
        if transfer.ticket.settled:
            return True
        if now_s >= transfer.deadline_s and not transfer.cancelled:
            transfer.cancelled = True
            self.counts.add("transfers_overdue", 1)
            transfer.ticket.cancel()
        return False

    def _finish_load(
        self, request: str, load: _Open, results: KVConnectorTransferResults, now_s: float
    ) -> None:
        outcome = load.ticket.outcome()
        self.counts.add("load_seconds", now_s - load.started_s)
        self.counts.add("loads", 1)
        if outcome is not None and all(outcome.done):
            self.counts.add("loaded_chunks", load.ticket.chunks)
            results.finished_recving.add(request)
            return
        self.counts.add("loaded_chunks", 0 if outcome is None else outcome.leading_chunks)
        failed = {} if outcome is None else outcome.failed_blocks
        reason = "" if outcome is None else outcome.reason
        if reason:
            self._say(f"loads fail, vLLM computes instead: {reason}")
        if len(self._names) == 1 and failed:
            self._failed_blocks.update(failed[self._names[0]])
            self._failed.add(request)
            self.counts.add("load_failures", 1)
            results.finished_recving.add(request)
        else:
            self._fail(request, results)

    def _say(self, text: str) -> None:
        """Say why something isn't reused, once in SAY_AGAIN_S."""
        now_s = time.monotonic()
        if now_s >= self._said.get(text, 0.0):
            if len(self._said) >= SAID_MAX:
                self._said.clear()
            self._said[text] = now_s + SAY_AGAIN_S
            _log.warning("kvstore: %s", text)

    def _fail(self, request: str, results: KVConnectorTransferResults) -> None:
        """Report a load as failed as a whole: vLLM computes all of the request."""
        self._failed.add(request)
        self.counts.add("load_failures", 1)
        results.failed_recving.add(request)
        results.finished_recving.add(request)


def _opened(ticket: Ticket, timeout_s: float) -> _Open:
    now_s = time.monotonic()
    return _Open(ticket, now_s, now_s + timeout_s)


def engine_id(config: VllmConfig) -> str:
    """The name under which all processes of this engine meet at the daemon."""
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.engine_id:
        raise LayoutMismatchError("kv_transfer_config: there is no engine_id")
    return str(transfer.engine_id)
