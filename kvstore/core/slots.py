"""Slot: a fixed-size place in a tier, and its life cycle.

=========  =======================  =========  ==========================================
state      verb                     state      condition
=========  =======================  =========  ==========================================
FREE       reserve                  RESERVED
RESERVED   commit                   READY      its bytes have landed
RESERVED   cancel                   CANCELLED
CANCELLED  free                     FREE       no Move holds it: its last Moved has come
READY      evict                    FREE       no Move holds it
READY      doom                     DOOMED
DOOMED     free                     FREE       no Move holds it
=========  =======================  =========  ==========================================

A Move holds each slot that it names, by its ID, from when it is made until its Moved; so only a
Moved frees a slot that a Move names. The generation rises on each return to FREE, and a Handle
from before is stale. Readers see READY only (and what a READ has landed is
handed on to those who wait for it, before its parent lets it commit).
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import TYPE_CHECKING, NamedTuple

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import MoveID, Place, TierName
from kvstore.core.words import Word

if TYPE_CHECKING:
    from kvstore.core.quotas import Account
    from kvstore.core.slabs import Slab
    from kvstore.core.tickets import Wait
    from kvstore.core.tree_nodes import Copy


class SlotState(Word):
    """Where a slot is in its life; see the module's table."""

    FREE = "free"
    RESERVED = "reserved"
    READY = "ready"
    CANCELLED = "cancelled"
    DOOMED = "doomed"


TRANSITIONS: dict[tuple[SlotState, str], SlotState] = {
    (SlotState.FREE, "reserve"): SlotState.RESERVED,
    (SlotState.RESERVED, "commit"): SlotState.READY,
    (SlotState.RESERVED, "cancel"): SlotState.CANCELLED,
    (SlotState.CANCELLED, "free"): SlotState.FREE,
    (SlotState.READY, "evict"): SlotState.FREE,
    (SlotState.READY, "doom"): SlotState.DOOMED,
    (SlotState.DOOMED, "free"): SlotState.FREE,
}


_NO_MOVES: frozenset[MoveID] = frozenset()


