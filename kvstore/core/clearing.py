"""Clearing: epochs rise at once, the answer waits until they are durable.

The fleet's epochs rise first, where there is a remote tier: then whatever was learned under an old
one belongs to a namespace that is dead when the clear is answered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore.core.errors import InvariantError
from kvstore.core.messages import (
    ADMIN,
    Clear,
    Cleared,
    Persisted,
    Refused,
    Request,
    SessionID,
)
from kvstore.core.remote_messages import RemoteClear, RemoteCleared
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.writing import Writing

STEP_SPACES = 256
"""Namespaces that one event looks at."""
_PERSIST_RETRY_S = 5.0


@dataclass(slots=True)
class _Clear:
    """A clear that is under way: ``left`` are the namespaces to look at still, ``remote`` is what
    became of the fleet's."""

    request: Request
    message: Clear
    remote: RemoteCleared | None = None
    left: list[Space] = field(default_factory=list)
    namespaces: int = 0
    chunks: int = 0


class Clearing:
    """The admin's clear, and the ends of Persist effects. With many namespaces a clear goes on at
    Ticks; it is answered when all of them are in their next epoch and that is durable."""

    def __init__(self, state: State, writing: Writing) -> None:
        self._state = state
        self._writing = writing
        self._remote: dict[int, _Clear] = {}
        self._asked = 0
        self._running: deque[_Clear] = deque()
        self._clears: dict[int, tuple[SessionID, int, Cleared]] = {}
        self._persist_at_s: float | None = None

    def clear(self, event: Request, message: Clear) -> None:
        """Begin a clear."""
        state = self._state
        if event.session != ADMIN:
            state.reply(event.session, event.id, Refused("clear: for the administrator only"))
            return
        clear = _Clear(event, message)
        if state.remote_up:
            self._asked += 1
            self._remote[self._asked] = clear
            effect = RemoteClear(self._asked, message.tenant, message.model)
            state.effects.append(effect)
            return
        if state.limits.remote is not None:
            clear.remote = RemoteCleared(0, 0, "the Redis tier is down")
        self._begin(clear)

    def remote_cleared(self, event: RemoteCleared) -> None:
        """The fleet's epochs have risen, or couldn't: now this node's."""
        clear = self._remote.pop(event.number, None)
        if clear is None:
            raise InvariantError(f"clear {event.number} of the remote tier wasn't asked for")
        clear.remote = event
        self._begin(clear)

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

    def _begin(self, clear: _Clear) -> None:
        """Look at this node's namespaces, after the clears before it."""
        clear.left = self._state.spaces.all()
        clear.left.reverse()
        self._running.append(clear)
        if len(self._running) == 1:
            self.step()

    def _end(self, clear: _Clear) -> None:
        """All namespaces are in their next epoch: answer once that is durable."""
        state, request = self._state, clear.request
        cleared = Cleared(clear.namespaces, clear.chunks, clear.remote)
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
                session, request, cleared = self._clears.pop(number)
                text = (
                    f"clear: done in memory, but not durable ({event.error}); it is tried again, "
                    "and until it succeeds a restart may bring the chunks back"
                )
                if cleared.remote is not None and cleared.remote.error:
                    text += f"; the fleet's chunks aren't cleared: {cleared.remote.error}"
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
