"""One connection of a client to the daemon: what is said on it, from HELLO to its end.

HELLO goes out; when the daemon's has come and agrees, REGISTER or ATTACH follows; when that is
answered the link is live. It is *ready* while the engine is, which the daemon tells. Where work
can't be sent at once (not ready, the daemon isn't reading, an answer is overdue) it is a miss or a
refused transfer at once: a daemon that hangs never makes its engine wait.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from kvstore.client_channel import STEP_MAX_S, Channel
from kvstore.client_counts import LinkCounts
from kvstore.client_joining import Join, check_engine
from kvstore.client_pushes import Pushes
from kvstore.client_tickets import Ticket
from kvstore.client_waiters import Answer, Until, Waiter
from kvstore.core.errors import CapacityError, KVStoreError, ProtocolError
from kvstore.core.guard import guarded
from kvstore.core.messages import HitStatus
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import hello, hello_mismatch
from kvstore.wire_messages import read_refusal

OVERDUE_RETRY_S = 5.0
"""A daemon that owes an answer is asked again after this long, in case it never comes."""
HELD_STEP_S = 0.01
"""How often a wait looks at a transfer that waits for its event."""


class Phase(Enum):
    """GREETING: HELLO is out. JOINING: REGISTER or ATTACH is out. LIVE: joined. OVER: refused,
    closed or lost."""

    GREETING = "greeting"
    JOINING = "joining"
    LIVE = "live"
    OVER = "over"


class Ready(Protocol):
    """A CUDA event, or anything else that says when the engine's memory may be touched."""

    def query(self) -> bool:
        """Whether it has happened; may raise RuntimeError where it never will."""


class _Held(NamedTuple):
    ticket: Ticket
    message: pb.ClientMessage
    ready: Ready


