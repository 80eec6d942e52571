"""Lanes: Transfers under test, with sources that the test fills."""

from __future__ import annotations

from kvstore.core.messages import MoveKind, SessionID
from kvstore.core.transfers import Depths, Job, Sources, Transfers
from kvstore.testing import sample_header

ONE = SessionID(1)


class Lanes:
    """Transfers under test: jobs by name, and what goes out."""

    def __init__(
        self, copies: int = 2, reads: int = 2, writes: int = 2, answer_first_s: float = 0.0
    ) -> None:
        self.transfers = Transfers(Depths(copies, reads, writes, reads, writes), answer_first_s)
        self.can_land = True
        self.now = 0.0
        self.backlog: list[Job] = []
        self.shares: list[Job] = []

    def job(
        self, kind: MoveKind, session: SessionID | None = None, nbytes: int = 100, turn: int = 0
    ) -> Job:
        """A job that names no slot."""
        return Job(
            self.transfers.next_id(),
            kind,
            sample_header(1, nbytes),
            session=session,
            turn=SessionID(turn) if turn else None,
        )

    def push(self, kind: MoveKind, count: int = 1, session: SessionID | None = ONE) -> list[Job]:
        """Queue jobs of a kind."""
        jobs = [self.job(kind, session) for _ in range(count)]
        for job in jobs:
            self.transfers.push(job)
        return jobs

    def out(self) -> list[MoveKind]:
        """The kinds of the Moves that go out now, in order."""
        sources = Sources(lambda _: self.can_land, self._next_write, self._next_share)
        moves = self.transfers.dispatch(self.now, sources)
        return [move.kind for move in moves]

    def _next_write(self) -> Job | None:
        return self.backlog.pop(0) if self.backlog else None

    def _next_share(self) -> Job | None:
        return self.shares.pop(0) if self.shares else None
