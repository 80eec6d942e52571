"""Ticket: a store or retrieve that a session has asked for, until its Completed.

A chunk of a ticket has *waits*: Moves of its own that must end, and slots (its own or another
session's) that must commit. The ticket ends when no wait is left, so its blocks come back only when
no Move touches them, and a store's acknowledgement never precedes the commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.core.messages import Completed, MoveID, SessionID
from kvstore.core.slots import Handle

if TYPE_CHECKING:
    from kvstore.core.transfers import Job


_OPPOSITE = bytes([1]) + bytes(255)


class Ticket:
    """One store or retrieve. ``failed`` is per chunk; ``moves`` are its live Moves, ``reads`` the
    READs that it waits for and its waits for each, ``own_slots`` the slots that it fills,
    ``joined`` those that another ticket fills, each with its wait."""

    __slots__ = (
        "cancelled",
        "failed",
        "id",
        "joined",
        "keys",
        "kind",
        "moves",
        "nbytes",
        "open_waits",
        "own_slots",
        "reads",
        "reason",
        "request",
        "session",
        "started_s",
    )

    def __init__(self, session: SessionID, number: int, kind: str, request: str) -> None:
        self.session = session
        self.id = number
        self.kind = kind
        self.request = request
        self.keys = b""
        self.failed = bytearray()
        self.open_waits = 0
        self.moves: set[MoveID] = set()
        self.own_slots: list[Handle] = []
        self.joined: list[tuple[Handle, Wait]] = []
        self.reads: dict[Job, tuple[Wait, ...]] = {}
        self.cancelled = False
        self.reason = ""
        self.nbytes = 0
        self.started_s = 0.0

    def begin(self, keys: bytes, chunks: int, now: float) -> None:
        """Start with no chunk failed and nothing to wait for."""
        self.keys = keys
        self.failed = bytearray(chunks)
        self.started_s = now

    def wait(self, chunk: int, things: int = 1) -> Wait:
        """So many more things to wait for."""
        self.open_waits += things
        return Wait(self, chunk)

    def settle(self, chunk: int, ok: bool) -> None:
        """A wait has ended."""
        self.open_waits -= 1
        if not ok:
            self.failed[chunk] = 1

    def fail(self, chunk: int, reason: str = "") -> None:
        """A chunk can't be done."""
        self.failed[chunk] = 1
        self.reason = self.reason or reason

    def fail_all(self, first: int, reason: str = "") -> None:
        """The chunks from ``first`` on can't be done."""
        self.failed[first:] = b"\1" * (len(self.failed) - first)
        self.reason = self.reason or reason

    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.open_waits == 0

    def completed(self) -> Completed:
        """The reply."""
        done = bytes(self.failed.translate(_OPPOSITE))
        return Completed(done, self.cancelled, self.reason)


class Wait(NamedTuple):
    """A ticket's interest in one chunk's slot."""

    ticket: Ticket
    chunk: int