class Link:
    """A session's connection and everything that is under way on it. Safe to use from several
    threads.

    ``opening`` is settled once the link is live or over; ``refusal`` then says whether the daemon
    refused it. ``namespace`` is the digest that keys start from, empty while the engine isn't
    ready. ``pushes`` are the answers of pending lookups. ``wake`` gets
    the attention of the thread that watches the channel.
    """

    def __init__(
        self,
        peer: socket.socket,
        join: Callable[[], Join],
        counts: LinkCounts,
        wake: Callable[[], None],
    ) -> None:
        self.phase = Phase.GREETING
        self.namespace = b""
        self.tokens_per_chunk = 0
        self.daemon: pb.Hello | None = None
        self.refusal: KVStoreError | None = None
        self.opening = Answer()
        self.pushes = Pushes()
        self.channel = Channel(peer, self._dispatch, self._lost, wake)
        self._join = join
        self._counts = counts
        self._process = os.getpid()
        self._last_id = 0
        self._answers: dict[int, Answer] = {}
        self._tickets: dict[int, Ticket] = {}
        self._held: list[_Held] = []
        self._joining = pb.ClientMessage()
        self._revision = ""
        self._revision_id = 0
        self._overdue_id, self._overdue_s = 0, 0.0

    def live(self) -> bool:
        """Whether the daemon takes requests of this session."""
        return self.phase is Phase.LIVE and not self.channel.ending

    def gone(self) -> bool:
        """Whether it is over, or will be at the end of the stream."""
        return self.phase is Phase.OVER or self.channel.ending

    def open(self) -> None:
        """Say HELLO; the rest happens as answers are taken in."""
        self._counts.links += 1
        with self.channel.condition:
            self._send(pb.ClientMessage(kind=pb.ClientMessage.HELLO, hello=hello()))

    def lookup(self, request: str, keys: bytes, timeout_s: float) -> pb.DaemonMessage | None:
        """The daemon's answer, or None: not ready, lost, or not within ``timeout_s``.

        While a former answer is overdue nothing is asked, so that a stopped daemon costs one
        timeout, not one a lookup.
        """
        channel = self.channel
        with channel.condition:
            self._counts.lookups += 1
            if not self._may_ask() or self._owed():
                self._counts.lookups_skipped += 1
                return None
            message = pb.ClientMessage(kind=pb.ClientMessage.LOOKUP, request=request, keys=keys)
            answer = self._ask(message)
            started_s = time.monotonic()
            channel.wait(answer, started_s + timeout_s)
            found = answer.message
            if not answer.settled:
                del self._answers[message.id]
                self._overdue_id, self._overdue_s = message.id, started_s
                self._counts.lookups_overdue += 1
                with suppress(CapacityError):  # when it is answered, nobody wants the lease
                    self._send(pb.ClientMessage(kind=pb.ClientMessage.RELEASE, request=request))
            return found

    def watch(self) -> Answer | None:
        """Ask once for what changes in the engine's namespace; None where it can't be asked."""
        with self.channel.condition:
            asks = self._may_ask()
            return self._ask(pb.ClientMessage(kind=pb.ClientMessage.WATCH)) if asks else None

    def start(self, ticket: Ticket, message: pb.ClientMessage) -> None:
        """Send a STORE or RETRIEVE, or settle its ticket at once where that can't be."""
        with self.channel.condition:
            if ticket.settled:
                return
            self._counts.transfers += 1
            if not self._may_ask():
                self._counts.transfers_refused += 1
                ticket.settle(b"", False, self._why_not())
                return
            self._number(message)
            ticket.number = message.id
            self._tickets[message.id] = ticket
            self.channel.send(message.SerializeToString())
            self.channel.drain()  # after it: the daemon is at work meanwhile

    def hold(self, ticket: Ticket, message: pb.ClientMessage, ready: Ready) -> None:
        """Keep a transfer until ``ready`` says that the engine's stream has come so far."""
        with self.channel.condition:
            if self.live():
                self._held.append(_Held(ticket, message, ready))
                self.channel.step_s = HELD_STEP_S
            else:
                self._counts.transfers_refused += 1
                ticket.settle(b"", False, self._why_not())

    def send_ready(self) -> bool:
        """Send the held transfers that are ready by now; tells whether any is held still."""
        for held in tuple(self._held):
            ready = guarded(held.ready.query, partial(_not_ready, held.ticket))
            if ready or held.ticket.settled:
                with self.channel.condition, suppress(ValueError):
                    self._held.remove(held)
                    self.channel.step_s = HELD_STEP_S if self._held else STEP_MAX_S
                self.start(held.ticket, held.message)
        return bool(self._held)

    def release(self, request: str) -> None:
        """Say that the request needs its hit no longer; a lease that isn't released ends by
        itself."""
        self._tell(pb.ClientMessage(kind=pb.ClientMessage.RELEASE, request=request))

    def cancel(self, ticket: Ticket) -> None:
        """Ask the daemon to stop a transfer; its completion settles the ticket. One that is still
        held ends now."""
        self._leave_parents()
        with self.channel.condition:
            if not ticket.number and not self.channel.lost:
                ticket.settle(b"", True, "")
                return
        self._tell(pb.ClientMessage(kind=pb.ClientMessage.CANCEL, transfer=ticket.number))

    def set_revision(self, revision: str, until_s: float) -> bool:
        """Ask for another revision; the link isn't ready until the daemon has said yes. Tells
        whether it did in time."""
        with self.channel.condition:
            self._revision, self.namespace = revision, b""
            if self.phase is Phase.LIVE:
                self._ask_revision()
            self.channel.wait(Until(lambda: not self._revision or self.gone()), until_s)
            return self.live() and not self._revision

    def poll(self) -> None:
        """Take in what has come, without waiting."""
        self._leave_parents()
        with self.channel.condition:
            self.channel.drain()

    def wait(self, waiter: Waiter, until_s: float) -> None:
        """Take in what comes until the waiter is settled or the link lost, at most until then."""
        self._leave_parents()
        with self.channel.condition:
            self.channel.wait(waiter, until_s)

    def wait_ready(self, until_s: float) -> bool:
        """Whether the engine is ready, waiting for it at most until then."""
        with self.channel.condition:
            self.channel.wait(Until(lambda: bool(self.namespace) or self.gone()), until_s)
            return bool(self.namespace)

    def end(self, reason: str) -> None:
        """Say nothing any more and await the end of the stream. Idempotent."""
        with self.channel.condition:
            self._over(reason)

    def abandon(self) -> None:
        """In a forked child: leave the parent's stream alone. Its tickets stay open for ever here:
        the daemon may use their blocks, in memory that both processes share."""
        self._process = os.getpid()
        self.channel.abandon()
        self._forget()

    def open_tickets(self) -> int:
        """Transfers that haven't ended."""
        return len(self._tickets) + len(self._held)

    def _leave_parents(self) -> None:
        """A ticket's copy in a forked child leads here without its session: the link is over."""
        if self._process != os.getpid():
            self.abandon()

    # ------------------------------------------------------------ asking

    def _may_ask(self) -> bool:
        """Whether work may be sent now; takes in what has come where that may change it."""
        if self.phase is Phase.LIVE and not self.namespace:
            self.channel.drain()
        return not self.channel.full() and bool(self.namespace) and self.live()

    def _why_not(self) -> str:
        if not self.live():
            return self.channel.reason or "the daemon isn't connected"
        if not self.namespace:
            return "the engine isn't ready: not every rank is registered"
        return "the daemon isn't reading: the socket is full"

    def _owed(self) -> bool:
        """Whether an overdue answer still hasn't come, nor was waited for long enough."""
        if self._overdue_id:
            self.channel.drain()
            if time.monotonic() - self._overdue_s > OVERDUE_RETRY_S:
                self._overdue_id = 0
        return self._overdue_id > 0 or not self.live()

    def _number(self, message: pb.ClientMessage) -> None:
        self._last_id += 1
        message.id = self._last_id

    def _send(self, message: pb.ClientMessage, descriptors: tuple[int, ...] = ()) -> None:
        self._number(message)
        self.channel.send(message.SerializeToString(), descriptors)

    def _ask(self, message: pb.ClientMessage) -> Answer:
        answer = Answer()
        self._number(message)
        self._answers[message.id] = answer
        self.channel.send(message.SerializeToString())
        return answer

    def _tell(self, message: pb.ClientMessage) -> None:
        """Send what needs no answer; it may be left out where too much waits already."""
        with self.channel.condition:
            if self.phase is Phase.LIVE:
                with suppress(CapacityError):
                    self._send(message)

    def _ask_revision(self) -> None:
        message = pb.ClientMessage(kind=pb.ClientMessage.SET_REVISION, revision=self._revision)
        with suppress(CapacityError):
            self._send(message)
            self._revision_id = message.id

    # ------------------------------------------------------------ what the daemon says

    def _dispatch(self, message: pb.DaemonMessage) -> None:
        kind, number = message.kind, message.id
        if number > self._last_id:
            raise ProtocolError(f"an answer to message {number}, which was never sent")
        if kind in (pb.DaemonMessage.LOOKUP, pb.DaemonMessage.CHANGES):
            self._answer(number, message)
        elif kind == pb.DaemonMessage.COMPLETED:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                ticket.settle(message.done, message.cancelled, message.reason)
        elif kind == pb.DaemonMessage.ENGINE:
            self._engine_told(number, message.engine)
        elif kind == pb.DaemonMessage.REFUSED:
            self._refused(number, message)
        elif kind == pb.DaemonMessage.HELLO:
            self._greeted(message.hello)

    def _answer(self, number: int, message: pb.DaemonMessage) -> None:
        if number >= self._overdue_id:
            self._overdue_id = 0
        answer = self._answers.pop(number, None)
        if answer is not None:
            if message.status == HitStatus.PENDING:
                self.pushes.owe(number)  # here: what ends it may lie behind it in the socket
            answer.settle(message)
        else:
            self.pushes.come(number, message.status == HitStatus.MISS)

    def _greeted(self, daemon: pb.Hello) -> None:
        if self.phase is not Phase.GREETING:
            raise ProtocolError("a second HELLO")
        self.daemon = daemon
        mismatch = hello_mismatch(hello(), daemon)
        if mismatch:
            self._refuse(ProtocolError(mismatch))
            return
        self.phase = Phase.JOINING
        join = self._join()
        self._joining = join.message
        self._revision = self._revision or join.revision
        self._send(join.message, join.descriptors)

    def _engine_told(self, number: int, engine: pb.Engine) -> None:
        if self._revision_id and number == self._revision_id:
            self._revision, self._revision_id = "", 0
        if engine.ready:
            check_engine(engine, self._joining)
            self.tokens_per_chunk = engine.tokens_per_chunk
        self.namespace = engine.namespace if engine.ready and not self._revision else b""
        if self.phase is Phase.JOINING and number:
            self.phase = Phase.LIVE
            self.opening.settle(None)
        if self._revision and not self._revision_id and engine.ready:
            self._ask_revision()

    def _refused(self, number: int, message: pb.DaemonMessage) -> None:
        if self.phase in (Phase.GREETING, Phase.JOINING):
            self._refuse(read_refusal(message))
        elif number == 0:
            self._over(message.reason)
        elif number in self._tickets:
            self._tickets.pop(number).settle(b"", False, message.reason)
        elif number == self._revision_id:
            self._revision_id = 0
        else:
            self._answer(number, message)

    def _refuse(self, error: KVStoreError) -> None:
        self.refusal = error
        self._over(str(error))

    def _over(self, reason: str) -> None:
        self.phase, self.namespace = Phase.OVER, b""
        self.channel.end(reason)
        self.opening.settle(None)

    def _lost(self) -> None:
        """The end of the stream: every block is the engine's again, every answer is None."""
        if self.phase is Phase.LIVE:
            self._counts.losses += 1
        for answer in self._answers.values():
            answer.settle(None)
        held = [held.ticket for held in self._held]
        for ticket in [*self._tickets.values(), *held]:
            ticket.settle(b"", False, f"the session was lost: {self.channel.reason}")
        self._forget()

    def _forget(self) -> None:
        self.phase, self.namespace = Phase.OVER, b""
        self.opening.settle(None)
        self._answers.clear()
        self._tickets.clear()
        self._held.clear()
        self.pushes.clear()


def _not_ready(ticket: Ticket, error: Exception) -> bool:
    """An engine's event that fails will never come: nothing waits for it."""
    ticket.settle(b"", False, f"the ready event failed: {error}")
    return True
