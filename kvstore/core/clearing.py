"""Clearing: epochs rise at once, the answer waits until they are durable."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.core.messages import (
    ADMIN,
    Clear,
    Cleared,
    Persisted,
    Refused,
    Request,
    SessionID,
)
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.writing import Writing

STEP_SPACES = 256
"""Namespaces that one event looks at."""
_PERSIST_RETRY_S = 5.0


@dataclass(slots=True)
class _Clear:
    """A clear that is under way: ``left`` are the namespaces to look at still."""

    request: Request
    message: Clear
    left: list[Space]
    namespaces: int = 0
    chunks: int = 0


class Clearing:
    """The admin's clear, and the ends of Persist effects. With many namespaces a clear goes on at
    Ticks; it is answered when all of them are in their next epoch and that is durable."""

    def __init__(self, state: State, writing: Writing) -> None:
        self._state = state
        self._writing = writing
        self._running: deque[_Clear] = deque()
        self._clears: dict[int, tuple[SessionID, int, Cleared]] = {}
        self._persist_at_s: float | None = None

    def clear(self, event: Request, message: Clear) -> None:
        """Begin a clear."""
        state = self._state
        if event.session != ADMIN:
            state.reply(event.session, event.id, Refused("clear: for the administrator only"))
            return
        spaces = state.spaces.all()
        spaces.reverse()
        self._running.append(_Clear(event, message, spaces))
        if len(self._running) == 1:
            self.step()

    def running(self) -> bool:
        """Whether a clear goes on at the next Tick."""
        return bool(self._running)

    def step(self) -> None:
        """Clear some namespaces of the clear whose turn it is."""
        if not self._running:
            return
        state, clear = self._state, self._running[0]
        followers: dict[Space, Space] = {}
        for _ in range(min(len(clear.left), STEP_SPACES)):
            space = clear.left.pop()
            if not space.matches(clear.message.tenant, clear.message.model):
                continue
            clear.namespaces += 1
            if not space.alive:
                continue  # another clear was here meanwhile; this one waits for its Persist too
            clear.chunks += space.chunks()
            followers[space] = state.spaces.raise_epoch(space)
            for tree in state.directory.trees():
                tree.drop_space(space)
        state.engines.replace_spaces(followers)
        if not clear.left:
            self._running.popleft()
            self._end(clear)

    def _end(self, clear: _Clear) -> None:
        """All namespaces are in their next epoch: answer once that is durable."""
        state, request = self._state, clear.request
        cleared = Cleared(clear.namespaces, clear.chunks)
        if not clear.namespaces:
            state.reply(request.session, request.id, cleared)
            return
        persist = state.spaces.persist()
        self._clears[persist.number] = (request.session, request.id, cleared)
        state.effects.append(persist)

    def persisted(self, event: Persisted) -> None:
        state = self._state
        if event.error:
            self._persist_at_s = state.now + _PERSIST_RETRY_S
            self._writing.drop_unpersisted()
            for number in [n for n in self._clears if n <= event.number]:
                session, request, _ = self._clears.pop(number)
                text = (
                    f"clear: done in memory, but not durable ({event.error}); it is tried again, "
                    "and until it succeeds a restart may bring the chunks back"
                )
                state.reply(session, request, Refused(text))
            return
        state.spaces.persisted(event.number)
        self._writing.await_records()
        for number in [n for n in self._clears if n <= event.number]:
            session, request, cleared = self._clears.pop(number)
            state.reply(session, request, cleared)

    def tick(self) -> None:
        """Try again what couldn't be made durable."""
        if self._persist_at_s is not None and self._state.now >= self._persist_at_s:
            self._persist_at_s = None
            self._writing.await_records()
            self._state.effects.append(self._state.spaces.persist())
