"""Batches: long requests begun in steps, so that no event takes long.

A store or retrieve of thousands of chunks would hold the loop for as long as all of its chunks take
to decide. So an event begins STEP_CHUNKS of them; the rest is begun at Ticks, sessions in turn. The
stores of one session are begun in the order in which they came, as a chunk needs its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.tickets import Ticket

STEP_CHUNKS = 128


@dataclass(slots=True, eq=False)
class Batch:
    """A request's chunks that aren't begun yet: [``next``, ``chunks``).

    ``begin`` starts one chunk and tells whether the batch goes on; when it doesn't, that chunk and
    all after it are ``fail``-ed. ``end`` is called once, when nothing is left to begin.
    """

    ticket: Ticket
    chunks: int
    begin: Callable[[int], bool]
    fail: Callable[[int], None]
    end: Callable[[], None]
    next: int = 0

    def step(self) -> bool:
        """Begin some chunks; tells whether all are begun."""
        stop = min(self.next + STEP_CHUNKS, self.chunks)
        while self.next < stop:
            if not self.begin(self.next):
                self.give_up()
            else:
                self.next += 1
        return self.next >= self.chunks

    def give_up(self) -> None:
        """Begin nothing more."""
        for chunk in range(self.next, self.chunks):
            self.fail(chunk)
        self.next = self.chunks


class Batches:
    """Batches that are under way, the next to step first."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batch: Batch) -> None:
        """Begin a batch, as much of it as one event may; the ticket waits for its end."""
        batch.ticket.wait(0)
        if any(_follows(batch, other) for other in self._batches) or not batch.step():
            self._batches.append(batch)
        else:
            _finish(batch)

    def step(self) -> Ticket | None:
        """One step of the batch whose turn it is; returns the ticket whose batch has ended."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        if batch.step():
            _finish(batch)
            return batch.ticket
        self._put_back(batch)
        return None

    def drop(self, ticket: Ticket) -> None:
        """The ticket is cancelled: what isn't begun fails."""
        for batch in list(self._batches):
            if batch.ticket is ticket:
                self._batches.remove(batch)
                batch.give_up()
                _finish(batch)

    def _put_back(self, batch: Batch) -> None:
        """Behind all others, but before those that follow it."""
        later = [i for i, other in enumerate(self._batches) if _follows(other, batch)]
        self._batches.insert(later[0] if later else len(self._batches), batch)


def _follows(batch: Batch, other: Batch) -> bool:
    """Whether a batch must wait for another: one of its session and kind."""
    ours, theirs = batch.ticket, other.ticket
    return (ours.session, ours.kind) == (theirs.session, theirs.kind)


def _finish(batch: Batch) -> None:
    batch.end()
    batch.ticket.settle(0, ok=True)
