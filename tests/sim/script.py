"""Script: a world without chance, in which a test says what each engine does."""

from __future__ import annotations

from kvstore.core.keys import ChunkKeys, KeyContext, prefix_keys
from kvstore.core.layout import NULL_BLOCK
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    Body,
    Completed,
    Lookup,
    LookupReply,
    Message,
    Register,
    Reply,
    Retrieve,
    SetRevision,
    Store,
)
from tests.sim.faults import NONE
from tests.sim.setting import Setting
from tests.sim.shapes import HOST_SLAB_BYTES, NVME_SLAB_BYTES, TOKENS_PER_CHUNK, EngineShape
from tests.sim.views import SessionView
from tests.sim.world import World

ROOMY = Limits(host=TierLimits(16, HOST_SLAB_BYTES), nvme=TierLimits(16, NVME_SLAB_BYTES))


class Script:
    """One world and the sessions in it. Every call waits for its answer."""

    def __init__(self, limits: Limits = ROOMY, seed: int = 1) -> None:
        self.world = World(Setting(limits, NONE, ()), seed)
        self.world.start()
        self._requests = 0

    def engine(self, shape: EngineShape) -> list[SessionView]:
        """All workers of an engine, registered."""
        return [self.join(shape, rank) for rank in range(len(shape.shards))]

    def join(self, shape: EngineShape, rank: int) -> SessionView:
        """One worker of an engine, registered."""
        view = self.world.connect(shape, rank)
        shard = shape.shards[rank]
        self.ask(view, Register(shape.engine, shape.tenant, shape.namespace, shape.layout, shard))
        return view

    def keys(
        self, view: SessionView, tokens: list[int], context: KeyContext | None = None
    ) -> ChunkKeys:
        """Keys in the session's present namespace."""
        return prefix_keys(view.namespace, TOKENS_PER_CHUNK, tokens, context)

    def ask(self, view: SessionView, message: Message) -> Body:
        """Send a request and wait for its reply."""
        replies: list[Reply] = []
        self.world.request(view.id, message, replies.append)
        self.world.run_until(lambda: bool(replies))
        return replies[0].body

    def store(self, view: SessionView, keys: ChunkKeys) -> str:
        """Store all of these chunks; the done mask as text."""
        blocks = self.lend(view, len(keys))
        return _mask(self.ask(view, Store("store", keys.data, keys.first, keys.parent, blocks)))

    def lookup(self, view: SessionView, keys: ChunkKeys) -> int:
        """Chunks that are there, asked anew."""
        self._requests += 1
        body = self.ask(view, Lookup(f"request-{self._requests}", keys.data))
        assert isinstance(body, LookupReply)
        return body.chunks

    def retrieve(self, view: SessionView, keys: ChunkKeys) -> str:
        """Retrieve these chunks; the model compares the bytes. The done mask as text."""
        blocks = self.lend(view, len(keys))
        return _mask(self.ask(view, Retrieve("retrieve", keys.data, blocks)))

    def set_revision(self, view: SessionView, revision: str) -> None:
        """The engine's weights are updated."""
        self.ask(view, SetRevision(revision))

    def clear(self, tenant: str | None = None, model: str | None = None) -> None:
        """The administrator clears, and waits for the answer."""
        self.world.clear(tenant, model)
        self.world.run_until(lambda: not self.world.model.open)

    def rest(self) -> None:
        """Let all that is on its way arrive."""
        self.world.run_until(self.world.service.idle)

    def lend(self, view: SessionView, chunks: int) -> tuple[bytes, ...]:
        """Free blocks for so many chunks, none of them null."""
        memory = view.memory
        assert memory is not None
        packed = []
        for group in range(len(view.shape.layout.groups)):
            count = chunks * view.shape.layout.blocks_per_chunk(group)
            ids = [memory.free[group].pop(0) for _ in range(count)]
            assert NULL_BLOCK not in ids
            packed.append(b"".join(block.to_bytes(4, "little") for block in ids))
        return tuple(packed)


def _mask(body: Body) -> str:
    assert isinstance(body, Completed), body
    return "".join(map(str, body.done))
