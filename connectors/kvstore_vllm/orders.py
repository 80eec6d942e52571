"""What travels between the connector's two sides with each step: orders down, a report up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore import ChunkKeys
from kvstore_vllm.adapter_reads import AdapterRead
from kvstore_vllm.adapters import AdapterFiles

GroupIDs = tuple[tuple[int | None, ...], ...]
"""Per group of the layout, block IDs in token order; None where there is no block to touch."""


@dataclass(frozen=True, slots=True)
class Load:
    """Have chunks written into a request's blocks, which are the daemon's until it is done."""

    request: str
    keys: ChunkKeys
    blocks: GroupIDs


@dataclass(frozen=True, slots=True)
class Store:
    """Have chunks read from blocks that the scheduler holds until every rank has reported
    ``number``; not where vLLM has read other files of the ``adapter`` that they were computed with.
    """

    number: int
    request: str
    keys: ChunkKeys
    blocks: GroupIDs
    adapter: AdapterFiles | None = None


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders. ``lost`` are requests whose load couldn't be ordered and must be reported
    as failed. ``idle``: the step computes nothing, so the worker may wait a moment for a transfer;
    ``listens``: for something that only the scheduler's side hears of, too. ``revision``, if any,
    names the weights from now on."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    lost: tuple[str, ...] = ()
    idle: bool = False
    listens: bool = False
    revision: str = ""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended in a step: stores, with the number of ranks that say so, and the requests whose
    load failed; and which adapters vLLM has ``read``."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    read: tuple[AdapterRead, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Add another rank's report."""
        assert isinstance(other, Report)
        ended = dict(self.ended)
        for number, ranks in other.ended.items():
            ended[number] = ended.get(number, 0) + ranks
        return Report(ended, self.failed | other.failed, self.read + other.read)
