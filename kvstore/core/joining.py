"""Joining: sessions register memory or attach, and engines become ready."""

from __future__ import annotations

from kvstore.core.engines import Engine, Session
from kvstore.core.errors import CapacityError
from kvstore.core.messages import (
    Attach,
    Cause,
    Refused,
    Register,
    SessionID,
    SetRevision,
)
from kvstore.core.state import State


class Joining:
    """The requests that change who belongs to an engine, and under which namespace."""

    def __init__(self, state: State) -> None:
        self._state = state

    def join(self, session: SessionID, number: int, message: Register | Attach) -> None:
        """A session's first request: it becomes a worker or a scheduler of an engine."""
        state = self._state
        if isinstance(message, Register):
            reason = state.limits.too_large(message.layout)
            too_large = Refused(reason, Cause.LAYOUT) if reason else None
            got = too_large or state.engines.register(session, message)
        else:
            got = state.engines.attach(session, message)
        if isinstance(got, Refused):
            state.reply(session, number, got)
            return
        if isinstance(message, Register):
            refused = self._make_ready(got.engine, but=session)
            if refused is not None:
                state.engines.remove(got)
                state.reply(session, number, refused)
                return
        state.reply(session, number, got.engine.state())

    def _make_ready(self, engine: Engine, but: SessionID) -> Refused | None:
        """Bring an engine up if it is complete, and tell its sessions (``but`` one)."""
        state = self._state
        before = engine.state()
        try:
            persist = state.engines.make_ready(engine)
        except CapacityError as error:
            return Refused(str(error), Cause.LIMIT)
        if persist is not None:
            state.effects.append(persist)
        self.tell(engine, before, but)
        return None

    def tell(self, engine: Engine, before: object, but: SessionID) -> None:
        """Tell all sessions but one what the engine's state is, if it changed."""
        if engine.state() == before:
            return
        for session in engine.sessions():
            if session.id != but and not session.closing:
                self._state.reply(session.id, 0, engine.state())

    def set_revision(self, session: Session, number: int, message: SetRevision) -> None:
        """Go on under another revision; refused, it leaves everything as it was."""
        engine = session.engine
        namespace, space = engine.namespace, engine.space
        refused = self._state.engines.set_revision(engine, message)
        if refused is None and space is not None:
            refused = self._make_ready(engine, but=session.id)
            if refused is not None:
                engine.namespace, engine.space = namespace, space
        if refused is None:
            self._state.leases.end_engine(engine.key)
        self._state.reply(session.id, number, refused or engine.state())
