"""Actors: engines that obey the rules. They come and go, look up, retrieve, compute, store, cancel
and forget; a block is used again only after a completion, an acknowledged cancel or EOF."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore.core.keys import ChunkKeys, KeyContext, prefix_keys
from kvstore.core.layout import NULL_BLOCK
from kvstore.core.messages import (
    Attach,
    Cancel,
    Completed,
    EngineState,
    Lookup,
    LookupReply,
    Register,
    Release,
    Reply,
    Retrieve,
    SessionID,
    SetRevision,
    Store,
)
from tests.sim import loads
from tests.sim.faults import Fault
from tests.sim.model import is_pending
from tests.sim.nonsense import nonsense, stranger, tangled
from tests.sim.shapes import TOKENS_PER_CHUNK, EngineShape
from tests.sim.views import SessionView
from tests.sim.world import World

Blocks = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Job:
    """One request of an engine: a prompt on its way through the cache."""

    name: str
    keys: ChunkKeys
    hit: int = 0
    stored: int = 0
    open: int = 0
    stage: str = "new"
    pending: bool = False


@dataclass(slots=True, eq=False)
class FakeEngine:
    """All processes of one engine, and the requests that it works on."""

    world: World
    shape: EngineShape
    prompts: list[tuple[list[int], KeyContext]]
    workers: dict[int, SessionView] = field(default_factory=dict)
    scheduler: SessionView | None = None
    jobs: list[Job] = field(default_factory=list)
    tickets: list[tuple[SessionID, int]] = field(default_factory=list)
    closing: int = 0
    made: int = 0
    revision: str = "r0"

    def act(self) -> None:
        """Do one thing, as chance has it."""
        rng = self.world.rng
        if self._absent() and rng.random() < 0.5:
            self.join()
        elif rng.random() < self.world.faults.close_rate:
            self.leave(rng.choice([*self.workers.values(), self.scheduler]))
        elif rng.random() < self.world.faults.revision_rate and self.workers:
            self._update(rng.choice(list(self.workers.values())), f"r{rng.randint(0, 3)}")
        elif self.tickets and rng.random() < self.world.faults.cancel:
            self._cancel(*rng.choice(self.tickets))
        elif rng.random() < self.world.faults.nonsense:
            self._talk_nonsense()
        elif len(self.jobs) < 4 and (not self.jobs or rng.random() < 0.3):
            self._begin()
        elif self.jobs:
            self._advance(rng.choice(self.jobs))

    def _cancel(self, session: SessionID, number: int) -> None:
        if session in self.world.model.sessions and not self._gone(session):
            self.world.saw(Fault.ENGINE_CANCELS)
            self.world.request(session, Cancel(number + (self.world.rng.random() < 0.1)))

    def _update(self, view: SessionView, revision: str) -> None:
        """The engine's weights are updated."""

        def updated(reply: Reply) -> None:
            if isinstance(reply.body, EngineState):
                self.revision = revision

        if self.tickets:
            self.world.saw(Fault.NEW_REVISION)
        self.world.request(view.id, SetRevision(revision), updated)

    def _talk_nonsense(self) -> None:
        rng = self.world.rng
        views = [s for s in [*self.workers.values(), self.scheduler] if s is not None]
        views = [view for view in views if view.joined]
        if not views:
            return
        view = rng.choice(views)
        kind = rng.random()
        if kind < 0.2:
            self.world.saw(Fault.STRANGER)
            stranger(self.world, view)
        elif kind < 0.5 and view.memory is not None and self.jobs:
            count = rng.randint(1, 3)
            real = list(rng.choice(self.jobs).keys)
            keys, first, parent = tangled(rng, real, count)
            blocks = self.lend(view, count, None)
            if blocks is not None:
                self.world.saw(Fault.TANGLED)
                self.world.request(view.id, Store("tangled", keys, first, parent, blocks))
        else:
            self.world.saw(Fault.NONSENSE)
            nonsense(self.world, view)

    def namespace(self) -> bytes:
        """The digest that keys start from; empty while the engine isn't ready."""
        sessions = [s for s in [*self.workers.values(), self.scheduler] if s is not None]
        return sessions[0].namespace if sessions else b""

    # ------------------------------------------------------------ processes

    def join(self) -> None:
        """Start one process that isn't there."""
        world, rng = self.world, self.world.rng
        absent = self._absent()
        if not absent:
            return
        rank = rng.choice(absent)
        view = world.connect(self.shape, rank)
        shape = self.shape
        if rank is None:
            self.scheduler = view
            world.request(view.id, Attach(shape.engine, shape.tenant), self._joined(view))
            return
        if not self.workers:
            self.revision = "r0"
        self.workers[rank] = view
        namespace = replace(shape.namespace, revision=self.revision)
        register = Register(shape.engine, shape.tenant, namespace, shape.layout, shape.shards[rank])
        world.request(view.id, register, self._joined(view))

    def leave(self, view: SessionView | None) -> None:
        """One process dies, or its connection breaks."""
        if view is None or view.closed:
            return
        view.closed = True
        if view.memory is None:
            self.scheduler = None
        else:
            self.workers.pop(view.rank, None)
        self.closing += 1
        self.world.close(view.id, self._closed)

    def leave_all(self) -> None:
        """All processes die."""
        for view in [*self.workers.values(), self.scheduler]:
            self.leave(view)

    def work_briefly(self) -> None:
        """Look something up, and retrieve it, just before leaving."""
        for view in [*self.workers.values(), self.scheduler]:
            if view is not None and view.joined:
                self._begin()
        for job in self.jobs:
            if self.workers or self.scheduler:
                self._lookup(job)
            if job.hit and self.workers:
                self._retrieve(job, 0, job.hit)

    def lost(self) -> None:
        """The daemon died."""
        self.workers.clear()
        self.scheduler = None
        for job in self.jobs:
            job.pending = False
        self.closing = 0
        self.tickets.clear()

    def _joined(self, view: SessionView) -> Callable[[Reply], None]:
        def joined(reply: Reply) -> None:
            if not isinstance(reply.body, EngineState):
                self.world.at(0.0, lambda: self._left_if_present(view))

        return joined

    def _left_if_present(self, view: SessionView) -> None:
        if view.id in self.world.model.sessions:
            self.leave(view)

    def _closed(self) -> None:
        self.closing -= 1

    def _absent(self) -> list[int | None]:
        absent: list[int | None] = [
            r for r in range(len(self.shape.shards)) if r not in self.workers
        ]
        if self.scheduler is None:
            absent.append(None)
        return absent

    def _gone(self, session: SessionID) -> bool:
        return self.world.model.sessions[session].closed

    # ------------------------------------------------------------ requests

    def _begin(self) -> None:
        namespace = self.namespace()
        if not namespace:
            return
        tokens, context = self.world.rng.choice(self.prompts)
        keys = prefix_keys(namespace, TOKENS_PER_CHUNK, tokens, context)
        self.made += 1
        self.jobs.append(Job(f"{self.shape.engine}-{self.made}", keys))

    def _advance(self, job: Job) -> None:
        """One step of a request, in the order in which an engine takes them, mostly."""
        rng = self.world.rng
        if job.open or not self.workers or (job.pending and rng.random() < 0.9):
            return
        if job.pending and rng.random() < 0.3:
            self._end(job)
        elif job.stage == "new" or rng.random() < 0.1:
            self._lookup(job)
        elif job.stage == "looked":
            job.stage = "computed"
            if job.hit and rng.random() < 0.9:
                self._retrieve(job, rng.randint(0, job.hit - 1), job.hit)
        elif job.stage == "computed" and job.stored < len(job.keys):
            first = max(job.stored, min(job.hit, len(job.keys) - 1))
            stop = rng.randint(first + 1, len(job.keys))
            self._store(job, 0 if rng.random() < 0.2 else first, stop)
        else:
            self._end(job)

    def _lookup(self, job: Job) -> None:
        sessions = [s for s in [*self.workers.values(), self.scheduler] if s is not None]
        session = self.world.rng.choice(sessions)

        def answered(reply: Reply) -> None:
            job.pending = is_pending(reply.body)
            if isinstance(reply.body, LookupReply) and not job.pending:
                job.hit = reply.body.chunks
                job.stage = "looked" if job.stage == "new" else job.stage

        self.world.request(session.id, Lookup(job.name, job.keys.data), answered)

    def _retrieve(self, job: Job, first: int, stop: int) -> None:
        keys = job.keys[first:stop]
        name = job.name
        if self.world.rng.random() < 0.1:
            keys, name = job.keys[first:], f"{job.name}-blind"
            self.world.saw(Fault.ASKED_BLINDLY)
        for view in self._some_workers():
            blocks = self.lend(view, len(keys), _needed(view, len(keys)))
            if blocks is not None:
                message = Retrieve(name, keys.data, blocks)
                loads.note(self.world, view, message)
                self._transfer(job, view, message)

    def _store(self, job: Job, first: int, stop: int) -> None:
        keys = job.keys[first:stop]
        rng = self.world.rng
        for view in self._some_workers():
            live = _slid(view, len(keys), rng) if rng.random() < 0.3 else None
            if view.memory is not None and view.memory.pace > 1.0:
                late = partial(self._store_rank, job, view, keys, live)
                self.world.later(rng.uniform(0.0, 0.5), late)
            else:
                self._store_rank(job, view, keys, live)
        job.stored = stop

    def _store_rank(
        self, job: Job, view: SessionView, keys: ChunkKeys, live: list[list[bool]] | None
    ) -> None:
        """One rank's part of a store; it may come late."""
        if view.closed or view.id not in self.world.model.sessions:
            return
        blocks = self.lend(view, len(keys), live)
        if blocks is not None:
            message = Store(job.name, keys.data, keys.first, keys.parent, blocks)
            loads.note(self.world, view, message)
            self._transfer(job, view, message)

    def _transfer(self, job: Job, view: SessionView, message: Store | Retrieve) -> None:
        job.open += 1
        name: list[tuple[SessionID, int]] = []

        def ended(body: Completed | None) -> None:
            job.open -= 1
            if name and name[0] in self.tickets:
                self.tickets.remove(name[0])

        number = self.world.request(view.id, message, on_end=ended)
        name.append((view.id, number))
        if (view.id, number) in self.world.model.tickets:
            self.tickets.append(name[0])

    def _end(self, job: Job) -> None:
        self.jobs.remove(job)
        forget = self.world.rng.random() < self.world.faults.forget_release
        if forget:
            self.world.saw(Fault.ENGINE_FORGETS)
        elif self.workers:
            view = self.world.rng.choice(list(self.workers.values()))
            self.world.request(view.id, Release(job.name))

    def _some_workers(self) -> list[SessionView]:
        """All workers in some order; now and then only some of them get that far."""
        rng = self.world.rng
        views = [view for view in self.workers.values() if view.id in self.world.model.sessions]
        rng.shuffle(views)
        if len(views) > 1 and rng.random() < 0.1:
            views = views[: rng.randint(1, len(views) - 1)]
            self.world.saw(Fault.SHARD_ABSENT)
        return views

    # ------------------------------------------------------------ blocks

    def lend(
        self, view: SessionView, chunks: int, live: list[list[bool]] | None = None
    ) -> Blocks | None:
        """Blocks for so many chunks, taken from the free ones; None where there are too few.
        ``live`` says which of each group's blocks aren't null."""
        memory = view.memory
        if memory is None:
            return None
        packed: list[bytes] = []
        taken: list[tuple[int, int]] = []
        for group in range(len(view.shape.layout.groups)):
            need = chunks * view.shape.layout.blocks_per_chunk(group)
            free = memory.free[group]
            if len(free) < need:
                for used, block in taken:
                    memory.free[used].append(block)
                return None
            ids = []
            for place in range(need):
                if live is not None and not live[group][place]:
                    ids.append(NULL_BLOCK)
                    continue
                block = free.pop(self.world.rng.randrange(len(free)))
                taken.append((group, block))
                ids.append(block)
            packed.append(b"".join(block.to_bytes(4, "little") for block in ids))
        return tuple(packed)


