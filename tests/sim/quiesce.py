"""Quiesce: what must come true once nothing goes wrong any more.

Everything asked is answered, the hands come to rest, leases that nobody released end by themselves,
the backlog drains and a full tier grows again. Then each engine that can be completed stores a new
prompt, finds all of it and gets it back; what was written is on the disk. When all have left and
everything was cleared, no slot is in use, nor after another start.
"""

from __future__ import annotations

from kvstore.core.changes import Watch
from kvstore.core.keys import ChunkKeys, prefix_keys
from kvstore.core.layout import Part
from kvstore.core.limits import slot_bytes
from kvstore.core.messages import (
    Completed,
    Lookup,
    LookupReply,
    Release,
    Reply,
    Retrieve,
    Store,
    TierName,
)
from tests.sim.actors import FakeEngine
from tests.sim.errors import SimulationError
from tests.sim.model import is_pending
from tests.sim.shapes import NVME_SLAB_BYTES, TOKENS_PER_CHUNK, EngineShape
from tests.sim.views import SessionView
from tests.sim.watchers import Watchers
from tests.sim.world import World

PROBE_CHUNKS = 2
"""Of a new prompt; but one where chunks have two parts, as a chunk's WINDOW part may have to leave
for the next one's."""
NVME_SLOTS_LEAST = NVME_SLAB_BYTES // 16_384
"""Slots of one slab at least, whatever the chunk size."""


