"""Mutations: faults put into the core on purpose, each of which the simulator must notice.

A mutation replaces one function of the core by a wrong one. Some seed of a fixed, bounded list must
then fail, and all of these seeds pass with the core as it is. Mutations marked ``blind`` are found
without the core's own check of its invariants, by what the outside sees alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import kvstore.core.tree as tree_module
from kvstore.core.candidates import Candidates
from kvstore.core.clearing import Clearing
from kvstore.core.directory import Directory
from kvstore.core.engines import Session
from kvstore.core.errors import InvariantError
from kvstore.core.leases import Leases
from kvstore.core.messages import Detach, Lookup, MoveStatus, Persisted, Request
from kvstore.core.quotas import Account
from kvstore.core.reads import Reads
from kvstore.core.restoring import Restoring
from kvstore.core.room import Room
from kvstore.core.service import Service
from kvstore.core.slabs import SlabSpace
from kvstore.core.slots import Slot, SlotState
from kvstore.core.spaces import Spaces
from kvstore.core.state import State
from kvstore.core.storing import Storing
from kvstore.core.tickets import Ticket
from kvstore.core.tree import Tree
from kvstore.core.tree_nodes import Copy, lands
from kvstore.core.watching import Watching
from kvstore.core.writing import Writing
from tests.sim.errors import SimulationError
from tests.sim.run import simulate

SEEDS = (*range(700, 753), 793, 826, 914)
STEPS = 250
Patch = Callable[..., None]  # monkeypatch.setattr


def commit_before_the_bytes(patch: Patch) -> None:
    """A slot is READY from when it is reserved."""
    reserve = Tree.reserve

    def reserved(self: Tree, *facts: Any) -> Any:
        slot = reserve(self, *facts)
        if isinstance(slot, Slot):
            self.landed(slot)
        return slot

    patch(Tree, "reserve", reserved)


def free_at_cancel(patch: Patch) -> None:
    """A cancelled slot is free at once, though a Move still writes it."""

    def free_if_dead(self: Slot) -> bool:
        if self.state not in (SlotState.CANCELLED, SlotState.DOOMED):
            return False
        self._go("free")
        self._clean()
        return True

    patch(Slot, "free_if_dead", free_if_dead)


def evict_pinned(patch: Patch) -> None:
    """What a Move holds may be evicted."""

    def evict(self: Slot) -> None:
        self._go("evict")
        self._clean()

    def idle(self: Copy, part: Any = None) -> bool:
        slots = [slot for slot in self.slots() if part in (None, slot.part)]
        return bool(slots) and all(slot.state is SlotState.READY for slot in slots)

    patch(Slot, "evict", evict)
    patch(Copy, "idle", idle)


def evict_leased(patch: Patch) -> None:
    """What a lease protects may be evicted."""

    def loose(self: Candidates, copy: Copy) -> bool:
        return copy.live and copy.space.alive and copy is not self.guard

    patch(Candidates, "_loose", loose)


def evict_from_the_middle(patch: Patch) -> None:
    """A chunk may leave while others hang below it."""

    def evictable(self: Candidates, copy: Copy) -> bool:
        return self._loose(copy) and copy.idle()

    patch(Candidates, "evictable", evictable)


def publish_without_parent(patch: Patch) -> None:
    """A chunk whose bytes have landed is READY, though its parent isn't."""
    patch(tree_module, "may_commit", lambda slot, parent: lands(slot))


def lease_never_expires(patch: Patch) -> None:
    """A deadline passes, and the lease stays."""
    patch(Leases, "expire", lambda self, now, most: None)


def lease_outlives_its_engine(patch: Patch) -> None:
    """An engine loses a worker, and its leases stay."""
    patch(Leases, "end_engine", lambda self, engine: None)


def lease_keeps_its_pins(patch: Patch) -> None:
    """A released lease goes on to protect its chunks."""
    patch(Tree, "unlease", lambda self, copy: None)


def cleared_epoch_is_restored(patch: Patch) -> None:
    """A start takes over what was cleared."""
    enter = Restoring._enter

    def entered(self: Restoring, nvme: Tree, slot: Slot, header: Any) -> Any:
        space = self._state.spaces.find(header.tenant, header.namespace)
        epoch = header.epoch if space is None else space.epoch
        return enter(self, nvme, slot, replace(header, epoch=epoch))

    patch(Restoring, "_enter", entered)


