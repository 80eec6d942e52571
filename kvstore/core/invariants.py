"""What always holds between events. Tests and the simulator check it after each one."""

from __future__ import annotations

from collections import Counter

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.slots import Slot, SlotState
from kvstore.core.state import State
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy


def check(state: State) -> None:
    """Raise InvariantError, naming what doesn't fit, unless everything does."""
    pins = state.leases.pins()
    for tree in state.directory.trees():
        tree.slabs.check()
        seen: set[int] = set()
        for space in state.spaces.all():
            for copy in space.index[tree.tier]:
                seen.add(id(copy))
                _check_copy(tree, copy)
                _must(copy.leases == pins.get(id(copy), 0), f"{copy!r}: leases don't add up")
        _check_slots(tree, seen)
    _check_jobs(state)
    _check_sessions(state)


def _must(fact: bool, text: str) -> None:
    if not fact:
        raise InvariantError(text)


def _check_copy(tree: Tree, copy: Copy) -> None:
    where = f"{tree.tier.value} {copy!r}"
    _must(copy.live and copy.space.alive, f"{where}: in the index, but gone")
    _must(tree.find(copy.space, copy.key) is copy, f"{where}: the index has another under its key")
    _must(next(copy.slots(), None) is not None, f"{where}: without a slot")
    for part in Part:
        ready = 0
        for shard, slot in enumerate(copy.parts[part]):
            if slot is None:
                continue
            ready += slot.state is SlotState.READY
            live = slot.state in (SlotState.RESERVED, SlotState.READY)
            _must(live, f"{where}: keeps {slot!r}")
            _must(slot.owner is copy and slot.shard == shard, f"{where}: {slot!r} isn't its own")
            _must(slot.part is part, f"{where}: {slot!r} has the wrong part")
        _must(ready == copy.ready[part], f"{where}: {ready} READY, counted {copy.ready[part]}")
    parent = copy.parent
    if parent is None:
        _must(copy.depth == 0, f"{where}: without a parent")
        return
    _must(copy in list(parent.children()), f"{where}: its parent doesn't know it")
    _must(parent.live or tree.sweeping(), f"{where}: below a parent that is gone")
    if not parent.live or tree.linear:
        return
    for shard, slot in enumerate(copy.parts[Part.FULL]):
        above = parent.slot(Part.FULL, shard)
        if slot is not None:
            _must(above is not None, f"{where}: shard {shard} without its parent's")
        if slot is not None and slot.state is SlotState.READY and above is not None:
            _must(above.state is SlotState.READY, f"{where}: READY before its parent")
    if copy.visible():
        _must(parent.visible(), f"{where}: visible before its parent")


def _check_slots(tree: Tree, seen: set[int]) -> None:
    """Each slot that isn't FREE belongs to a copy, is about to be swept, or is held by a Move."""
    for slab in tree.slabs.cuts():
        for slot in slab.slots.values():
            if slot.state is SlotState.FREE:
                _must(not slot.holders and slot.owner is None, f"{slot!r}: free, but in use")
            elif slot.state in (SlotState.CANCELLED, SlotState.DOOMED):
                _must(bool(slot.holders), f"{slot!r}: dead, but nothing holds it")
            else:
                owner = slot.owner
                known = owner is not None and (id(owner) in seen or tree.sweeping() or tree.linear)
                _must(known, f"{slot!r}: belongs to nothing")
                if slot.state is SlotState.RESERVED:
                    _must(bool(slot.holders) or slot.landed, f"{slot!r}: nothing fills it")


def _check_jobs(state: State) -> None:
    held: dict[Slot, set[int]] = {}
    for job in state.transfers.jobs():
        for slot in (job.source, job.target):
            if slot is not None:
                held.setdefault(slot, set()).add(job.id)
    slots = list(state.directory.staging())
    for tree in state.directory.trees():
        for slab in tree.slabs.cuts():
            slots += slab.slots.values()
    for slot in slots:
        _must(slot.holders == held.get(slot, set()), f"{slot!r}: held by {slot.holders}")
    for slot in state.directory.staging():
        free = slot.state is SlotState.FREE
        _must(free or bool(slot.holders), f"{slot!r}: staging that nothing holds")


def _check_sessions(state: State) -> None:
    running: Counter[int] = Counter()
    jobs = {job.id: job for job in state.transfers.jobs()}
    for job in jobs.values():
        if job.session is not None and state.transfers.is_running(job.id):
            running[job.session] += 1
    for session in state.engines.sessions():
        _must(session.moves == running[session.id], f"session {session.id}: Moves don't add up")
        for ticket in session.tickets.values():
            name = f"session {session.id} {ticket.kind} {ticket.id}"
            _must(not ticket.ended(), f"{name}: has ended, but isn't completed")
            _must(ticket.moves <= set(jobs), f"{name}: waits for Moves that are gone")
        if session.closing:
            _must(bool(session.moves or session.tickets), f"session {session.id}: not detached")
