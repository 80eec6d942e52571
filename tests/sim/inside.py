"""Inside: what only a look into the core shows. Nothing is lost: neither room nor candidates."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.candidates import Candidates
from kvstore.core.eviction import LeastRecentlyUsed
from kvstore.core.layout import Part
from kvstore.core.messages import MoveKind
from kvstore.core.service import Service
from kvstore.core.slots import SlotState
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy
from tests.sim.errors import SimulationError
from tests.sim.views import SessionView


def check_inside(service: Service, sessions: Iterable[SessionView]) -> None:
    """Raise SimulationError unless all room of cut slabs can be used, all that may leave can, and
    each session was told its engine's state."""
    state = service._state
    for view in sessions:
        session = state.engines.session(view.id)
        if session is None or session.closing:
            continue
        told, true = view.namespace, session.engine.state().namespace
        if told != true:
            raise SimulationError(
                f"s{view.id} was told {told.hex()[:6]}, but it is {true.hex()[:6]}"
            )
    _check_queued(service)
    for tree in state.directory.trees():
        if tree.scanning:
            continue
        _check_room(tree)
        for space in state.spaces.all():
            for copy in space.index[tree.tier]:
                _check_candidate(tree, copy)
                _check_places(tree, copy)


def clears_in_steps(service: Service) -> bool:
    """Whether a clear goes on at the next Tick: it takes effect somewhere before its answer."""
    return service._clearing.running()


def check_hit(service: Service, view: SessionView, request: str, keys: list[bytes]) -> None:
    """Raise SimulationError unless each chunk of a hit is in some tier, and all above it too."""
    state = service._state
    space = state.spaces.find(*view.space())
    lease = state.leases.of(view.engine(), request)
    for depth, key in enumerate(keys):
        found = lease is not None and lease.found is not None and lease.space is space
        found = found and lease.found.has(Part.FULL, depth)  # type: ignore[union-attr]
        for tree in state.directory.trees():
            copy = None if space is None else tree.find(space, key)
            found = found or (copy is not None and copy.visible() and _is_rooted(copy))
        if not found:
            raise SimulationError(f"a hit on {key.hex()[:6]}, which has left every tier")


def _is_rooted(copy: Copy) -> bool:
    above = copy.parent
    while above is not None:
        if not above.live:
            return False
        above = above.parent
    return True


def _check_room(tree: Tree) -> None:
    """A slab with room is found when a slot is asked for."""
    for slab in tree.slabs.cuts():
        if slab.used() and slab.number in tree.slabs._empty:
            raise SimulationError(f"{tree.tier.value}: slab {slab.number} counts as empty")
        if slab.has_room() and slab.number not in tree.slabs._open[slab.slot_bytes]:
            raise SimulationError(f"{tree.tier.value}: slab {slab.number} has room that is lost")


def _check_places(tree: Tree, copy: Copy) -> None:
    """A copy's slots are those that its slabs list."""
    for slot in copy.slots():
        slab = tree.slabs._slabs.get(slot.slab.number)
        if slab is not slot.slab or slab.slot(slot.index) is not slot:
            raise SimulationError(f"{copy}: {slot} isn't its slab's")


def _check_queued(service: Service) -> None:
    """What counts as waiting for its write is in the backlog, or being written."""
    waiting = {id(handle.slot) for handle in service._writing._backlog}
    jobs = service._state.transfers.jobs()
    waiting |= {id(job.source) for job in jobs if job.kind is MoveKind.WRITE}
    for slab in service._state.directory.host.slabs.cuts():
        for slot in slab:
            if slot.state is SlotState.READY and slot.write_queued and id(slot) not in waiting:
                raise SimulationError(f"{slot} waits for a write that nobody will make")


def _check_candidate(tree: Tree, copy: Copy) -> None:
    candidates: Candidates = tree.candidates
    for test, queues, part in (
        (candidates.evictable, candidates._copies, Part.FULL),
        (candidates.window_evictable, candidates._windows, Part.WINDOW),
    ):
        if not test(copy):
            continue
        policy = candidates._queue(queues, copy, part)
        if isinstance(policy, LeastRecentlyUsed) and not policy.holds(copy):
            raise SimulationError(f"{tree.tier.value} {copy} {part.name} may leave, but can't")
