"""Cancelling: transfers that are to stop, in steps.

A transfer may have tens of thousands of slots, reads and queued Moves, and a lost session thousands
of transfers. So an event stops STEP_PARTS of them, the rest follows at Ticks. A ticket counts as
cancelled from the start: nothing of it is begun any more, and what its Moves bring isn't committed.
Running Moves are waited for, as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvstore.core.reads import Reads
from kvstore.core.state import State
from kvstore.core.stats import Drop
from kvstore.core.storing import Storing
from kvstore.core.tickets import Ticket

STEP_PARTS = 128
"""Slots, reads and queued Moves that one event stops."""


class Cancelling:
    """The tickets that are being stopped, the one that is next first."""

    def __init__(self, state: State, storing: Storing, reads: Reads) -> None:
        self._state = state
        self._storing = storing
        self._reads = reads
        self._tickets: deque[tuple[Ticket, Drop]] = deque()

    def add(self, tickets: Iterable[Ticket], reason: Drop) -> None:
        """Stop these transfers, as far as one event may."""
        for ticket in tickets:
            if not ticket.cancelled:
                ticket.cancelled = True
                ticket.wait(0)
                self._tickets.append((ticket, reason))
        self.step()

    def running(self) -> bool:
        """Whether it goes on at the next Tick."""
        return bool(self._tickets)

    def step(self) -> None:
        """Stop some parts of transfers."""
        left = STEP_PARTS
        while self._tickets and left > 0:
            ticket, reason = self._tickets[0]
            done = self._stop(ticket, reason, left)
            if done < left:
                self._tickets.popleft()
                ticket.settle(0, ok=True)
                self._state.finish_if_ended(ticket)
                self._state.detach_after(ticket)
            left -= done + 1

    def _stop(self, ticket: Ticket, reason: Drop, most: int) -> int:
        """Stop up to ``most`` parts of a ticket; fewer, if that is all."""
        transfers, done = self._state.transfers, 0
        self._state.batches.drop(ticket)
        done += self._storing.cancel(ticket, reason, most)
        done += self._reads.cancel(ticket, most - done)
        while ticket.moves and done < most:
            job = transfers.queued_job(ticket.moves.pop())
            if job is not None:
                transfers.drop(job)
                self._state.end_wait(job, ok=False)
                self._state.let_go(job)
            done += 1
        return done
