"""Watching: what a session is told of the chunks that its engine's namespace gains and loses.

There is one question on its way at most, and nothing is waited for: what isn't fetched is kept by
the daemon, up to a limit, beyond which it says so with a *resync*. A resync also stands for a lost
connection: a daemon that isn't there can't give anything back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client_link import Link
from kvstore.client_waiters import Answer
from kvstore.core.change_meaning import MEANING
from kvstore.core.changes import ChangeKind
from kvstore.core.keys import KEY_BYTES, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import TierName
from kvstore.proto_gen import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """A ``part`` of a chunk can be loaded from a tier now (``present``), or not any more: FULL is
    the chunk but what its window groups keep of it."""

    key: ChunkKey
    tier: TierName
    present: bool
    part: Part = Part.FULL


@dataclass(frozen=True, slots=True)
class ChunkChanges:
    """What changed, in order. With ``resync`` nothing that was told before counts any more."""

    changes: tuple[ChunkChange, ...] = ()
    resync: bool = False


NOTHING = ChunkChanges()


class Watch:
    """One session's question for changes, asked anew when it is answered. One thread uses it."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._answer: Answer | None = None
        self._told = False
        self._refused = False

    def take(self, link: Link | None) -> ChunkChanges:
        """What was told since the last call; asks on a live link, and waits for nothing."""
        if link is not self._link:
            void = self._told
            self._link, self._answer, self._told, self._refused = link, None, False, False
            if void:
                return ChunkChanges(resync=True)
        if link is None or self._refused:
            return NOTHING
        if self._answer is not None:
            link.poll()
            if not self._answer.settled:
                return NOTHING
        message = None if self._answer is None else self._answer.message
        self._refused = message is not None and message.kind != pb.DaemonMessage.CHANGES
        self._answer = None if self._refused else link.watch()
        if message is None or self._refused:
            return NOTHING
        self._told = True
        return _read(message)


def _read(message: pb.DaemonMessage) -> ChunkChanges:
    """What doesn't fit together tells nothing, so it is a resync."""
    keys, kinds = message.keys, message.kinds
    if len(keys) != KEY_BYTES * len(kinds) or any(kind not in MEANING for kind in kinds):
        return ChunkChanges(resync=True)
    changes = []
    for place, kind in enumerate(kinds):
        key = keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        tier, part, present = MEANING[ChangeKind(kind)]
        changes.append(ChunkChange(ChunkKey(key), tier, present, part))
    return ChunkChanges(tuple(changes), message.resync)
