"""kvstore: a disaggregated, multi-tier KV cache service for LLM inference engines.

What an engine needs is here: a ``Client``, what it registers, and what comes back. Importing it
needs neither numpy nor torch nor grpc.
"""

from kvstore.client import Client
from kvstore.client_session import (
    LookupResult,
    RequestHasher,
    SchedulerSession,
    SessionState,
    WorkerSession,
)
from kvstore.client_tickets import Ticket, TransferOutcome
from kvstore.client_watching import ChunkChange, ChunkChanges
from kvstore.core.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatchError,
    ProtocolError,
    SessionLostError,
)
from kvstore.core.keys import Adapter, ChunkKey, ChunkKeys, ContentItem, Namespace
from kvstore.core.layout import LayerGroup, Layout, Part, Shard, TensorSpan, TokenRows
from kvstore.core.messages import HitStatus, TierName
from kvstore.memory import CudaMemory, HostMemory, OwnedHostMemory, create_host_memory
from kvstore.wire import VERSION

__version__ = VERSION

__all__ = [
    "Adapter",
    "CapacityError",
    "ChunkChange",
    "ChunkChanges",
    "ChunkKey",
    "ChunkKeys",
    "Client",
    "ConfigError",
    "ContentItem",
    "CudaMemory",
    "HitStatus",
    "HostMemory",
    "KVStoreError",
    "LayerGroup",
    "Layout",
    "LayoutMismatchError",
    "LookupResult",
    "Namespace",
    "OwnedHostMemory",
    "Part",
    "ProtocolError",
    "RequestHasher",
    "SchedulerSession",
    "SessionLostError",
    "SessionState",
    "Shard",
    "TensorSpan",
    "Ticket",
    "TierName",
    "TokenRows",
    "TransferOutcome",
    "WorkerSession",
    "__version__",
    "create_host_memory",
]
