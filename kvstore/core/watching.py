"""Watching: tells sessions that ask for it what their engine's namespace gains and loses.

Told are chunks that become visible in a tier or leave it, and anew those that an engine stores or
loads though they are there already: a watcher learns where what it uses is, without a snapshot of a
namespace that may have a million chunks. What a scan finds at start is told when it is used.

Nothing ever waits for a watcher. A session is owed one answer at most, which it asks for (Watch);
what happens meanwhile is kept for it by chunk, tier and part, the last state only, up to
PENDING_MAX. One that falls behind further is told to start over (``resync``), and what it missed is
counted. Without watchers the trees note nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.change_meaning import MEANING
from kvstore.core.changes import Changes, Watch
from kvstore.core.engines import Session
from kvstore.core.layout import Part
from kvstore.core.messages import Refused, SessionID, TierName
from kvstore.core.spaces import Space
from kvstore.core.state import State
from kvstore.core.tree import Tree

PENDING_MAX = 16_384
"""Changes kept for one session: 3 MB."""
ANSWER_MAX = 1000
"""Changes in one answer."""
_KINDS = {meaning: kind for kind, meaning in MEANING.items()}


@dataclass(slots=True, eq=False)
class _Watcher:
    """A session that watches. ``asked`` is the Watch that waits for its answer, 0 for none;
    ``space`` is whose changes are ``pending``; ``void``: a resync is due."""

    session: Session
    asked: int = 0
    space: Space | None = None
    void: bool = True
    pending: dict[tuple[bytes, TierName, Part], bool] = field(default_factory=dict)


class Watching:
    """The verb *watch*, and who is to be told what."""

    def __init__(self, state: State) -> None:
        self.dropped = 0
        """Changes that sessions weren't told, as they had fallen behind."""
        self._state = state
        self._watchers: dict[SessionID, _Watcher] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, session: Session, number: int, message: Watch) -> None:
        """A session wants to be told; it is at once where there is something."""
        watcher = self._watchers.get(session.id)
        if watcher is None:
            watcher = self._watchers[session.id] = _Watcher(session, 0, session.engine.space)
            self._mark()
        if watcher.asked:
            self._state.reply(session.id, number, Refused("watch: the last one isn't answered yet"))
            return
        watcher.asked = number
        self._answer(watcher)

    def end(self, session: SessionID) -> None:
        """The session is lost."""
        if self._watchers.pop(session, None) is not None:
            self._mark()

    def note(self, tree: Tree) -> None:
        """Take over what a tree has noted."""
        changed, tree.changed = tree.changed, []
        for watcher in self._watchers.values():
            self._renew(watcher)
            for copy, part, gained in changed:
                if copy.space is watcher.space:
                    watcher.pending.pop((copy.key, tree.tier, part), None)
                    watcher.pending[copy.key, tree.tier, part] = gained
            if len(watcher.pending) > PENDING_MAX:
                self._void(watcher)

    def due(self) -> bool:
        """Whether somebody who waits for it has something to be told."""
        return any(w.asked and (w.pending or w.void) for w in self._watchers.values())

    def tick(self) -> None:
        """Answer those for whom something has come together."""
        for watcher in self._watchers.values():
            self._answer(watcher)

    # ------------------------------------------------------------ private

    def _answer(self, watcher: _Watcher) -> None:
        self._renew(watcher)
        if not watcher.asked or not (watcher.pending or watcher.void):
            return
        told = list(watcher.pending)[:ANSWER_MAX]
        kinds = bytes(
            _KINDS[tier, part, watcher.pending.pop((key, tier, part))] for key, tier, part in told
        )
        keys = b"".join(key for key, _, _ in told)
        self._state.reply(watcher.session.id, watcher.asked, Changes(keys, kinds, watcher.void))
        watcher.asked, watcher.void = 0, False

    def _renew(self, watcher: _Watcher) -> None:
        """Start over where the engine has another namespace now, another epoch, or none."""
        space = watcher.session.engine.space
        if watcher.space is not space:
            watcher.space = space
            self._void(watcher)

    def _void(self, watcher: _Watcher) -> None:
        self.dropped += len(watcher.pending)
        watcher.pending = {}
        watcher.void = True

    def _mark(self) -> None:
        for tree in self._state.directory.trees():
            tree.watched = bool(self._watchers)