class Slot:
    """One slot of ``slab``. ``owner`` is the copy whose shard and part it keeps, None in FREE and
    in staging.

    There are millions, so sets and lists exist only while something is in them. ``landed``: a
    RESERVED slot's bytes are whole, and it waits for its parent to commit. ``leased``: a lease
    protects its owner. ``account`` is that of the tenant that holds it. ``waits`` are the tickets
    to tell when it commits or is cancelled.
    ``write_queued``: it waits for its write to NVMe, which isn't tried before ``write_again_s``
    where it was refused. ``shared``: it waits for its write to the remote tier, or is there.
    ``age``: its namespace's when its bytes were stored (spaces.py). ``sequence``: when a scan found
    it written; of two slots of one part the newer one counts.
    """

    __slots__ = (
        "account",
        "age",
        "generation",
        "holders",
        "index",
        "landed",
        "leased",
        "owner",
        "part",
        "payload_bytes",
        "sequence",
        "shard",
        "shared",
        "slab",
        "state",
        "waits",
        "write_again_s",
        "write_queued",
    )

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab = slab
        self.index = index
        self.state = SlotState.FREE
        self.generation = 0
        self.holders: Set[MoveID] = _NO_MOVES
        self.account: Account | None = None
        self.owner: Copy | None = None
        self.shard = 0
        self.part = Part.FULL
        self.payload_bytes = 0
        self.sequence = 0
        self.age = 0
        self.landed = False
        self.leased = False
        self.write_queued = False
        self.write_again_s = 0.0
        self.shared = False
        self.waits: Collection[Wait] = ()

    def __repr__(self) -> str:
        where = f"{self.slab.tier.value} {self.slab.number}.{self.index}"
        return f"Slot({where} {self.state.value} g{self.generation})"

    @property
    def place(self) -> Place:
        """Where its bytes lie."""
        slab = self.slab
        return Place(slab.tier, slab.number, self.index, slab.slot_bytes)

    @property
    def tier(self) -> TierName:
        """The tier that it is in."""
        return self.slab.tier

    def add_wait(self, wait: Wait) -> None:
        """One more to tell when it commits or is cancelled."""
        if isinstance(self.waits, dict):
            self.waits[wait] = None
        else:
            self.waits = {wait: None}

    def remove_wait(self, wait: Wait) -> bool:
        """One less to tell; False where it isn't among them."""
        if not isinstance(self.waits, dict) or wait not in self.waits:
            return False
        del self.waits[wait]
        return True

    def take_waits(self) -> Collection[Wait]:
        """Those to tell, who wait no longer."""
        waits, self.waits = self.waits, ()
        return waits

    def reserve(self, owner: Copy | None, shard: int, part: Part, payload_bytes: int) -> None:
        """FREE -> RESERVED, for ``payload_bytes`` bytes of ``owner``'s shard and part."""
        self._go("reserve")
        self.owner, self.shard, self.part = owner, shard, part
        self.age = 0 if owner is None else owner.space.age
        self.payload_bytes = payload_bytes
        if owner is not None and owner.leases:
            self.mark_leased(True)

    def charge(self, account: Account) -> None:
        """A tenant holds it from now on, until it is FREE."""
        self.account = account
        account.used_bytes += self.slab.slot_bytes

    def mark_leased(self, leased: bool) -> None:
        """Whether a lease protects its owner, which its slab counts."""
        self.slab.leased += leased - self.leased
        self.leased = leased

    def commit(self) -> None:
        """RESERVED -> READY; the bytes must have landed."""
        if not self.landed:
            raise InvariantError(f"{self!r}: commit before its bytes have landed")
        self._go("commit")
        self.slab.filled += 1

    def cancel(self) -> None:
        """RESERVED -> CANCELLED."""
        self._go("cancel")
        self.mark_leased(False)

    def evict(self) -> None:
        """READY -> FREE; no Move may hold it."""
        if self.holders:
            raise InvariantError(f"{self!r}: evict while Moves {sorted(self.holders)} hold it")
        self._go("evict")
        self.slab.filled -= 1
        self._clean()

    def doom(self) -> None:
        """READY -> DOOMED."""
        self._go("doom")
        self.mark_leased(False)

    def hold(self, move: MoveID) -> None:
        """A Move names the slot: it stays until ``let_go``."""
        if self.state is SlotState.FREE or move in self.holders:
            raise InvariantError(f"{self!r}: can't be held by Move {move}")
        if isinstance(self.holders, set):
            self.holders.add(move)
        else:
            self.holders = {move}
            self.slab.held += 1

    def let_go(self, move: MoveID) -> None:
        """The Move has ended."""
        if not isinstance(self.holders, set) or move not in self.holders:
            raise InvariantError(f"{self!r}: Move {move} doesn't hold it")
        self.holders.remove(move)
        if not self.holders:
            self.holders = _NO_MOVES
            self.slab.held -= 1

    def free_if_dead(self) -> bool:
        """CANCELLED or DOOMED -> FREE once no Move holds it; tells whether that happened."""
        if self.holders or self.state not in (SlotState.CANCELLED, SlotState.DOOMED):
            return False
        self.slab.filled -= self.state is SlotState.DOOMED
        self._go("free")
        self._clean()
        return True

    def _go(self, verb: str) -> None:
        after = TRANSITIONS.get((self.state, verb))
        if after is None:
            raise InvariantError(f"{self!r}: {verb} is not possible in this state")
        self.state = after

    def _clean(self) -> None:
        self.generation += 1
        self.mark_leased(False)
        if self.account is not None:
            self.account.used_bytes -= self.slab.slot_bytes
            self.account = None
        self.owner = None
        self.sequence = 0
        self.landed = False
        self.write_queued = False
        self.write_again_s = 0.0
        self.shared = False
        self.waits = ()


class Handle(NamedTuple):
    """A slot as it was when the handle was made."""

    slot: Slot
    generation: int

    @staticmethod
    def of(slot: Slot) -> Handle:
        """A handle to the slot's present use."""
        return Handle(slot, slot.generation)

    def is_stale(self) -> bool:
        """Whether the slot has been freed since."""
        return self.slot.generation != self.generation
