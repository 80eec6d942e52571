"""What always holds between events. Tests and the simulator check it after each one."""

from __future__ import annotations

from collections import Counter

from kvstore.core.errors import InvariantError
from kvstore.core.layout import Part
from kvstore.core.messages import MoveID, SessionID
from kvstore.core.slots import Slot, SlotState
from kvstore.core.state import State
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy

_LIVE = (SlotState.RESERVED, SlotState.READY)


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
                _must(copy.leases == pins.get(id(copy), 0), "its leases don't add up", copy)
        _must(tree.chunks == len(seen), "its chunks don't add up", tree.tier)
        _check_slots(tree, seen)
        _check_accounts(tree)
    _check_jobs(state)
    _check_sessions(state)


def _must(fact: bool, text: str, *what: object) -> None:
    if not fact:
        raise InvariantError(f"{' '.join(map(repr, what))}: {text}")


def _check_copy(tree: Tree, copy: Copy) -> None:
    _must(copy.live and copy.space.alive, "in the index, but gone", tree.tier, copy)
    _must(tree.find(copy.space, copy.key) is copy, "the index has another", tree.tier, copy)
    _must(bool(copy.slots()), "without a slot", tree.tier, copy)
    for part in Part:
        ready = 0
        for shard, slot in enumerate(copy.part(part)):
            if slot is None:
                continue
            ready += slot.state is SlotState.READY
            _must(slot.state in _LIVE, "kept by a copy", slot, copy)
            mine = slot.owner is copy and slot.shard == shard and slot.part is part
            _must(mine and tree.slabs.lists(slot), "isn't the copy's own", slot, copy)
        counted = copy.full_ready if part is Part.FULL else copy.window_ready
        _must(ready == counted, "its READY slots don't add up", tree.tier, copy)
    if copy.parent is None:
        _must(copy.depth == 0, "without a parent", tree.tier, copy)
    else:
        _check_below(tree, copy, copy.parent)


def _check_below(tree: Tree, copy: Copy, parent: Copy) -> None:
    _must(any(child is copy for child in parent.children()), "unknown to its parent", copy)
    anchor = parent.anchor if parent.depth % 64 else parent
    _must(copy.anchor is anchor, "its anchor is another", tree.tier, copy)
    _must(parent.live or tree.sweeping(), "below a parent that is gone", tree.tier, copy)
    if not parent.live:
        return
    for shard, slot in enumerate(copy.part(Part.FULL)):
        if slot is None:
            continue
        above = parent.slot(Part.FULL, shard)
        _must(above is not None or tree.stepping(), "without its parent's", slot, copy)
        if slot.state is SlotState.READY and above is not None:
            _must(above.state is SlotState.READY, "READY before its parent's", slot, copy)
    if copy.visible():
        _must(parent.visible(), "visible before its parent", tree.tier, copy)


def _check_slots(tree: Tree, seen: set[int]) -> None:
    """Each slot that isn't FREE belongs to a copy, is about to be swept, or is held by a Move."""
    pending = tree.sweeping() or tree.scanning
    for slab in tree.slabs.cuts():
        for slot in slab:
            owner = slot.owner
            if slot.state is SlotState.FREE:
                _must(not slot.holders and owner is None, "free, but in use", slot)
            elif slot.state not in _LIVE:
                _must(bool(slot.holders), "dead, but nothing holds it", slot)
            else:
                known = owner is not None and (id(owner) in seen or pending)
                _must(known, "belongs to nothing", slot)
                filled = slot.state is SlotState.READY or slot.landed or bool(slot.holders)
                _must(filled, "nothing fills it", slot)


def _check_accounts(tree: Tree) -> None:
    """Each tenant's account has what its slots add up to."""
    used: Counter[str] = Counter()
    for slab in tree.slabs.cuts():
        for slot in slab:
            _must((slot.account is None) == (slot.state is SlotState.FREE), "nobody's", slot)
            if slot.account is not None:
                used[slot.account.tenant] += slab.slot_bytes
                tenant = slot.account.tenant if slot.owner is None else slot.owner.space.tenant
                _must(tenant == slot.account.tenant, "on another's account", slot)
    for account in tree.accounts.all():
        _must(account.used_bytes == used[account.tenant], "an account is wrong", account)


def _check_jobs(state: State) -> None:
    held: dict[Slot, set[MoveID]] = {}
    for job in state.transfers.jobs():
        for slot in (job.source, job.target):
            if slot is not None:
                held.setdefault(slot, set()).add(job.id)
    slots = list(state.directory.staging())
    for tree in state.directory.trees():
        for slab in tree.slabs.cuts():
            slots += slab
    nobody: frozenset[MoveID] = frozenset()
    for slot in slots:
        _must(slot.holders == held.get(slot, nobody), "its holders aren't the jobs", slot)
    for slot in state.directory.staging():
        free = slot.state is SlotState.FREE
        _must(free or bool(slot.holders), "staging that nothing holds", slot)


def _check_sessions(state: State) -> None:
    running: Counter[SessionID] = Counter()
    jobs = {job.id: job for job in state.transfers.jobs()}
    for job in jobs.values():
        if job.session is not None and state.transfers.is_running(job.id):
            running[job.session] += 1
    for session in state.engines.sessions():
        _must(session.moves == running[session.id], "its Moves don't add up", session.id)
        for ticket in session.tickets.values():
            name = (session.id, ticket.kind, ticket.id)
            _must(not ticket.ended(), "has ended, but isn't completed", name)
            _must(ticket.moves <= jobs.keys(), "waits for Moves that are gone", name)
        if session.closing:
            _must(bool(session.moves or session.tickets), "isn't detached", session.id)
