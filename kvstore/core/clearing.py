"""Clearing: epochs rise at once, the answer waits until they are durable."""

from __future__ import annotations

from kvstore.core.messages import (
    ADMIN,
    Clear,
    Cleared,
    Persisted,
    Refused,
    Request,
    SessionID,
)
from kvstore.core.state import State
from kvstore.core.writing import Writing

_PERSIST_RETRY_S = 5.0


class Clearing:
    """The admin's clear, and the ends of Persist effects."""

    def __init__(self, state: State, writing: Writing) -> None:
        self._state = state
        self._writing = writing
        self._clears: dict[int, tuple[SessionID, int, Cleared]] = {}
        self._persist_at: float | None = None

    def clear(self, event: Request, message: Clear) -> None:
        state = self._state
        if event.session != ADMIN:
            state.reply(event.session, event.id, Refused("clear: for the administrator only"))
            return
        chunks = matched = 0
        for space in state.spaces.all():
            if not space.matches(message.tenant, message.model):
                continue
            matched += 1
            chunks += space.chunks()
            after = state.spaces.raise_epoch(space)
            state.engines.replace_space(space, after)
            for tree in state.directory.trees():
                tree.drop_index(space.index[tree.tier])
        if not matched:
            state.reply(event.session, event.id, Cleared(0, 0))
            return
        persist = state.spaces.persist()
        self._clears[persist.number] = (event.session, event.id, Cleared(matched, chunks))
        state.effects.append(persist)

    def persisted(self, event: Persisted) -> None:
        state = self._state
        if event.error:
            self._persist_at = state.now + _PERSIST_RETRY_S
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
        for number in [n for n in self._clears if n <= event.number]:
            session, request, cleared = self._clears.pop(number)
            state.reply(session, request, cleared)

    def tick(self) -> None:
        """Try again what couldn't be made durable."""
        if self._persist_at is not None and self._state.now >= self._persist_at:
            self._persist_at = None
            self._state.effects.append(self._state.spaces.persist())
