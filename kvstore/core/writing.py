"""Writing: host slots -> NVMe, after the commit and behind everything else.

A committed host slot is *considered*: with what is missing above it, from the head down, it joins a
bounded backlog that holds no pin. A WRITE is made only when a write lane is free: by then the slot
may have been evicted (counted), or its parent may not have made it (counted, as the tier is
prefix-closed). Admission is a byte budget and a count of stores.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from kvstore.core.chunk import slot_header
from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import MoveKind, MoveStatus
from kvstore.core.slots import Handle, Slot, SlotState
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.transfers import Job
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy

LOOKS = 256
"""Backlog entries that one event passes over because they need no write any more."""
CLIMB_MAX = 1024
"""Chunks above one that are brought up with it; where more are missing, a store of them will."""
_AGAIN_S = 1.0
"""A refused write, and what hangs on it, is tried again after this long."""


class Writing:
    """The backlog of writes to NVMe, and the end of a WRITE Move."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._backlog: deque[Handle] = deque()
        self._retry_at_s: float | None = None
        self._paused = False
        self._dropping = False

    def begin(self) -> None:
        """A new event begins."""
        self._paused = False

    def running(self) -> bool:
        """Whether the next write is still being looked for, at the next Tick."""
        return self._paused

    def step(self) -> None:
        """Nothing to do: each event ends with a look for the next write."""

    def __len__(self) -> int:
        return len(self._backlog)

    def consider(self, slot: Slot) -> None:
        """A host slot was committed or stored again: queue its write, and before it those of what
        it hangs on."""
        nvme, copy = self._state.directory.nvme, slot.owner
        if nvme is None or copy is None or not copy.live or slot.write_queued:
            return
        missing = self._missing_above(nvme, slot, copy)
        if isinstance(missing, Drop):
            self._refuse(slot, missing)
            return
        for link in [*missing, slot]:
            if not self._is_written(nvme, link) and not self._enter(link):
                break

    def next_write(self) -> Job | None:
        """The next WRITE, its slots held; None while there is nothing to write, or it has to wait
        for the scan or for its namespace's record."""
        nvme, looks = self._state.directory.nvme, LOOKS
        while nvme is not None and not nvme.scanning and self._backlog and not self._paused:
            if not looks:
                self._paused = True
                break
            looks -= 1
            handle = self._backlog[0]
            copy = handle.slot.owner
            live = not handle.is_stale() and copy is not None and copy.space.alive
            if live and copy is not None and not copy.space.persisted:
                if not self._dropping:
                    return None
                self._backlog.popleft()
                handle.slot.write_queued = False
                self._state.drop(Drop.NVME_WRITE_FAILED)
                continue
            self._backlog.popleft()
            job = self._start(nvme, handle)
            if job is not None:
                return job
        return None

    def moved(self, job: Job, status: MoveStatus) -> None:
        """A WRITE Move has ended."""
        nvme, source, target = self._state.directory.nvme, job.source, job.target
        if nvme is None or source is None or target is None:
            raise InvariantError(f"WRITE {job.id} lacks a tier or slot")
        source.write_queued = False
        if status is MoveStatus.OK:
            nvme.landed(target)
        else:
            full = status is MoveStatus.NO_SPACE
            if target.state is SlotState.RESERVED:
                nvme.fail(target, Drop.NVME_FULL if full else Drop.NVME_WRITE_FAILED)
            if full:
                self._stop_growth(nvme)
                nvme.slabs.refuse(target.slab.number)
            else:
                nvme.slabs.avoid(target.slab.number)
        self._state.let_go(job)

    def tick(self) -> None:
        """Let a tier that was full try to grow again."""
        nvme = self._state.directory.nvme
        if (
            nvme is not None
            and self._retry_at_s is not None
            and self._state.now >= self._retry_at_s
        ):
            nvme.slabs.growth_stopped = False
            self._retry_at_s = None

    def drop_unpersisted(self) -> None:
        """A namespace's record couldn't be made durable: nothing of it may be written, until
        ``await_records``."""
        self._dropping = True

    def await_records(self) -> None:
        """Records are durable, or tried again: what waits for one waits on."""
        self._dropping = False

    # ------------------------------------------------------------ private

    def _missing_above(self, nvme: Tree, slot: Slot, copy: Copy) -> list[Slot] | Drop:
        """What must be written before a slot, head first; or why that can't be now."""
        least = self._state.limits.admit_after
        if copy.stores < least:
            return Drop.NVME_ADMISSION
        missing: list[Slot] = []
        above = copy.parent if slot.part is Part.FULL else None
        while above is not None:
            full = above.slot(Part.FULL, slot.shard)
            if full is None or full.write_queued or self._is_written(nvme, full):
                break
            if above.stores < least:
                return Drop.NVME_ADMISSION
            if self._state.now < full.write_again_s:
                return Drop.NVME_PARENT_MISSING
            if len(missing) == CLIMB_MAX:
                return Drop.NVME_PARENT_MISSING
            missing.append(full)
            above = above.parent
        return missing[::-1]

    def _is_written(self, nvme: Tree, slot: Slot) -> bool:
        return slot.owner is not None and nvme.keeps(slot.owner.space, slot)

    def _enter(self, slot: Slot) -> bool:
        """Put one slot into the backlog."""
        state = self._state
        if slot.state is not SlotState.READY or state.now < slot.write_again_s:
            return False
        if len(self._backlog) >= state.limits.write_backlog_max:
            state.drop(Drop.NVME_BACKLOG)
            return False
        slot.write_queued = True
        self._backlog.append(Handle.of(slot))
        return True

    def _start(self, nvme: Tree, handle: Handle) -> Job | None:
        """Make the WRITE of a slot from the backlog, unless it can't or needn't be written now."""
        state, slot = self._state, handle.slot
        if handle.is_stale() or slot.state is not SlotState.READY or slot.owner is None:
            state.drop(Drop.EVICTED_BEFORE_WRITE)
            return None
        slot.write_queued = False
        if not slot.owner.live or not slot.owner.space.alive:
            state.drop(Drop.CLEARED)
            return None
        header = slot_header(slot, 0)
        if nvme.current(slot.owner.space, header) is not None:
            return None
        if not state.budget.has_room(header.payload_bytes, state.now):
            self._refuse(slot, Drop.NVME_BUDGET)
            return None
        target = nvme.reserve(slot.owner.space, header)
        if target is None:
            slot.write_queued = True
            self._backlog.appendleft(handle)
            self._paused = True
            return None
        if isinstance(target, Drop):
            missing = target is Drop.PARENT_MISSING
            self._refuse(slot, Drop.NVME_PARENT_MISSING if missing else target)
            return None
        target.age = slot.age
        state.budget.spend(header.payload_bytes)
        slot.write_queued = True
        state.sequence += 1
        header = replace(header, sequence=state.sequence)
        job = Job(state.transfers.next_id(), MoveKind.WRITE, header, source=slot, target=target)
        slot.hold(job.id)
        target.hold(job.id)
        return job

    def _refuse(self, slot: Slot, reason: Drop) -> None:
        """A write can't be made now. What hangs on it isn't tried for a while, or each chunk of a
        long chain would bring the whole chain up again; a chunk that was stored too seldom waits
        for nothing but its next store."""
        self._state.drop(reason)
        if reason is not Drop.NVME_ADMISSION:
            slot.write_again_s = self._state.now + _AGAIN_S

    def _stop_growth(self, nvme: Tree) -> None:
        """The device is full: cut no more slabs for a while."""
        nvme.slabs.growth_stopped = True
        self._retry_at_s = self._state.now + self._state.limits.nvme_retry_s
