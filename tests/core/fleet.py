"""Fleet: a fake remote tier that several drivers share, each a node.

Nothing happens by itself: a test has a node's probes answered, and its Moves ended, when it likes;
or all that is under way carried out (``run``).
"""

from __future__ import annotations

from typing import Any

from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import (
    ChunkHeader,
    LookupReply,
    Move,
    MoveKind,
    MoveStatus,
    Place,
    TierName,
)
from kvstore.core.messages import Lookup as LookupMessage
from kvstore.core.remote_messages import (
    Probe,
    Probed,
    RemoteClear,
    RemoteCleared,
    RemoteEnter,
    RemoteState,
)
from kvstore.core.stats import RemoteStats
from tests.core.driver import Driver, Engine, limits

FIRST_EPOCH = 1_700_000_000_000_000
"""Epochs of the fleet are large, and have nothing to do with a node's."""
Name = tuple[str, bytes, int, bytes, int, Part]
"""(tenant, namespace, epoch, key, shard, part)."""


class Fleet:
    """What the remote tier holds: headers stand for values."""

    def __init__(self) -> None:
        self.values: dict[Name, ChunkHeader] = {}
        self.epochs: dict[tuple[str, bytes], int] = {}
        self.entered: list[RemoteEnter] = []

    def node(self, up: bool = True, remote: RemoteLimits | None = None, **settings: Any) -> Driver:
        """A daemon; ``settings`` are its sizes."""
        driver = Driver(limits(remote=remote or RemoteLimits(), **settings))
        if settings.get("nvme_slots"):
            driver.scanned()
        if up:
            driver.event(RemoteState(True))
        return driver

    def epoch(self, tenant: str, namespace: bytes) -> int:
        """The epoch of a namespace."""
        return self.epochs.setdefault((tenant, namespace), FIRST_EPOCH)

    # ------------------------------------------------------------ what nodes ask

    def answer(self, driver: Driver) -> int:
        """Answer all that a node asks now; tells how many questions there were."""
        asked, driver.remote[:] = list(driver.remote), []
        for effect in asked:
            if isinstance(effect, Probe):
                driver.event(self.probed(effect))
            elif isinstance(effect, RemoteClear):
                driver.event(self.cleared(effect))
            else:
                self.entered.append(effect)
        return len(asked)

    def probed(self, probe: Probe) -> Probed:
        """What a probe finds."""
        epoch = self.epoch(probe.tenant, probe.namespace)
        keys = [probe.keys[i : i + 32] for i in range(0, len(probe.keys), 32)]
        found = tuple(
            bytes(
                all(
                    (probe.tenant, probe.namespace, epoch, key, shard, part) in self.values
                    for shard in probe.shards
                )
                for key in keys
            )
            for part in probe.parts
        )
        return Probed(probe.id, epoch, found)

    def cleared(self, clear: RemoteClear) -> RemoteCleared:
        """Raise epochs."""
        matching = [
            (enter.tenant, enter.namespace)
            for enter in {(e.tenant, e.namespace): e for e in self.entered}.values()
            if clear.tenant in (None, enter.tenant)
            and clear.model in (None, enter.model, enter.alias)
        ]
        for name in matching:
            self.epochs[name] = self.epoch(*name) + 1
        return RemoteCleared(clear.number, len(matching))

    def end(self, driver: Driver, move: Move, status: MoveStatus = MoveStatus.OK) -> None:
        """A node's hands have done a Move."""
        if status is MoveStatus.OK and is_remote(move.source):
            stored = self.values.get(name(move))
            status = MoveStatus.CORRUPT if stored is None else status
            assert stored is None or _same(stored, move.header), f"{move} reads {stored}"
        if status is MoveStatus.OK and is_remote(move.target):
            assert name(move) not in self.values, f"{move} writes what is there"
            self.values[name(move)] = move.header
        driver.end(move, status)

    def run(self, driver: Driver) -> list[Move]:
        """Carry out all that a node has under way and what it leads to."""
        done: list[Move] = []
        while self.answer(driver) or driver.moves:
            for move in list(driver.moves):
                self.end(driver, move)
                done.append(move)
        return done

    def lose(self, keys: bytes) -> None:
        """A chunk is gone from the remote tier, whatever its epoch."""
        for gone in [value for value in self.values if value[3] == keys]:
            del self.values[gone]


def is_remote(place: Place | None) -> bool:
    """Whether a Move's end is in the remote tier."""
    return place is not None and place.tier is TierName.REDIS


def name(move: Move) -> Name:
    """The value that a Move reads or writes."""
    place = move.source if is_remote(move.source) else move.target
    assert place is not None
    head = move.header
    return head.tenant, head.namespace, place.slab, head.key, head.shard, head.part


def remote_moves(driver: Driver, kind: MoveKind) -> list[Move]:
    """The Moves from or to the remote tier that a node has in its hands."""
    return [m for m in driver.waiting(kind) if is_remote(m.source) or is_remote(m.target)]


def probes(driver: Driver) -> list[Probe]:
    """The probes that a node has out."""
    return [effect for effect in driver.remote if isinstance(effect, Probe)]


def ask(engine: Engine, keys: bytes, request: str = "r") -> int:
    """Send a lookup; returns its number."""
    return engine.driver.send(engine.scheduler, LookupMessage(request, keys))


def told(engine: Engine, number: int) -> list[tuple[str, int]]:
    """All answers to a lookup, in order."""
    bodies = engine.driver.answers(engine.scheduler, number)
    replies = [body for body in bodies if isinstance(body, LookupReply)]
    assert len(replies) == len(bodies)
    return [(body.status.name, body.chunks) for body in replies]


def remote_stats(driver: Driver) -> RemoteStats:
    """The remote tier's snapshot."""
    stats = driver.stats().remote
    assert stats is not None
    return stats


def _same(one: ChunkHeader, other: ChunkHeader) -> bool:
    """Whether two headers name the same part, whatever each node's own epoch is."""
    skip = {"epoch", "sequence"}
    fields = [field for field in ChunkHeader.__slots__ if field not in skip]
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def stored(engine: Engine, chunks: int, seed: int = 0) -> None:
    """A prompt is stored, and acknowledged though nobody has answered for the remote tier."""
    number = engine.store(engine.chain(chunks, seed))
    engine.driver.run(MoveKind.STORE)
    assert engine.driver.completed(engine.workers[0], number).done == b"\1" * chunks
