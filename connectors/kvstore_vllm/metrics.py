"""What the connector counts, in vLLM's own statistics and metrics.

A count is a number that only grows; each side adds to its own, and vLLM adds the sides and ranks
up. ``NAMES`` is the whole list: one place for logs and for Prometheus.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

NAMES = {
    "lookups": "Requests that were looked up at the daemon",
    "lookup_seconds": "Time that the scheduler waited for lookups",
    "hits": "Lookups that found something worth loading",
    "hit_tokens": "Tokens that lookups offered beyond vLLM's own prefix cache",
    "loads": "Loads that ended, failed ones included",
    "load_failures": "Loads that vLLM had to compute instead, wholly or in part",
    "load_seconds": "Time from asking for a load to its end, added up",
    "loaded_chunks": "Chunks loaded, of each rank",
    "stores": "Stores ordered",
    "stored_chunks": "Chunks stored, of each rank; those that were there already included",
    "dropped_chunks": "Chunks that the daemon didn't keep, of each rank",
    "stores_put_off": "Stores put off because stores in flight held too many blocks",
    "transfers_overdue": "Transfers past their deadline, which were asked to stop",
    "kv_events": "KV events published of what the daemon gained and lost",
    "errors": "Unexpected errors inside the connector, each answered with a miss",
}
_PREFIX = "vllm:kvstore_"


class Counts:
    """Counts since the last ``take``, and ``totals`` since the start; mutable."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._data: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Add to one count of NAMES."""
        if amount:
            self._data[name] = self._data.get(name, 0) + amount
            self.totals[name] = self.totals.get(name, 0) + amount

    def take(self) -> KVStoreStats | None:
        """What was counted, and start over; None where nothing was."""
        if not self._data:
            return None
        taken, self._data = self._data, {}
        return KVStoreStats(data=taken)


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """One interval's counts, by their names."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Start over."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Add another side's or rank's counts to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, rounded for the log."""
        return {f"kvstore {name}": round(amount, 4) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter a name of NAMES, per engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {name: self._counter(name, text) for name, text in NAMES.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)

    def _counter(self, name: str, text: str) -> dict[int, Counter]:
        counter = self._counter_cls(
            name=_PREFIX + name, documentation=text + ".", labelnames=self._labelnames
        )
        return {
            engine: counter.labels(*values)
            for engine, values in self.per_engine_labelvalues.items()
        }
