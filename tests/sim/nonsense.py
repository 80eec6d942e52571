"""Nonsense: what a broken engine may send. It is answered, and nobody else is the worse for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvstore.core.keys import NO_PARENT, ChunkKey
from kvstore.core.layout import Shard
from kvstore.core.messages import (
    Attach,
    Body,
    Cancel,
    Clear,
    Completed,
    Done,
    Lookup,
    LookupReply,
    Message,
    Refused,
    Register,
    Release,
    Reply,
    Retrieve,
    SetRevision,
    Store,
)
from tests.sim.errors import SimulationError
from tests.sim.views import SessionView
from tests.sim.world import World

Bodies = tuple[type[Body], ...]


def nonsense(world: World, view: SessionView) -> None:
    """Send one senseless request of a session that is registered or attached."""
    message, allowed = world.rng.choice(_KINDS)(world.rng, view)

    def answered(reply: Reply) -> None:
        if not isinstance(reply.body, allowed):
            raise SimulationError(f"{message} was answered by {reply.body}")

    world.request(view.id, message, answered)


def stranger(world: World, view: SessionView) -> None:
    """A connection that never says who it is asks for something, or one that isn't like the other
    ranks wants to join them; and it goes."""
    shape = view.shape
    guest = world.connect(shape, 0 if world.rng.random() < 0.3 else None)
    if guest.memory is not None:
        shard = Shard(tp_rank=7, tp_size=world.rng.choice((8, 9)))
        world.request(
            guest.id,
            Register(shape.engine, shape.tenant, shape.namespace, shape.layout, shard),
        )
        world.close(guest.id, lambda: None)
        return
    message = world.rng.choice(
        (Lookup("r", _key(world.rng)), Release("r"), Cancel(1), SetRevision("r9"))
    )

    def answered(reply: Reply) -> None:
        if not isinstance(reply.body, Refused):
            raise SimulationError(f"a stranger's {message} was answered by {reply.body}")

    world.request(guest.id, message, answered)
    world.close(guest.id, lambda: None)


def _key(rng: random.Random) -> bytes:
    return rng.randbytes(32)


def _again(rng: random.Random, view: SessionView) -> tuple[Message, Bodies]:
    shape = view.shape
    if rng.random() < 0.5:
        return Attach(shape.engine, shape.tenant), (Refused,)
    shard = shape.shards[view.rank]
    return Register(shape.engine, shape.tenant, shape.namespace, shape.layout, shard), (Refused,)


def _clear(rng: random.Random, view: SessionView) -> tuple[Message, Bodies]:
    return Clear(None, None), (Refused,)


def _unknown(rng: random.Random, view: SessionView) -> tuple[Message, Bodies]:
    return rng.choice((Release("never seen"), Cancel(rng.randrange(1 << 40)))), (Done,)


def _empty(rng: random.Random, view: SessionView) -> tuple[Message, Bodies]:
    none = tuple(b"" for _ in view.shape.layout.groups)
    if view.memory is None or rng.random() < 0.4:
        return Lookup("empty", b""), (LookupReply,)
    if rng.random() < 0.5:
        return Retrieve("empty", b"", none), (Completed, Refused)
    return Store("empty", b"", 0, NO_PARENT, none), (Completed, Refused)


def _misfit(rng: random.Random, view: SessionView) -> tuple[Message, Bodies]:
    """Blocks that don't fit: a group too few, an ID too few, an ID that isn't there, half an ID."""
    layout = view.shape.layout
    blocks = [bytes(4 * layout.blocks_per_chunk(g)) for g in range(len(layout.groups))]
    kind = rng.randrange(4)
    if kind == 0:
        blocks.pop()
    elif kind == 1:
        blocks[0] = blocks[0][4:]
    elif kind == 2:
        blocks[-1] = (0xFFFFFFFE).to_bytes(4, "little") + blocks[-1][4:]
    else:
        blocks[0] = blocks[0][:-1]
    keys, packed = _key(rng), tuple(blocks)
    if rng.random() < 0.5:
        return Retrieve("misfit", keys, packed), (Refused,)
    return Store("misfit", keys, 0, NO_PARENT, packed), (Refused,)


_KINDS: tuple[Callable[[random.Random, SessionView], tuple[Message, Bodies]], ...] = (
    _again,
    _clear,
    _unknown,
    _empty,
    _misfit,
)


def tangled(rng: random.Random, real: Sequence[bytes], count: int) -> tuple[bytes, int, ChunkKey]:
    """Keys, depth and parent of a store that no chain of chunks can have. The keys are new, so no
    lookup of an honest request meets them; the parent may be a real chunk."""
    keys = [_key(rng) for _ in range(count)]
    if count > 1 and rng.random() < 0.3:
        keys[-1] = keys[0]
    parent = rng.choice([*real, NO_PARENT, keys[-1], _key(rng)])
    return b"".join(keys), rng.choice((0, 1, 2, 7, 1 << 31)), ChunkKey(parent)