def _needed(view: SessionView, chunks: int) -> list[list[bool]]:
    """Which blocks of a hit's last ``chunks`` chunks an engine needs: all, or what its windows
    reach."""
    layout = view.shape.layout
    hybrid = any(group.window is None for group in layout.groups)
    needed = []
    for number, group in enumerate(layout.groups):
        total = chunks * layout.blocks_per_chunk(number)
        reach = chunks * TOKENS_PER_CHUNK - (group.window or 0) + 1
        live = [
            group.window is None or not hybrid or (i + 1) * group.tokens_per_block > reach
            for i in range(total)
        ]
        needed.append(live)
    return needed


def _slid(view: SessionView, chunks: int, rng: random.Random) -> list[list[bool]]:
    """Which blocks are left when each window has slid over some leading blocks."""
    layout = view.shape.layout
    left = []
    for number, group in enumerate(layout.groups):
        total = chunks * layout.blocks_per_chunk(number)
        lost = 0 if group.window is None else rng.randint(0, total)
        left.append([i >= lost for i in range(total)])
    return left


def draw_prompts(
    rng: random.Random, contexts: tuple[KeyContext, ...], tokens_max: int
) -> list[tuple[list[int], KeyContext]]:
    """Prompts that share prefixes: each goes on from somewhere in another one."""
    texts: list[list[int]] = [[rng.randrange(1000) for _ in range(rng.randint(4, tokens_max))]]
    for _ in range(rng.randint(2, 7)):
        base = rng.choice(texts)
        keep = rng.randint(0, min(len(base), tokens_max - 6))
        more = rng.randint(4, tokens_max - keep)
        texts.append(base[:keep] + [rng.randrange(1000) for _ in range(more)])
    return [(text, rng.choice(contexts)) for text in texts]
