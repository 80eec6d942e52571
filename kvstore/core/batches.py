"""Batches: long requests begun in steps, so that no event takes long.

A store or retrieve of thousands of chunks would hold the loop for as long as all of its chunks take
to decide. So an event begins STEP_CHUNKS of them; the rest is begun at Ticks, sessions in turn. The
stores of one session are begun in the order in which they came, as a chunk needs its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvstore.core.messages import SessionID
from kvstore.core.tickets import Ticket

STEP_CHUNKS = 64


class Step(Enum):
    """How a batch goes on behind a chunk. NEXT: with the next one. LATER: with the same one, at the
    next Tick, as room is still being made. END: not at all."""

    NEXT = "next"
    LATER = "later"
    END = "end"


@dataclass(slots=True, eq=False)
class Batch:
    """A request's chunks that aren't begun yet: [``next``, ``chunks``).

    ``begin`` starts one chunk and tells how the batch goes on; where it doesn't, ``fail`` is called
    with the first chunk that isn't begun. ``end`` is called once, when nothing is left to begin.
    """

    ticket: Ticket
    chunks: int
    begin: Callable[[int], Step]
    fail: Callable[[int], None]
    end: Callable[[], None]
    next: int = 0

    def step(self) -> bool:
        """Begin some chunks; tells whether all are begun."""
        stop = min(self.next + STEP_CHUNKS, self.chunks)
        while self.next < stop:
            step = self.begin(self.next)
            if step is Step.LATER:
                break
            if step is Step.END:
                self.give_up()
            else:
                self.next += 1
        return self.next >= self.chunks

    def give_up(self) -> None:
        """Begin nothing more."""
        if self.next < self.chunks:
            self.fail(self.next)
            self.next = self.chunks


class Batches:
    """Batches that are under way: for each session and kind a queue, the next to step first."""

    def __init__(self) -> None:
        self._queues: dict[tuple[SessionID, str], deque[Batch]] = {}
        self._batches: dict[Ticket, Batch] = {}

    def running(self) -> bool:
        """Whether any is left to begin, at the next Tick."""
        return bool(self._batches)

    def add(self, batch: Batch) -> None:
        """Begin a batch, as much of it as one event may; the ticket waits for its end."""
        ticket = batch.ticket
        ticket.wait(0)
        queue = self._live(ticket)
        if queue is None and batch.step():
            _finish(batch)
            return
        self._batches[ticket] = batch
        if queue is None:
            self._queues[ticket.session, ticket.kind] = deque([batch])
        else:
            queue.append(batch)

    def step(self) -> Ticket | None:
        """One step of the batch whose turn it is; returns the ticket whose batch has ended."""
        while self._queues:
            turn, queue = next(iter(self._queues.items()))
            del self._queues[turn]
            while queue and queue[0].ticket not in self._batches:
                queue.popleft()
            if queue:
                self._queues[turn] = queue
                return self._step(queue)
        return None

    def drop(self, ticket: Ticket) -> None:
        """The ticket is cancelled: what isn't begun fails."""
        batch = self._batches.pop(ticket, None)
        if batch is not None:
            batch.give_up()
            _finish(batch)

    def _step(self, queue: deque[Batch]) -> Ticket | None:
        batch = queue[0]
        if not batch.step():
            return None
        queue.popleft()
        del self._batches[batch.ticket]
        _finish(batch)
        return batch.ticket

    def _live(self, ticket: Ticket) -> deque[Batch] | None:
        """The queue that a ticket's batch has to wait in; None where nothing waits there."""
        turn = ticket.session, ticket.kind
        queue = self._queues.get(turn)
        while queue and queue[0].ticket not in self._batches:
            queue.popleft()
        if queue is not None and not queue:
            del self._queues[turn]
            return None
        return queue


def _finish(batch: Batch) -> None:
    batch.end()
    batch.ticket.settle(0, ok=True)
