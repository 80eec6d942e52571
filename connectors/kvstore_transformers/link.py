"""DaemonLink: all that the engine says to the daemon, in calls that can't fail.

A cache may always miss, so whatever goes wrong here is a miss, or a store that didn't happen; the
guard that the engine brings sees to that. What can't be answered away is a block that the daemon
may still read or write; ``settle`` says whether it has come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from kvstore.core.keys import ChunkKeys
from kvstore.core.messages import HitStatus
from kvstore_transformers.paged import GROUP

PENDING_S = 0.25
"""How long a lookup whose remote answer is out is asked again before the local answer is taken."""
Answer = TypeVar("Answer")


class Outcome(Protocol):
    """How a transfer ended; kvstore's TransferOutcome."""

    @property
    def leading_chunks(self) -> int: ...


class Ticket(Protocol):
    """A transfer under way; kvstore's Ticket."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> Outcome | None: ...
    def cancel(self) -> None: ...


class Found(Protocol):
    """What a lookup found; kvstore's LookupResult."""

    @property
    def status(self) -> HitStatus: ...
    @property
    def chunks(self) -> int: ...


class Session(Protocol):
    """A registered engine; kvstore's WorkerSession."""

    def keys(self, token_ids: Sequence[int]) -> ChunkKeys: ...
    def lookup(self, request: str, keys: ChunkKeys) -> Found: ...
    def release(self, request: str) -> None: ...
    def store(
        self, request: str, keys: ChunkKeys, blocks: Mapping[str, Sequence[int]]
    ) -> Ticket: ...
    def retrieve(
        self, request: str, keys: ChunkKeys, blocks: Mapping[str, Sequence[int]]
    ) -> Ticket: ...
    def wait_ready(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Guard(Protocol):
    """Runs a call to the client and gives its answer, or ``otherwise`` when it raises."""

    def __call__(self, verb: str, call: Callable[[], Answer], otherwise: Answer) -> Answer: ...


class DaemonLink:
    """One registration of the engine's memory; every call goes through ``guard``."""

    def __init__(self, session: Session, guard: Guard) -> None:
        self._session = session
        self._guarded = guard

    def keys(self, tokens: Sequence[int]) -> ChunkKeys | None:
        """One key a full chunk of ``tokens``; None while the engine isn't registered."""
        keys = self._guarded("keys", lambda: self._session.keys(tokens), None)
        return keys if keys else None

    def lookup(self, request: str, keys: ChunkKeys) -> int:
        """Leading chunks that are there; takes the request's lease, which ``release`` ends."""
        return self._guarded("lookup", lambda: self._lookup(request, keys), 0)

    def retrieve(self, request: str, keys: ChunkKeys, blocks: Sequence[int]) -> Ticket | None:
        """Have chunks written into ``blocks``, which are the daemon's until the ticket ends."""
        return self._guarded(
            "retrieve", lambda: self._session.retrieve(request, keys, {GROUP: blocks}), None
        )

    def store(self, request: str, keys: ChunkKeys, blocks: Sequence[int]) -> Ticket | None:
        """Have chunks read from ``blocks``, which must not change until the ticket ends."""
        return self._guarded(
            "store", lambda: self._session.store(request, keys, {GROUP: blocks}), None
        )

    def release(self, request: str) -> None:
        """End the request's lease; without one nothing happens."""
        self._guarded("release", lambda: self._session.release(request), None)

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the daemon knows this engine, waiting at most ``timeout_s`` for it."""
        return self._guarded("wait_ready", lambda: self._session.wait_ready(timeout_s), False)

    def close(self) -> None:
        """Leave the daemon, which then lets go of the memory."""
        self._guarded("close", self._session.close, None)

    def _lookup(self, request: str, keys: ChunkKeys) -> int:
        found = self._session.lookup(request, keys)
        until = time.monotonic() + PENDING_S
        while found.status is HitStatus.PENDING and time.monotonic() < until:
            time.sleep(0.001)
            found = self._session.lookup(request, keys)
        return found.chunks


def settle(tickets: Iterable[Ticket], deadline_s: float, acknowledge_s: float) -> bool:
    """Wait for transfers to end; at the deadline ask to cancel and wait for the acknowledgements.

    True: all have ended and their blocks are the engine's again. False: the daemon said nothing in
    time, and the blocks must not be touched.
    """
    until = time.monotonic() + deadline_s
    late = [ticket for ticket in tickets if not _ended(ticket, until)]
    for ticket in late:
        ticket.cancel()
    until = time.monotonic() + acknowledge_s
    return all([_ended(ticket, until) for ticket in late])


def leading(ticket: Ticket) -> int:
    """Leading chunks that an ended transfer moved; the rest must be computed."""
    outcome = ticket.wait(0.0)
    return outcome.leading_chunks if outcome is not None else 0


def _ended(ticket: Ticket, until: float) -> bool:
    """Whether a transfer ends before a moment of the monotonic clock."""
    if not ticket.done():
        ticket.wait(max(0.0, until - time.monotonic()))
    return ticket.done()
