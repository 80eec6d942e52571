"""Directory: which chunks are where. The trees of the local tiers, the staging slots, and the hit.

A hit of n chunks needs the FULL parts of [0, n) and the WINDOW parts of the last ``window_chunks``;
each tier is prefix-closed, so [0, host) comes from host memory and [host, n) from NVMe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.eviction import Policy
from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.limits import Limits
from kvstore.core.messages import LOCAL_TIERS, MoveID, TierName
from kvstore.core.slabs import Slab
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.stats import TenantStats, TierStats
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy


@dataclass(slots=True)
class TierCount:
    """Chunks of lookups that a tier had and hadn't."""

    hits: int = 0
    misses: int = 0


class Seen(NamedTuple):
    """What local tiers have of a chain: the FULL parts of [0, ``host``) and [0, ``nvme``), and a
    hit of ``chunks``."""

    host: int
    nvme: int
    chunks: int

    def run(self) -> int:
        """Leading chunks whose FULL parts are there."""
        return max(self.host, self.nvme)


class Directory:
    """The trees by tier, fastest first, and the staging ring."""

    def __init__(self, limits: Limits, policy: Callable[[], Policy]) -> None:
        self.host = Tree(TierName.HOST, limits.host, policy, limits.quotas)
        self.nvme = (
            None if limits.nvme is None else Tree(TierName.NVME, limits.nvme, policy, limits.quotas)
        )
        self._trees = (self.host,) if self.nvme is None else (self.host, self.nvme)
        self._counts = {tier: TierCount() for tier in LOCAL_TIERS}
        self._staging_from = limits.host.slabs
        size = limits.host.slab_bytes
        self._staging = [
            Slab(TierName.HOST, limits.host.slabs + number, size, 1).make(0)
            for number in range(limits.staging_slots)
        ]

    def trees(self) -> tuple[Tree, ...]:
        """The trees that there are."""
        return self._trees

    def tree(self, tier: TierName) -> Tree | None:
        """The tree of one tier."""
        return self.host if tier is TierName.HOST else self.nvme

    def see(self, space: Space, keys: bytes, window_chunks: int) -> Seen:
        """What there is of a chain of keys from its root, and the longest hit on it."""
        host = self.host.visible_run(space, keys)
        nvme = 0 if self.nvme is None else self.nvme.visible_run(space, keys)
        return Seen(host, nvme, self.step_down(space, keys, max(host, nvme), window_chunks))

    def pin(
        self, space: Space, keys: bytes, seen: Seen, window_chunks: int
    ) -> list[tuple[Tree, Copy]]:
        """The copies that the lease of a hit on ``keys`` pins; each is a use."""
        chunks = len(keys) // KEY_BYTES
        host = min(seen.host, chunks)
        pins = self._deepest(self.host, space, keys, host)
        if self.nvme is not None:
            below = self._deepest(self.nvme, space, keys, min(seen.nvme, chunks))
            pins += below if chunks > host else []
        for place in range(max(0, chunks - window_chunks), chunks):
            found = self._window(space, _key(keys, place))
            if found is not None:
                found[0].touch(found[1])
                pins.append(found)
        return pins

    def has_window(self, space: Space, key: bytes) -> bool:
        """Whether a local tier has a chunk's WINDOW part."""
        return self._window(space, key) is not None

    def count(self, asked: int, seen: Seen) -> None:
        """Count a lookup's chunks."""
        host = min(seen.host, seen.chunks)
        self._counts[TierName.HOST].hits += host
        self._counts[TierName.HOST].misses += asked - host
        self._counts[TierName.NVME].hits += seen.chunks - host
        self._counts[TierName.NVME].misses += asked - seen.chunks

    def tell(self, space: Space, key: bytes) -> None:
        """Have watchers told where a chunk is that an engine uses; nothing where nobody watches."""
        if not self.host.watched:
            return
        for tree in self.trees():
            copy = tree.find(space, key)
            if copy is not None:
                tree.changed += [(copy, part, True) for part in copy.visible_parts()]

    def let_go(self, slot: Slot, move: MoveID) -> None:
        """A Move that held a slot of any tier, or of the staging ring, has ended."""
        if self.is_staging(slot):
            slot.let_go(move)
            slot.free_if_dead()
            return
        tree = self.tree(slot.tier)
        if tree is not None:
            tree.let_go(slot, move)

    def stage(self, part: Part, shard: int, payload_bytes: int) -> Slot | None:
        """A RESERVED staging slot; None while all are in use."""
        for slot in self._staging:
            if slot.state is SlotState.FREE:
                slot.reserve(None, shard, part, payload_bytes)
                return slot
        return None

    def staging_for_remote(self) -> int:
        """Staging slots that reads from the remote tier may occupy."""
        return max(1, len(self._staging) // 2)

    def is_staging(self, slot: Slot) -> bool:
        """Whether the slot belongs to the staging ring."""
        return slot.tier is TierName.HOST and slot.slab.number >= self._staging_from

    def staging(self) -> list[Slot]:
        """All staging slots."""
        return self._staging

    def stats(self) -> tuple[TierStats, ...]:
        """A snapshot of each tier."""
        return tuple(map(self._tier_stats, self.trees()))

    def tenants(self) -> tuple[TenantStats, ...]:
        """What each tenant holds of each tier."""
        return tuple(
            TenantStats(account.tenant, tree.tier.value, account.used_bytes, account.quota_bytes)
            for tree in self.trees()
            for account in tree.accounts.all()
        )

    def _tier_stats(self, tree: Tree) -> TierStats:
        limits = tree.slabs.limits
        used = total = used_bytes = pinned = 0
        sizes: list[int] = []
        for slab in tree.slabs.cuts():
            used += slab.used()
            total += slab.capacity
            used_bytes += slab.used() * slab.slot_bytes
            pinned += slab.held
            sizes.append(slab.slot_bytes)
        if sizes:
            total += tree.slabs.uncut_count() * (limits.slab_bytes // max(sizes))
        count = self._counts[tree.tier]
        return TierStats(
            name=tree.tier.value,
            slots_used=used,
            slots_total=total,
            bytes_used=used_bytes,
            bytes_total=limits.slabs * limits.slab_bytes,
            chunks=tree.chunks,
            hits=count.hits,
            misses=count.misses,
            evictions=tree.evictions,
            pinned=pinned,
            scanning=tree.scanning,
            full=tree.slabs.growth_stopped,
        )

    def _deepest(
        self, tree: Tree, space: Space, keys: bytes, chunks: int
    ) -> list[tuple[Tree, Copy]]:
        """The deepest chunk that a tier has of a hit, which is a use also where a faster tier
        answers: what is asked for often should stay below when it leaves above."""
        copy = tree.find(space, _key(keys, chunks - 1)) if chunks else None
        if copy is None:
            return []
        tree.touch(copy)
        return [(tree, copy)]

    def step_down(self, space: Space, keys: bytes, chunks: int, window_chunks: int) -> int:
        """The longest hit up to ``chunks`` whose last ``window_chunks`` have their WINDOW parts."""
        whole = 0
        place = chunks
        while place > 0 and whole < window_chunks:
            place -= 1
            if self._window(space, _key(keys, place)) is not None:
                whole += 1
            else:
                chunks, whole = place, 0
        return chunks

    def _window(self, space: Space, key: bytes) -> tuple[Tree, Copy] | None:
        """A tier that has a chunk's WINDOW part."""
        for tree in self.trees():
            copy = tree.find(space, key)
            if copy is not None and copy.window_visible():
                return tree, copy
        return None


def _key(keys: bytes, place: int) -> bytes:
    return keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
