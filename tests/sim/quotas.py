"""Quotas, seen from outside the core: what each tenant's chunks occupy, slot by slot."""

from __future__ import annotations

from collections import Counter

from kvstore.core.limits import TierLimits
from kvstore.core.messages import TierName
from kvstore.core.service import Service
from kvstore.core.slots import SlotState
from tests.sim.errors import SimulationError

_KEPT = (SlotState.RESERVED, SlotState.READY)


def check_quotas(service: Service, drawn_nvme: TierLimits | None) -> None:
    """No tenant holds more than its share of a tier; of NVMe only where the tier wasn't made
    smaller by a restart, as a scan finds again what fitted before."""
    state = service._state
    for tree in state.directory.trees():
        if tree.tier is TierName.NVME and state.limits.nvme != drawn_nvme:
            continue
        used: Counter[str] = Counter()
        for slab in tree.slabs.cuts():
            for slot in slab:
                if slot.owner is not None and slot.state in _KEPT:
                    used[slot.owner.space.tenant] += slab.slot_bytes
        total = tree.slabs.limits.slabs * tree.slabs.limits.slab_bytes
        for tenant, nbytes in used.items():
            share = state.limits.quotas.of(tenant)
            if share is not None and nbytes > share * total:
                raise SimulationError(
                    f"{tenant} holds {nbytes} bytes of {tree.tier.value}, more than {share} of it"
                )
