"""The daemon's side of the engine link: one event loop, which alone drives the core.

Everything that happens becomes an event of the core in this thread (frames, ends of Moves, ends of
sessions, time), and the core's effects are carried out right away. Whatever may take long runs in
worker threads: mapping and unmapping an engine's memory, and making namespaces durable.

A bug in the core (InvariantError, or any exception outside a request) stops the daemon: ``run``
raises it. Sockets then stay open until ``close``, which the daemon calls when no Move runs any
more, because the end of a session's stream tells its engine that its blocks are its own again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from kvstore.core.errors import InvariantError, SessionLostError
from kvstore.core.guard import guarded
from kvstore.core.messages import (
    ADMIN,
    Body,
    Detach,
    Effect,
    Event,
    Message,
    Move,
    Persist,
    Reply,
    Request,
    Tick,
)
from kvstore.core.remote_messages import RemoteEffect
from kvstore.core.stats import LatencySummary
from kvstore.server_connections import TURN_S, SessionStats
from kvstore.server_hands import Mover, OpenPages, Tenants
from kvstore.server_listener import Listener
from kvstore.server_persister import Persister
from kvstore.server_sessions import Sessions

_ACCEPT_PAUSE_S = 0.1
_DRAIN_STEP_S = 0.005
_DETACH_S = 1.0
"""At a stop, how long sessions may take to detach beyond the drain."""
_STOPPING = "the daemon is stopping"

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Service(Protocol):
    """The core, as the server drives it."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event in, give effects out."""

    def idle(self) -> bool:
        """Whether no Move is queued or in flight."""

    def next_tick_s(self, now: float) -> float:
        """How long until a Tick is useful."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A snapshot of the engine link. ``lookup`` is the time from a frame parsed to its reply
    queued."""

    sessions: tuple[SessionStats, ...]
    lookup: LatencySummary
    connections_total: int
    connections_refused: int
    protocol_errors: int
    requests_refused: int
    internal_errors: int
    sessions_ended: int
    joins_overdue: int


