"""Watchers: sessions that ask what changes, and whether what they were told is so."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvstore.core.changes import ChangeKind, Changes, Watch
from kvstore.core.layout import Part
from kvstore.core.messages import Reply, SessionID, TierName
from tests.sim.errors import SimulationError
from tests.sim.views import SessionView, split
from tests.sim.world import World

WATCH_RATE = 0.05
"""How often a session asks for changes, beside each action of an engine: often too late."""
_MEANS = {
    ChangeKind.HOST_LOST: (TierName.HOST, Part.FULL, False),
    ChangeKind.HOST_GAINED: (TierName.HOST, Part.FULL, True),
    ChangeKind.NVME_LOST: (TierName.NVME, Part.FULL, False),
    ChangeKind.NVME_GAINED: (TierName.NVME, Part.FULL, True),
    ChangeKind.HOST_WINDOW_LOST: (TierName.HOST, Part.WINDOW, False),
    ChangeKind.HOST_WINDOW_GAINED: (TierName.HOST, Part.WINDOW, True),
    ChangeKind.NVME_WINDOW_LOST: (TierName.NVME, Part.WINDOW, False),
    ChangeKind.NVME_WINDOW_GAINED: (TierName.NVME, Part.WINDOW, True),
}


@dataclass(slots=True, eq=False)
class FakeWatcher:
    """What one session believes of its namespace. ``asked``: it waits for an answer."""

    world: World
    view: SessionView
    asked: bool = False
    present: dict[tuple[bytes, TierName, Part], bool] = field(default_factory=dict)

    def ask(self) -> None:
        """Ask for changes, unless an answer is owed."""
        if not self.asked:
            self.asked = True
            self.world.request(self.view.id, Watch(), self._told)

    def check(self) -> None:
        """What it was told last is so. (What a scan found since isn't told until it is used.)"""
        state = self.world.service._state
        session = state.engines.session(self.view.id)
        space = None if session is None else session.engine.space
        for (key, tier, part), present in self.present.items():
            tree = state.directory.tree(tier)
            copy = None if tree is None or space is None else tree.find(space, key)
            there = copy is not None and part in copy.visible_parts()
            if present != there and (present or tier is TierName.HOST):
                what = f"{part.name} of {key.hex()[:6]} in {tier.value}"
                raise SimulationError(f"s{self.view.id} believes {what}: {present}")
            what = "window" if part is Part.WINDOW else "chunk"
            self.world.model.counts[f"told {what} {'present' if present else 'absent'}"] += 1

    def _told(self, reply: Reply) -> None:
        body = reply.body
        self.asked = False
        if not isinstance(body, Changes):
            raise SimulationError(f"s{self.view.id}: {body} for a Watch")
        if body.resync:
            self.present.clear()
            self.world.model.counts["resync"] += 1
        for key, kind in zip(split(body.keys), body.kinds, strict=True):
            tier, part, present = _MEANS[ChangeKind(kind)]
            self.present[key, tier, part] = present


@dataclass(slots=True)
class Watchers:
    """All that watch in one world. Chance has a course of its own here, so that a world's story is
    the same without them."""

    world: World
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    watchers: dict[SessionID, FakeWatcher] = field(default_factory=dict)

    def act(self) -> None:
        """Now and then some session begins to watch, or asks again."""
        if self.rng.random() >= WATCH_RATE:
            return
        sessions = self.world.model.sessions
        self._forget()
        views = [v for v in sessions.values() if v.joined and not v.closed and v.memory is None]
        if views:
            view = self.rng.choice(views)
            self.watchers.setdefault(view.id, FakeWatcher(self.world, view)).ask()

    def check(self) -> None:
        """Nothing goes on any more: each has been told everything, and it is so."""
        self._forget()
        for watcher in self.watchers.values():
            watcher.ask()
            self.world.run_for(1.0)
            while not watcher.asked:
                watcher.ask()
                self.world.run_for(1.0)
            watcher.check()

    def _forget(self) -> None:
        sessions = self.world.model.sessions
        self.watchers = {
            session: watcher
            for session, watcher in self.watchers.items()
            if session in sessions and not watcher.view.closed
        }
