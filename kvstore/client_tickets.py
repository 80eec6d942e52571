"""Tickets: what ``store`` and ``retrieve`` return, and how a transfer ended.

A ticket's blocks are the engine's again only when it is settled, and nothing settles it but the
daemon's completion (of a cancelled transfer too: that is the acknowledgement) or the end of the
connection, which the daemon closes only when no copy runs any more. Never a timer.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.client_waiters import Waiter
from kvstore.core.layout import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a store or retrieve ended; its blocks are the engine's again.

    ``done`` says per chunk, in the order of the keys, whether it was stored or retrieved.
    ``failed_blocks`` maps each group to the block IDs of the chunks that were not, in token order,
    null blocks left out; a group without any is left out. ``reason`` is one line where the daemon
    or the connection, rather than a plain miss, is why.
    """

    done: tuple[bool, ...]
    failed_blocks: dict[str, tuple[int, ...]]
    cancelled: bool
    reason: str

    @property
    def leading_chunks(self) -> int:
        """Chunks done before the first that isn't."""
        return self.done.index(False) if False in self.done else len(self.done)


class GroupBlocks(NamedTuple):
    """A group's block IDs of a transfer, packed as u32, ``per_chunk`` of them a chunk."""

    name: str
    packed: bytes
    per_chunk: int


class Carrier(Protocol):
    """The connection that a ticket's transfer goes over."""

    def poll(self) -> None:
        """Take in what has come, without waiting."""

    def wait(self, waiter: Waiter, until_s: float) -> None:
        """Take in what comes until the waiter is settled, at most until then."""

    def cancel(self, ticket: Ticket) -> None:
        """Ask the daemon to stop the transfer."""


class Ticket:
    """One store or retrieve that was asked for. Safe to use from several threads.

    Mutable: it goes from open to settled once and then stays. Holds no memory of the engine. A
    forked child's copy of it never settles: the transfer is its parent's.
    """

    __slots__ = ("_blocks", "_cancelled", "_carrier", "_mask", "_outcome", "_reason", "chunks",
                 "number", "settled")  # fmt: skip

    def __init__(self, chunks: int, blocks: tuple[GroupBlocks, ...], carrier: Carrier) -> None:
        self.chunks = chunks
        self.number = 0
        self.settled = False
        self._blocks = blocks
        self._carrier = carrier
        self._mask = b""
        self._cancelled = False
        self._reason = ""
        self._outcome: TransferOutcome | None = None

    def done(self) -> bool:
        """Whether the transfer has ended; looks at the socket without waiting."""
        if not self.settled:
            self._carrier.poll()
        return self.settled

    def wait(self, timeout_s: float) -> TransferOutcome | None:
        """The outcome, or None if there is none within ``timeout_s``; the ticket then stays open
        and its blocks stay the daemon's."""
        if not self.settled:
            self._carrier.wait(self, time.monotonic() + timeout_s)
        return self.outcome()

    def cancel(self) -> None:
        """Ask for the transfer to stop. The blocks come back with the outcome, as ever; a cancelled
        store never commits."""
        if not self.settled:
            self._carrier.cancel(self)

    def outcome(self) -> TransferOutcome | None:
        """The outcome if there is one already; does no I/O."""
        if self.settled and self._outcome is None:
            self._outcome = self._build()
        return self._outcome

    def settle(self, mask: bytes, cancelled: bool, reason: str) -> None:
        """The transfer has ended; ``mask`` has one byte a chunk, what is missing counts as not
        done. The first call counts."""
        if self.settled:
            return
        self._mask = mask[: self.chunks].ljust(self.chunks, b"\0")
        self._cancelled = cancelled
        self._reason = reason
        self.settled = True

    def _build(self) -> TransferOutcome:
        done = tuple(byte == 1 for byte in self._mask)
        failed: dict[str, tuple[int, ...]] = {}
        missing = [chunk for chunk, ok in enumerate(done) if not ok]
        for group in self._blocks if missing else ():
            ids = array("I", group.packed)
            size = group.per_chunk
            found = [
                block
                for chunk in missing
                for block in ids[chunk * size : (chunk + 1) * size]
                if block != NULL_BLOCK
            ]
            if found:
                failed[group.name] = tuple(found)
        return TransferOutcome(done, failed, self._cancelled, self._reason)