def clear_keeps_the_epoch(patch: Patch) -> None:
    """A clear forgets the chunks, but the epoch stays what it was."""
    raise_epoch = Spaces.raise_epoch

    def raised(self: Spaces, space: Any) -> Any:
        after = raise_epoch(self, space)
        after.epoch = space.epoch
        return after

    patch(Spaces, "raise_epoch", raised)


def clear_answers_before_it_is_durable(patch: Patch) -> None:
    """Cleared is sent while the manifest is still on its way."""
    clear = Clearing.clear

    def cleared(self: Clearing, *facts: Any) -> None:
        clear(self, *facts)
        for number in list(self._clears):
            self.persisted(Persisted(number))

    patch(Clearing, "clear", cleared)


def blocks_back_before_the_end(patch: Patch) -> None:
    """A cancel is acknowledged while a Move still uses the blocks."""
    patch(Ticket, "ended", lambda self: self.cancelled or self.open_waits == 0)


def detach_before_the_end(patch: Patch) -> None:
    """A lost session's memory is unmapped while a Move still uses it."""

    def detach_if_idle(self: State, session: Session) -> None:
        if self.engines.session(session.id) is session and session.closing:
            self.engines.remove(session)
            self.effects.append(Detach(session.id))

    patch(State, "detach_if_idle", detach_if_idle)


def failed_store_is_acknowledged(patch: Patch) -> None:
    """A STORE that failed counts as done."""
    moved = Storing.moved
    patch(Storing, "moved", lambda self, job, status: moved(self, job, MoveStatus.OK))


def failed_load_is_done(patch: Patch) -> None:
    """A LOAD that failed half-way counts as done."""
    loaded = Reads.loaded
    patch(Reads, "loaded", lambda self, job, status: loaded(self, job, MoveStatus.OK))


def bad_read_is_used(patch: Patch) -> None:
    """What failed its check is handed on."""
    ended = Reads.ended
    patch(Reads, "ended", lambda self, job, status: ended(self, job, MoveStatus.OK))


def tenants_share(patch: Patch) -> None:
    """Namespaces are told apart by digest alone."""
    enter, find = Spaces.enter, Spaces.find
    patch(Spaces, "find", lambda self, tenant, namespace: find(self, "all", namespace))
    patch(
        Spaces,
        "enter",
        lambda self, record, *facts: enter(self, replace(record, tenant="all"), *facts),
    )


def windows_are_not_needed(patch: Patch) -> None:
    """A hit needs FULL parts only."""
    patch(Directory, "step_down", lambda self, space, keys, chunks, window_chunks: chunks)


def one_shard_is_enough(patch: Patch) -> None:
    """A chunk is visible with its first shard."""

    def visible(self: Copy) -> bool:
        return self.full_ready > 0 and self.live and self.space.alive

    patch(Copy, "visible", visible)


def losses_are_not_told(patch: Patch) -> None:
    """Who watches hears of what came, never of what left."""
    note = Watching.note

    def noted(self: Watching, tree: Tree) -> None:
        tree.changed = [change for change in tree.changed if change[-1]]
        note(self, tree)

    patch(Watching, "note", noted)


def a_full_disk_stays_full(patch: Patch) -> None:
    """Once there was no room for a slab, the tier never tries again."""
    patch(Writing, "tick", lambda self: None)


def a_full_disk_is_tried_at_once(patch: Patch) -> None:
    """There is no room for a slab, and the next write wants one, too."""
    patch(Writing, "_stop_growth", lambda self, nvme: None)


def slabs_keep_their_size(patch: Patch) -> None:
    """A model that comes second finds all slabs cut for the first one's chunks."""
    patch(SlabSpace, "coldest_foreign", lambda self, slot_bytes: None)


def a_burst_evicts_nothing(patch: Patch) -> None:
    """A full tier refuses, though something could leave."""
    patch(Room, "_evict", lambda self, slot_bytes: False)


def what_hangs_on_a_failure_waits(patch: Patch) -> None:
    """A store fails in the middle; what comes behind it waits for its parent for ever."""
    patch(Tree, "fail", lambda self, slot, reason=None: self._cancel(slot, reason))


def a_staging_slot_is_kept(patch: Patch) -> None:
    """A read that found no host slot keeps its place in the staging ring."""
    let_go = Directory.let_go

    def kept(self: Directory, slot: Slot, move: Any) -> None:
        if self.is_staging(slot):
            slot.let_go(move)
        else:
            let_go(self, slot, move)

    patch(Directory, "let_go", kept)