class EngineServer:
    """The engine link's server and the core's only driver.

    ``persist`` makes a Persist durable (blocking; OSError or KVStoreError where it can't),
    ``open_pages(fd, nbytes, layout)`` maps and validates an engine's memory (blocking; the
    descriptor stays the server's), ``tenants(credential, uid)`` names the tenant or raises
    KVStoreError. ``run``, ``close`` and ``stats`` belong to the loop's thread; ``stop``, ``post``,
    ``call`` and ``admin`` may be called from any thread.
    """

    def __init__(
        self,
        socket_path: str,
        service: Service,
        mover: Mover,
        persist: Callable[[Persist], None],
        open_pages: OpenPages,
        tenants: Tenants,
    ) -> None:
        self._listener = Listener(socket_path)
        self._socket_path = socket_path
        self._service = service
        self._mover = mover
        self._sessions = Sessions(self._drive, self.post, mover, open_pages, tenants)
        self._persister = Persister(persist, self.post, self._fail_soon)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._failed: asyncio.Event | None = None
        self._posted: deque[Event] = deque()
        self._draining_posted = False
        self._admin_waiting: dict[int, asyncio.Future[Body]] = {}
        self._admin_last = 0
        self._asked: deque[tuple[Future[Any], Callable[[], Coroutine[Any, Any, Any]]]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at_s = 0.0
        self._accepts = True
        self._drain_s: float | None = None
        self._failure: InvariantError | None = None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Listen and serve until ``stop``; ``on_ready`` is called once engines can connect. Raises
        ConfigError or TierUnavailableError where the socket can't be had, and whatever stopped the
        daemon."""
        self._listener.open()
        loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._failed = asyncio.Event()
        self._loop = loop
        loop.set_exception_handler(self._on_loop_error)
        try:
            loop.add_reader(self._listener.fileno(), self._accept)
            self._tick()
            self._drain_posted()
            _log.info("listening on %s", self._socket_path)
            on_ready()
            if self._drain_s is None and self._failure is None:
                await self._wake.wait()
            self._stop_accepting(loop)
            if self._failure is None:
                await self._end()
            if self._failure is not None:
                raise self._failure
        finally:
            self._leave(loop)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self, drain_s: float) -> None:
        """Stop accepting, drain for at most ``drain_s``, end all sessions, return from ``run``."""
        self._drain_s = drain_s
        self._call_soon(self._wake_up)

    def close(self) -> None:
        """Close what ``run`` had to leave open: sessions whose Moves hadn't ended. Call it when
        the mover has stopped; idempotent."""
        self._sessions.close()
        self._persister.close()
        self._listener.close()

    def post(self, *events: Event) -> None:
        """Hand events to the core soon; from any thread, in order per thread."""
        self._posted.extend(events)
        if not self._draining_posted:
            self._draining_posted = True
            self._call_soon(self._drain_posted)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` in the loop's thread, between events; it must be short."""

        async def run() -> T:
            return function()

        return self._ask(run)

    def admin(self, message: Message) -> Future[Body]:
        """Put a message of the administration to the core; its answer may take until something is
        durable."""

        async def ask() -> Body:
            answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
            self._admin_last += 1
            self._admin_waiting[self._admin_last] = answer
            self._drive(Request(ADMIN, self._admin_last, message))
            return await answer

        return self._ask(ask)

    def stats(self) -> ServerStats:
        """What the link counts; call it in the loop's thread."""
        counts = self._sessions.counts
        return ServerStats(
            sessions=self._sessions.stats(),
            lookup=self._sessions.lookups.summary(),
            connections_total=counts.connections_total,
            connections_refused=counts.connections_refused,
            protocol_errors=counts.protocol_errors,
            requests_refused=counts.requests_refused,
            internal_errors=counts.internal_errors,
            sessions_ended=counts.sessions_ended,
            joins_overdue=counts.joins_overdue,
        )

    # ------------------------------------------------------------ driving the core

    def _drive(self, event: Event) -> None:
        """Let the core handle one event and carry out what it says."""
        if self._failure is not None or self._loop is None:
            return
        now_s = time.monotonic()
        guarded(lambda: self._step(event, now_s), self._broke)
        wanted_s = now_s + self._service.next_tick_s(now_s)
        if wanted_s < self._tick_at_s - 1e-3:
            self._arm(wanted_s)

    def _step(self, event: Event, now_s: float) -> None:
        effects = self._service.handle(event, now_s)
        for effect in effects:
            if not isinstance(effect, Move):
                self._carry_out(effect)
        if moves := [effect for effect in effects if isinstance(effect, Move)]:
            self._mover.submit(*moves)

    def _broke(self, error: Exception) -> NoReturn:
        """The core was left in the middle of an event: nothing it holds is known to be right."""
        raise self._fail(error) from error

    def _carry_out(self, effect: Reply | Detach | Persist | RemoteEffect) -> None:
        if isinstance(effect, Reply):
            if effect.session == ADMIN:
                self._answer_admin(effect)
            else:
                self._sessions.reply(effect)
        elif isinstance(effect, Detach):
            self._sessions.detach(effect.session)
        elif isinstance(effect, Persist):
            self._persister.submit(effect)
        else:
            self._mover.remote(effect)

    def _answer_admin(self, effect: Reply) -> None:
        answer = self._admin_waiting.pop(effect.id, None)
        if answer is not None and not answer.done():
            answer.set_result(effect.body)

    def _drain_posted(self) -> None:
        """Handle what other threads posted, for one turn; the flag falls first, so that nothing is
        missed."""
        until_s = time.monotonic() + TURN_S
        self._draining_posted = False
        while self._posted:
            self._drive(self._posted.popleft())
            if time.monotonic() > until_s:
                break
        if self._posted and not self._draining_posted:
            self._draining_posted = True
            self._call_soon(self._drain_posted)

    def _tick(self) -> None:
        self._tick_at_s = time.monotonic()
        self._drive(Tick())
        now_s = time.monotonic()
        self._arm(now_s + self._service.next_tick_s(now_s))

    def _arm(self, at_s: float) -> None:
        assert self._loop is not None, "the server runs"
        if self._timer is not None:
            self._timer.cancel()
        self._tick_at_s = at_s
        self._timer = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._tick)

    # ------------------------------------------------------------ the loop

    def _accept(self) -> None:
        assert self._loop is not None, "the server runs"
        try:
            peer = self._listener.accept()
        except OSError as error:
            if self._accepts:
                _log.warning("no connection can be accepted: %s", error.strerror)
            self._accepts = False
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        if peer is not None:
            self._accepts = True
            self._sessions.add(peer)

    def _accept_again(self) -> None:
        if self._loop is not None and self._listener.listening():
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._listener.listening():
            loop.remove_reader(self._listener.fileno())
            self._listener.stop_listening()

    async def _end(self) -> None:
        """Drain the core, then end the sessions and wait for their memory to be free of Moves."""
        _log.info("stopping")
        self._sessions.refuse_work(_STOPPING)
        until_s = time.monotonic() + (self._drain_s or 0.0)
        await self._wait_until(self._service.idle, until_s)
        self._sessions.end_all(_STOPPING)
        until_s = max(until_s, time.monotonic() + _DETACH_S)
        await self._wait_until(lambda: not len(self._sessions), until_s)

    async def _wait_until(self, reached: Callable[[], bool], until_s: float) -> None:
        """Look in short steps whether a state is reached, at most until then or a failure."""
        failed = self._failed
        assert failed is not None, "the server runs"
        while not (reached() or failed.is_set() or time.monotonic() >= until_s):
            with suppress(TimeoutError):
                await asyncio.wait_for(failed.wait(), _DRAIN_STEP_S)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take everything off the loop; nothing is driven any more."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        self._sessions.stop_reading()
        self._stop_accepting(loop)
        self._listener.close()
        for answer in self._admin_waiting.values():
            if not answer.done():
                answer.set_exception(SessionLostError(_STOPPING))
        self._admin_waiting.clear()
        self._fail_asked()

    def _fail(self, error: BaseException) -> InvariantError:
        """A bug, as any error is that nobody expected: nothing is driven any more, and ``run``
        raises what this gives."""
        bug = error if isinstance(error, InvariantError) else InvariantError(f"server: {error!r}")
        if self._failure is None:
            self._failure = bug
            _log.critical("the daemon stops because of a bug: %s", error, exc_info=error)
            if self._failed is not None:
                self._failed.set()
            self._wake_up()
        return bug

    def _fail_soon(self, error: BaseException) -> None:
        """The same from any thread."""
        self._call_soon(functools.partial(self._fail, error))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._fail(error or InvariantError(f"server: {context.get('message')}"))

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _call_soon(self, function: Callable[[], object]) -> None:
        """From any thread; does nothing before the loop runs or after it ended."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the loop for another thread; fails with SessionLostError where no
        loop will run it."""
        asked: Future[T] = Future()
        self._asked.append((asked, work))
        if self._loop is None:
            self._fail_asked()
        else:
            self._call_soon(self._begin_asked)
        return asked

    def _begin_asked(self) -> None:
        while self._asked and self._loop is not None:
            asked, work = self._asked.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            task = self._loop.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._end_asked, asked))

    def _end_asked(self, asked: Future[Any], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = SessionLostError(_STOPPING) if task.cancelled() else task.exception()
        if error is not None:
            asked.set_exception(error)
        else:
            asked.set_result(task.result())

    def _fail_asked(self) -> None:
        while self._asked:
            with suppress(IndexError):
                asked, _ = self._asked.popleft()
                if asked.set_running_or_notify_cancel():
                    asked.set_exception(SessionLostError("the daemon isn't running"))
