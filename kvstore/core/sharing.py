"""Sharing: host slots -> the remote tier, after the commit and behind everything else.

A committed host slot joins a bounded backlog that holds no pin. When writes may go out, some of one
namespace and shard are probed: other nodes may have written them. What isn't there becomes WRITE
Moves, unless some node has cleared the fleet since it was stored: it would come back by this one.
The remote tier isn't prefix-closed, so each part is on its own: one that is evicted before its
turn, refused or failed is dropped and counted, and delays nothing. What was read from there isn't
written back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from kvstore.core.chunk import slot_header
from kvstore.core.errors import InvariantError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import MoveKind, MoveStatus, Place, TierName
from kvstore.core.remote_messages import Probe, Probed, RemoteEnter
from kvstore.core.slots import Handle, Slot, SlotState
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.transfers import Job

PROBE_PARTS = 64
"""Chunk parts that are probed at a time."""
AHEAD = 16
"""The next ones are probed when so many are left to write."""
STEP_PARTS = 256
"""Parts of a backlog that one event gives up."""
_FULL_S = 1.0
"""For so long nothing is written after the remote tier was full."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A probe that is out for these slots of one shard."""

    number: int
    space: Space
    keys: dict[ChunkKey, int]
    parts: tuple[Part, ...]
    handles: tuple[Handle, ...]


class Sharing:
    """The backlog of writes to the remote tier, and the end of such a WRITE Move."""

    def __init__(self, state: State) -> None:
        self.present = self.written = 0
        self._state = state
        self._limits = state.limits.remote or RemoteLimits()
        self._backlog: OrderedDict[tuple[Space, int], deque[Handle]] = OrderedDict()
        self._waiting = 0
        self._asked: _Asked | None = None
        self._absent: deque[tuple[Handle, int]] = deque()
        self._given_up: deque[deque[Handle]] = deque()
        self._full_until_s = 0.0

    def __len__(self) -> int:
        """Parts that wait for their write."""
        asked = 0 if self._asked is None else len(self._asked.handles)
        return self._waiting + asked + len(self._absent)

    def consider(self, slot: Slot) -> None:
        """A host slot was committed or stored again: it is to be shared, unless it was."""
        state, copy = self._state, slot.owner
        if state.limits.remote is None or slot.shared or copy is None or not copy.live:
            return
        if not state.remote_up:
            state.drop(Drop.REDIS_DOWN)
        elif slot.age < copy.space.shared_from:
            state.drop(Drop.CLEARED)
        elif len(self) >= self._limits.backlog_max:
            state.drop(Drop.REDIS_BACKLOG)
        else:
            slot.shared = True
            self._backlog.setdefault((copy.space, slot.shard), deque()).append(Handle.of(slot))
            self._waiting += 1

    def next_write(self) -> Job | None:
        """The next WRITE, its slot held; None while there is none that is known to be absent."""
        state = self._state
        if not state.remote_up or state.now < self._full_until_s:
            return None
        if self._asked is None and len(self._absent) < AHEAD and self._backlog:
            self._ask()
        while self._absent:
            handle, epoch = self._absent.popleft()
            slot, space = handle.slot, self._space(handle)
            if space is None:
                continue
            if space.entered_at != state.remote_ups:
                space.entered_at = state.remote_ups
                state.effects.append(
                    RemoteEnter(space.tenant, space.namespace, space.model, space.alias)
                )
            job = Job(
                state.transfers.next_id(),
                MoveKind.WRITE,
                slot_header(slot, 0),
                source=slot,
                remote=Place(TierName.REDIS, epoch, 0, 0),
            )
            slot.hold(job.id)
            return job
        return None

    def probed(self, event: Probed) -> None:
        """The probe of some has ended: those that aren't there are to be written."""
        asked = self._asked
        if asked is None or asked.number != event.id:
            raise InvariantError(f"probe {event.id} ended, but isn't out")
        self._asked = None
        if event.error:
            self._give_up(asked.handles, Drop.REDIS_PROBE_FAILED)
            return
        asked.space.saw_fleet_epoch(event.epoch)
        if not self._state.remote_up:
            self._give_up(asked.handles, Drop.REDIS_DOWN)
            return
        found = dict(zip(asked.parts, event.found, strict=True))
        for handle in asked.handles:
            slot, space = handle.slot, self._space(handle)
            if space is None or slot.owner is None:
                continue
            if found[slot.part][asked.keys[slot.owner.key]]:
                self.present += 1
            else:
                self._absent.append((handle, event.epoch))

    def moved(self, job: Job, status: MoveStatus) -> None:
        """A WRITE Move to the remote tier has ended."""
        slot = job.source
        if slot is None:
            raise InvariantError(f"WRITE {job.id} lacks a source")
        if status is MoveStatus.OK:
            self.written += 1
        else:
            full = status is MoveStatus.NO_SPACE
            slot.shared = False
            self._state.drop(Drop.REDIS_FULL if full else Drop.REDIS_WRITE_FAILED)
            if full:
                self._full_until_s = self._state.now + _FULL_S
        self._state.let_go(job)

    def down(self) -> None:
        """The tier can't be used: nothing waits for it."""
        self._given_up.extend(self._backlog.values())
        self._given_up.append(deque(handle for handle, _ in self._absent))
        self._backlog.clear()
        self._absent.clear()
        self._waiting = 0
        self.step()

    def running(self) -> bool:
        """Whether parts of a backlog are left to be given up, at the next Tick."""
        return bool(self._given_up)

    def step(self) -> None:
        """Give up some parts of a backlog."""
        left = STEP_PARTS
        while self._given_up and left:
            handles = self._given_up[0]
            some = tuple(handles.popleft() for _ in range(min(left, len(handles))))
            self._give_up(some, Drop.REDIS_DOWN)
            left -= len(some)
            if not handles:
                self._given_up.popleft()

    # ------------------------------------------------------------ private

    def _ask(self) -> None:
        """Probe the next parts, of the namespace and shard whose turn it is."""
        (space, shard), handles = next(iter(self._backlog.items()))
        taken = [handles.popleft() for _ in range(min(PROBE_PARTS, len(handles)))]
        self._waiting -= len(taken)
        if handles:
            self._backlog.move_to_end((space, shard))
        else:
            del self._backlog[space, shard]
        keys: dict[ChunkKey, int] = {}
        live: list[Handle] = []
        for handle in taken:
            if self._space(handle) is not None and handle.slot.owner is not None:
                keys.setdefault(handle.slot.owner.key, len(keys))
                live.append(handle)
        if not live:
            return
        have = {handle.slot.part for handle in live}
        parts = tuple(part for part in Part if part in have)
        state, number = self._state, self._state.next_probe()
        self._asked = _Asked(number, space, keys, parts, tuple(live))
        state.effects.append(
            Probe(number, space.tenant, space.namespace, b"".join(keys), (shard,), parts)
        )

    def _space(self, handle: Handle) -> Space | None:
        """Whose chunk a slot from the backlog keeps; None, and counted, where it does no more."""
        slot, copy = handle.slot, handle.slot.owner
        if handle.is_stale() or slot.state is not SlotState.READY or copy is None:
            self._state.drop(Drop.EVICTED_BEFORE_REDIS)
            return None
        if not copy.live or not copy.space.alive or slot.age < copy.space.shared_from:
            self._state.drop(Drop.CLEARED)
            return None
        return copy.space

    def _give_up(self, handles: tuple[Handle, ...], reason: Drop) -> None:
        """These aren't shared now; storing them again tries again."""
        self._state.drop(reason, len(handles))
        for handle in handles:
            if not handle.is_stale():
                handle.slot.shared = False
