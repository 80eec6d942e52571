"""Limits: every bound that the core keeps, fixed at start by the composition root."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore.core.layout import Layout, Part
from kvstore.core.messages import TierName
from kvstore.core.quotas import NO_QUOTAS, Quotas

ALIGN_BYTES = 4096
HEADER_BYTES = 4096
"""A slot at rest begins with its header; host slots have none."""
SOCKET_PATH_BYTES_MAX = 107
"""Of a Unix socket's path: the kernel's sun_path has 108 bytes, one of them for the final zero."""


def slot_bytes(tier: TierName, payload_bytes: int) -> int:
    """Size of the slot that keeps this many bytes of payload in a tier."""
    header = 0 if tier is TierName.HOST else HEADER_BYTES
    return header + -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Partial(Enum):
    """What an engine gets that doesn't register all of its KV: hits on what it did, or misses."""

    SERVE = "serve"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class TierLimits:
    """A local tier's size: ``slabs`` slabs of ``slab_bytes``; the total is a limit and is never
    exceeded."""

    slabs: int
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """What the core keeps of the remote tier, and asks of it at a time."""

    probe_s: float = 0.02
    """So long a lookup waits for its probe; then the local answer stands."""
    probes_max: int = 64
    """Probes for lookups at a time; beyond it a lookup gets its local answer at once."""
    probe_names_max: int = 8192
    """Values that one probe asks for: keys x shards x parts; what is beyond isn't looked for."""
    waiters_max: int = 1024
    """Lookups that wait for a probe at a time; beyond it one gets its local answer at once."""
    waiting_bytes_max: int = 64 << 20
    """Keys that they keep."""
    answers_max: int = 4096
    """Answers of probes that are remembered, each for ``answer_s``."""
    answer_bytes_max: int = 8 << 20
    """Keys kept with them."""
    answer_s: float = 1.0
    """For so long an answer, or that none came in time, is taken for the next lookups, too."""
    read_depth: int = 4
    write_depth: int = 4
    backlog_max: int = 16_384
    """Chunk parts that wait for their write (they hold no pin); beyond it they are dropped and
    counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, depths and deadlines of the core.

    Host memory in all = (host.slabs + staging_slots) * host.slab_bytes: staging slot i is slab
    host.slabs + i, whole. ``nvme`` None: no NVMe tier; ``remote`` None: no Redis tier.
    """

    host: TierLimits
    nvme: TierLimits | None = None
    remote: RemoteLimits | None = None
    staging_slots: int = 4
    lease_s: float = 60.0
    """A lease ends this long after its last lookup; it protects presence only."""
    leases_max: int = 65_536
    """Leases at a time; beyond it the one whose deadline is next ends early."""
    session_bytes_max: int = 4 << 30
    """Bytes of stores in flight per session; beyond it a store is refused at once."""
    transfers_max: int = 4096
    """Stores and retrieves in flight per session; beyond it one is refused at once."""
    copy_depth: int = 4
    """LOAD Moves handed out at a time, and STORE and LOAD Moves in all unless LOADs exceed it; the
    rest waits in the core, where sessions take turns."""
    read_depth: int = 8
    write_depth: int = 4
    answer_first_s: float = 0.0
    """So long no write to a lower tier is handed out after the last STORE: its engine is being
    answered, and wants a core for it."""
    write_backlog_max: int = 65_536
    """Chunk parts that wait for their write to NVMe (they hold no pin); beyond it they are dropped
    and counted."""
    write_budget_bytes_s: int = 0
    """Bytes a second that may enter NVMe, averaged over ``write_burst_s``; 0 is no limit."""
    write_burst_s: float = 10.0
    admit_after: int = 1
    """A chunk enters NVMe at its n-th store."""
    sweep_entries: int = 300
    """Hidden chunks of each tier freed per Tick."""
    partial: Partial = Partial.SERVE
    """What engines get that don't register all of their KV (Layout.uncached)."""
    sessions_max: int = 1024
    """Sessions at a time; beyond it a registration is refused."""
    quotas: Quotas = NO_QUOTAS
    """How much of each local tier a tenant may hold."""
    nvme_retry_s: float = 30.0
    """After a full disk, this long until the tier tries to grow again."""

    def too_large(self, layout: Layout) -> str:
        """Why no slab can hold a chunk of this layout, in one line; empty if each can."""
        for tier, limits in ((TierName.HOST, self.host), (TierName.NVME, self.nvme)):
            for part in Part if limits is not None else ():
                size = slot_bytes(tier, layout.part_bytes(part))
                if limits is not None and size > limits.slab_bytes:
                    return (
                        f"layout: a chunk needs a slot of {size} bytes, but "
                        f"{tier.value}.slab_size is {limits.slab_bytes}; "
                        "use fewer tokens a chunk or larger slabs"
                    )
        return ""
