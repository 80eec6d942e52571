"""State: the core's collaborators in one place, and the few acts that several verbs share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstore.core.admission import ByteBudget
from kvstore.core.batches import Batches
from kvstore.core.directory import Directory
from kvstore.core.engines import Engines, Session
from kvstore.core.eviction import Policy
from kvstore.core.leases import Leases
from kvstore.core.limits import Limits
from kvstore.core.messages import Body, Detach, Effect, Reply, SessionID
from kvstore.core.spaces import Spaces
from kvstore.core.stats import Drop, Histogram
from kvstore.core.tickets import Ticket
from kvstore.core.transfers import Job, Transfers, depths


class State:
    """Everything that the core knows. ``effects`` collects what the current event leads to."""

    def __init__(self, limits: Limits, policy: Callable[[], Policy]) -> None:
        self.limits = limits
        self.spaces = Spaces()
        self.engines = Engines(self.spaces, limits.sessions_max)
        self.directory = Directory(limits, policy)
        self.leases = Leases(limits.lease_s, limits.leases_max)
        self.transfers = Transfers(depths(limits), limits.answer_first_s)
        self.budget = ByteBudget(limits.write_budget_bytes_s, limits.write_burst_s)
        self.batches = Batches()
        self.effects: list[Effect] = []
        self.now = 0.0
        self.sequence = 0
        self.remote_up = False
        self.remote_ups = 0
        """How often it came up."""
        self.drops: Counter[str] = Counter()
        self.lookups = 0
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.chunks_done: Counter[str] = Counter()
        self.latency = {"store": Histogram(), "retrieve": Histogram()}
        self._probes = 0

    def reply(self, session: SessionID, number: int, body: Body) -> None:
        """Answer a session."""
        self.effects.append(Reply(session, number, body))

    def next_probe(self) -> int:
        """A number for a new Probe."""
        self._probes += 1
        return self._probes

    def drop(self, reason: Drop, count: int = 1) -> None:
        """Count chunk parts that weren't kept or given back."""
        if count:
            self.drops[reason.value] += count

    def let_go(self, job: Job) -> None:
        """A job has ended: its slots are held by it no longer."""
        for slot in (job.source, job.target):
            if slot is not None:
                self.directory.let_go(slot, job.id)

    def end_wait(self, job: Job, ok: bool) -> None:
        """A STORE or LOAD has ended: its ticket waits for it no longer."""
        if job.wait is not None:
            job.wait.ticket.moves.discard(job.id)
            job.wait.ticket.settle(job.wait.chunk, ok)

    def finish_if_ended(self, ticket: Ticket) -> None:
        """Complete a ticket that has nothing left to wait for."""
        session = self.engines.session(ticket.session)
        if not ticket.ended() or session is None or session.tickets.get(ticket.id) is not ticket:
            return
        del session.tickets[ticket.id]
        session.store_bytes -= ticket.nbytes
        self.latency[ticket.kind].add(self.now - ticket.started_s)
        completed = ticket.completed()
        self.chunks_done[ticket.kind] += completed.done.count(1)
        if not session.closing:
            self.reply(ticket.session, ticket.id, completed)

    def detach_if_idle(self, session: Session) -> None:
        """Let a lost session's memory go once no Move uses it."""
        known = self.engines.session(session.id) is session
        if known and session.closing and not session.moves and not session.tickets:
            self.engines.remove(session)
            self.effects.append(Detach(session.id))

    def detach_after(self, ticket: Ticket) -> None:
        """A ticket may have ended: let its session's memory go if that was the last."""
        session = self.engines.session(ticket.session)
        if session is not None:
            self.detach_if_idle(session)