class Quiesce:
    """The end of one world."""

    def __init__(self, world: World, engines: list[FakeEngine], watchers: Watchers) -> None:
        self.world = world
        self.engines = engines
        self.watchers = watchers
        self._probes = 0

    def all(self) -> None:
        """From the last fault to an empty daemon."""
        self.rest()
        self.probe()
        self.close()
        self.empty()

    def rest(self) -> None:
        """Nobody asks for more: all ends that was begun, and nothing is held for nobody."""
        world = self.world
        world.calm()
        self.until_answered()
        world.run_until(world.service.idle)
        world.run_for(max(world.limits.lease_s, world.limits.nvme_retry_s) + 6.0)
        world.run_until(world.service.idle)
        self._must_hold_nothing("leases", "moves", "backlog", "pins", "stores", "full", "remote")
        self.watchers.check()

    def probe(self) -> None:
        """A new prompt is stored, found and retrieved by each engine that is whole."""
        for engine in self.engines:
            if self.complete(engine) and engine.namespace() and self.fits(engine.shape):
                self._probe(engine)

    def close(self) -> None:
        """Everybody leaves, some in the middle of things: nothing may be held any more."""
        world = self.world
        for engine in self.engines:
            engine.work_briefly()
        for engine in self.engines:
            engine.leave_all()
        world.run_until(lambda: not any(engine.closing for engine in self.engines))
        self._must_hold_nothing("sessions", "engines")
        world.run_until(world.service.idle)
        self._must_hold_nothing("leases", "moves", "backlog", "pins")

    def empty(self) -> None:
        """After a clear of everything no slot is in use: none was lost on the way, and none comes
        back when the daemon starts anew."""
        self.world.clear(None, None)
        self.until_answered()
        self._sweep()
        self._must_hold_nothing("slots", "staging", "reads", "batches", "remote")
        self._must_hold_nothing("keys of leases", "engines with leases")
        self.world.crash()
        self._sweep()
        self._must_hold_nothing("slots")

    def _sweep(self) -> None:
        """Let the scan and the sweeps end."""
        world = self.world
        world.run_until(lambda: world.scanned is None)
        trees = list(world.service._state.directory.trees())
        world.run_until(lambda: not any(tree.sweeping() for tree in trees))

    def until_answered(self) -> None:
        """All that was asked is answered, but for what is asked until something changes."""
        messages = self.world.model.open
        self.world.run_until(lambda: all(type(one) is Watch for one in messages.values()))

    # ------------------------------------------------------------ probes

    def complete(self, engine: FakeEngine) -> bool:
        """Start all processes of an engine; tells whether they could be."""
        for _ in range(len(engine.shape.shards) + 1):
            engine.join()
        views = [*engine.workers.values(), engine.scheduler]
        whole = len(engine.workers) == len(engine.shape.shards)
        self.until_answered()
        return whole and all(view is not None and view.joined for view in views)

    def fits(self, shape: EngineShape) -> bool:
        """Whether each size of slot that the probe needs has its fair share of the host tier."""
        sizes = {one for engine in self.engines for one in _sizes(engine.shape)}
        share = self.world.limits.host.slabs // len(sizes)
        host = self.world.limits.host
        needed: dict[int, int] = {}
        for size in _sizes(shape):
            needed[size] = needed.get(size, 0) + _chunks(shape) * shape.shards[0].count()
        return all(count <= share * (host.slab_bytes // size) for size, count in needed.items())

    def _probe(self, engine: FakeEngine) -> None:
        world, views = self.world, list(engine.workers.values())
        self._probes += 1
        tokens = [1_000_000 + self._probes, *range(_chunks(engine.shape) * TOKENS_PER_CHUNK - 1)]
        keys = prefix_keys(engine.namespace(), TOKENS_PER_CHUNK, tokens)
        self.store(engine, keys)
        for view in views:
            body = self.answer(view, Lookup(f"probe-{view.id}", keys.data))
            if not isinstance(body, LookupReply) or body.chunks < len(keys):
                raise SimulationError(f"s{view.id} finds {body} of what it has just stored")
        for view in views:
            self.send(view, Retrieve("probe", keys.data, engine.lend(view, len(keys))))
        self.until_answered()
        for view in views:
            self.answer(view, Release(f"probe-{view.id}"))
        world.run_until(world.service.idle)
        self._must_be_written(engine, [bytes(key) for key in keys])
        world.model.counts["probes"] += 1

    def store(self, engine: FakeEngine, keys: ChunkKeys) -> None:
        """All ranks store a prompt, and are told that it is kept."""
        views = list(engine.workers.values())
        blocks = [engine.lend(view, len(keys)) for view in views]
        for view, lent in zip(views, blocks, strict=True):
            self.send(view, Store("probe", keys.data, keys.first, keys.parent, lent))
        self.until_answered()

    def _must_be_written(self, engine: FakeEngine, keys: list[bytes]) -> None:
        """The probe is on NVMe, if there is one that takes all there is and has room for it."""
        world, limits = self.world, self.world.limits
        shape, nvme = engine.shape, world.service._state.directory.nvme
        free = not limits.write_budget_bytes_s and limits.admit_after == 1
        slots = len(keys) * shape.shards[0].count() * len(_sizes(shape))
        if nvme is None or not free or slots > min(limits.write_backlog_max, NVME_SLOTS_LEAST):
            return
        space = world.service._state.spaces.find(shape.tenant, engine.namespace())
        if limits.nvme is None or limits.nvme.slabs < 2 * len(self.engines) or space is None:
            return
        for key in keys:
            copy = nvme.find(space, key)
            if copy is None or not copy.visible():
                raise SimulationError(f"all is quiet, but {key.hex()[:6]} isn't written")
        world.model.counts["probes written"] += 1

    def send(self, view: SessionView, message: Store | Retrieve) -> None:
        def ended(body: Completed | None) -> None:
            if body is None or 0 in body.done:
                raise SimulationError(f"all is quiet, but s{view.id} gets {body} for {message}")

        self.world.request(view.id, message, on_end=ended)

    def answer(self, view: SessionView, message: Lookup | Release) -> object:
        replies: list[Reply] = []
        self.world.request(view.id, message, replies.append)
        self.world.run_until(lambda: not is_pending(replies[-1].body))
        return replies[-1].body

    # ------------------------------------------------------------ leaks

    def _must_hold_nothing(self, *names: str) -> None:
        world, state = self.world, self.world.service._state
        stats = world.service.stats(world.now)
        held = {
            "sessions": stats.sessions,
            "engines": len(stats.engines),
            "leases": stats.leases,
            "moves": stats.moves_in_flight + stats.moves_queued + len(world.hands.running),
            "backlog": stats.write_backlog,
            "pins": sum(tier.pinned for tier in stats.tiers),
            "full": sum(tier.full for tier in stats.tiers),
            "stores": sum(session.store_bytes for session in state.engines.sessions()),
            "slots": sum(tier.slots_used for tier in stats.tiers),
            "staging": sum(bool(slot.holders) for slot in state.directory.staging()),
            "reads": world.service._reads.reading(),
            "remote": _held_of_remote(world),
            "batches": len(state.batches._batches),
            "keys of leases": state.leases._key_bytes,
            "engines with leases": len(state.leases._engines) + len(state.leases._lost),
        }
        left = {name: held[name] for name in names if held[name]}
        if left:
            raise SimulationError(f"nothing goes on, but something is still held: {left}")


def _held_of_remote(world: World) -> int:
    """What the core keeps of probes, reads and writes of the remote tier."""
    service = world.service
    probing, sharing, reads = service._probing, service._sharing, service._reads
    waits = len(probing._waiting) + len(probing._out) + len(probing._open) + len(sharing)
    kept = len(probing._due) + len(sharing._given_up) + probing._waiting_bytes
    return waits + kept + len(reads._names) + len(reads._origins) + len(reads._staged)


def _chunks(shape: EngineShape) -> int:
    return PROBE_CHUNKS if len(_sizes(shape)) == 1 else 1


def _sizes(shape: EngineShape) -> list[int]:
    """The size of each part's slot in the host tier."""
    parts = [part for part in Part if shape.layout.part_groups(part)]
    return [slot_bytes(TierName.HOST, shape.layout.part_bytes(part)) for part in parts]
