"""Run: one seed from an empty disk to the last check, and a failure told as a story."""

from __future__ import annotations

import random
from collections import Counter

from kvstore.core.changes import Watch
from kvstore.core.messages import Tick
from tests.sim.actors import FakeEngine, draw_prompts
from tests.sim.damage import flip, misplace
from tests.sim.errors import SimulationError
from tests.sim.faults import NONE, draw
from tests.sim.inside import check_inside
from tests.sim.shapes import CONTEXTS, TENANTS, draw_engines, draw_limits
from tests.sim.steps import drawn_steps
from tests.sim.watchers import Watchers
from tests.sim.world import BUGS, Setting, World, shrunk

STEPS = 400
"""Actions of engines and of the outside in one seed."""


def simulate(seed: int, steps: int = STEPS) -> Counter[str]:
    """Run a seed; returns what happened how often. Raises SimulationError with seed and story."""
    rng = random.Random(seed)
    roomy = rng.random() < 0.25
    setting = Setting(draw_limits(rng, roomy), draw(rng), tuple(draw_engines(rng)), roomy)
    world = World(setting, rng.randrange(1 << 30))
    try:
        with drawn_steps(seed):
            Run(world).all(steps)
    except BUGS as error:
        kind = "" if isinstance(error, SimulationError) else f"{type(error).__name__}: "
        raise SimulationError(
            f"seed {seed}, event {world.events}: {kind}{error}\n{world.story.text()}\n"
            f"replay: python -m tests.sim --seed {seed} --count 1 --steps {steps}"
        ) from error
    world.tally()
    world.model.counts["events"] = world.events
    return world.model.counts


class Run:
    """The outside of one world: engines, an administrator, and bad luck."""

    def __init__(self, world: World) -> None:
        self.world = world
        contexts = CONTEXTS[:2] if world.setting.roomy else CONTEXTS
        prompts = draw_prompts(world.rng, contexts)
        self.engines = [FakeEngine(world, shape, prompts) for shape in world.setting.shapes]
        self.watchers = Watchers(world)

    def all(self, steps: int) -> None:
        """The whole run."""
        self.world.start()
        for _ in range(steps):
            self.world.run_for(self.world.rng.choice((0.0, 0.001, 0.004, 0.02)))
            self.luck()
            self.world.rng.choice(self.engines).act()
            self.watchers.act()
            if self.world.rng.random() < 0.1:
                check_inside(self.world.service, self.world.model.sessions.values())
        self.rest()
        self.close()
        check_inside(self.world.service, ())

    def luck(self) -> None:
        """What happens to everyone."""
        world, faults = self.world, self.world.setting.faults
        rng = world.rng
        if rng.random() < faults.flip_rate:
            flip(world)
        if rng.random() < faults.misplace_rate:
            misplace(world)
        if rng.random() < faults.clear_rate:
            names = [shape.namespace for shape in world.setting.shapes]
            model = rng.choice(names)
            world.clear(
                rng.choice((None, *TENANTS)), rng.choice((None, model.model, model.alias, "other"))
            )
        if rng.random() < faults.crash_rate:
            world.crash(None if world.setting.roomy else shrunk(world.limits, rng))
            for engine in self.engines:
                engine.lost()
        if rng.random() < 0.01:
            world.run_for(rng.uniform(0.1, 20.0))
        if rng.random() < 0.05:
            world.deliver(Tick())

    def rest(self) -> None:
        """Nobody asks for more: everything asked is answered, the hands come to rest, and leases
        that nobody released end by themselves."""
        world = self.world
        world.hands.faults = NONE
        world.run_until(lambda: all(type(m) is Watch for m in world.model.open.values()))
        world.run_until(world.service.idle)
        world.run_for(world.limits.lease_s + 1.0)
        self._must_hold_nothing("leases", "moves", "backlog", "pins")
        self.watchers.check()

    def close(self) -> None:
        """Everybody leaves: nothing may be held any more."""
        world = self.world
        for engine in self.engines:
            engine.work_briefly()
        for engine in self.engines:
            engine.leave_all()
        world.run_until(lambda: not any(engine.closing for engine in self.engines))
        self._must_hold_nothing("sessions", "engines")
        world.run_until(world.service.idle)
        self._must_hold_nothing("leases", "moves", "backlog", "pins")

    def _must_hold_nothing(self, *names: str) -> None:
        world = self.world
        stats = world.service.stats(world.now)
        held = {
            "sessions": stats.sessions,
            "engines": len(stats.engines),
            "leases": stats.leases,
            "moves": stats.moves_in_flight + stats.moves_queued + len(world.hands.running),
            "backlog": stats.write_backlog,
            "pins": sum(tier.pinned for tier in stats.tiers),
        }
        left = {name: held[name] for name in names if held[name]}
        if left:
            raise SimulationError(f"nothing goes on, but something is still held: {left}")