def a_lookup_waits_its_turn(patch: Patch) -> None:
    """A lookup is answered with the next event while the hands are busy."""
    handle = Service.handle
    late: list[Any] = []

    def handled(self: Service, event: Any, now: float) -> list[Any]:
        effects = late + handle(self, event, now)
        late.clear()
        lookup = isinstance(event, Request) and isinstance(event.message, Lookup)
        if lookup and self._state.transfers.running():
            late.extend(effects)
            return []
        return effects

    patch(Service, "handle", handled)


def stores_count_for_ever(patch: Patch) -> None:
    """Bytes in flight rise with each store, and never fall."""
    finish = State.finish_if_ended

    def finished(self: State, ticket: Ticket) -> None:
        session = self.engines.session(ticket.session)
        finish(self, ticket)
        if session is not None and ticket.id not in session.tickets:
            session.store_bytes += ticket.nbytes

    patch(State, "finish_if_ended", finished)


def nothing_is_written(patch: Patch) -> None:
    """What is committed isn't considered for NVMe."""
    patch(Writing, "consider", lambda self, slot: None)


def a_failed_write_is_never_tried_again(patch: Patch) -> None:
    """A slot whose write has ended counts as waiting for it."""
    moved = Writing.moved

    def ended(self: Writing, job: Any, status: MoveStatus) -> None:
        moved(self, job, status)
        job.source.write_queued = True

    patch(Writing, "moved", ended)


def a_slab_loses_slots(patch: Patch) -> None:
    """A slot that was freed in a slab that is full is given out no more."""
    give_back = SlabSpace.give_back

    def given(self: SlabSpace, slot: Slot) -> None:
        slab = slot.slab
        full = not slab.has_room()
        give_back(self, slot)
        if full and self._slabs.get(slab.number) is slab:
            self._open[slab.slot_bytes].pop(slab.number, None)

    patch(SlabSpace, "give_back", given)


def quotas_are_not_kept(patch: Patch) -> None:
    """No tenant is ever at its quota."""
    patch(Account, "lacks", lambda self, nbytes: False)


@dataclass(frozen=True)
class Mutation:
    """A fault, and whether the outside must see it by itself."""

    make: Callable[[Patch], None]
    blind: bool

    def __str__(self) -> str:
        return self.make.__name__


MUTATIONS = (
    Mutation(commit_before_the_bytes, blind=True),
    Mutation(free_at_cancel, blind=False),
    Mutation(evict_pinned, blind=True),
    Mutation(evict_leased, blind=True),
    Mutation(evict_from_the_middle, blind=False),
    Mutation(publish_without_parent, blind=False),
    Mutation(lease_never_expires, blind=True),
    Mutation(lease_outlives_its_engine, blind=True),
    Mutation(lease_keeps_its_pins, blind=False),
    Mutation(cleared_epoch_is_restored, blind=True),
    Mutation(clear_keeps_the_epoch, blind=True),
    Mutation(clear_answers_before_it_is_durable, blind=True),
    Mutation(blocks_back_before_the_end, blind=True),
    Mutation(detach_before_the_end, blind=True),
    Mutation(failed_store_is_acknowledged, blind=True),
    Mutation(failed_load_is_done, blind=True),
    Mutation(bad_read_is_used, blind=True),
    Mutation(tenants_share, blind=True),
    Mutation(windows_are_not_needed, blind=True),
    Mutation(one_shard_is_enough, blind=True),
    Mutation(losses_are_not_told, blind=True),
    Mutation(a_full_disk_stays_full, blind=True),
    Mutation(a_full_disk_is_tried_at_once, blind=True),
    Mutation(slabs_keep_their_size, blind=True),
    Mutation(a_burst_evicts_nothing, blind=True),
    Mutation(what_hangs_on_a_failure_waits, blind=True),
    Mutation(a_staging_slot_is_kept, blind=True),
    Mutation(a_lookup_waits_its_turn, blind=True),
    Mutation(stores_count_for_ever, blind=True),
    Mutation(nothing_is_written, blind=True),
    Mutation(a_failed_write_is_never_tried_again, blind=True),
    Mutation(a_slab_loses_slots, blind=True),
    Mutation(quotas_are_not_kept, blind=True),
)


def test_the_core_as_it_is_passes_these_seeds() -> None:
    for seed in SEEDS:
        simulate(seed, STEPS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation.blind:
        monkeypatch.setattr(Service, "check_invariants", lambda self: None)
    mutation.make(monkeypatch.setattr)
    for seed in SEEDS:
        try:
            simulate(seed, STEPS)
        except SimulationError as error:
            cause = error.__cause__
            if isinstance(cause, (SimulationError, InvariantError)):
                return
    pytest.fail(f"{mutation} went unnoticed by all of {SEEDS}")
