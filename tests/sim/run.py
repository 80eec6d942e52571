"""Run: one seed from an empty disk to the last check, and a failure told as a story."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from kvstore.core.keys import KeyContext
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import Tick
from tests.sim import themes
from tests.sim.actors import FakeEngine, draw_prompts
from tests.sim.damage import flip, misplace
from tests.sim.errors import SimulationError
from tests.sim.faults import Fault, draw
from tests.sim.inside import check_inside
from tests.sim.quiesce import Quiesce
from tests.sim.quotas import QuotaCheck
from tests.sim.setting import Setting, shrunk
from tests.sim.shapes import CONTEXTS, HOST_SLAB_BYTES, TENANTS
from tests.sim.steps import drawn_steps
from tests.sim.watchers import Watchers
from tests.sim.world import BUGS, World

Prompts = list[tuple[list[int], KeyContext]]
STEPS = 400
"""Actions of engines and of the outside in one seed."""


def simulate(seed: int, steps: int = STEPS) -> Counter[str]:
    """Run a seed; returns what happened how often. Raises SimulationError with seed and story."""
    rng = random.Random(seed)
    theme, roomy = themes.draw_theme(rng), rng.random() < 0.25
    faults = themes.faults(theme, draw(rng))
    limits, shapes = themes.limits(theme, rng, roomy), themes.engines(theme, rng)
    world = World(Setting(limits, faults, tuple(shapes), roomy, theme), rng.randrange(1 << 30))
    try:
        run = Run(world)
        with drawn_steps(seed):
            run.all(steps)
        Quiesce(world, run.engines, run.watchers).all()
        check_inside(world.service, ())
    except BUGS as error:
        raise failure(error, [world], f"--seed {seed} --count 1 --steps {steps}") from error
    world.tally()
    world.model.counts["world " + theme.name] = 1
    return world.model.counts


def failure(error: Exception, worlds: list[World], replay: str) -> SimulationError:
    """What went wrong, told as the story of each world."""
    kind = "" if isinstance(error, SimulationError) else f"{type(error).__name__}: "
    seed = replay.split()[1]
    events = ", ".join(str(world.events) for world in worlds)
    stories = "\n---- another node\n".join(world.story.text() for world in worlds)
    return SimulationError(
        f"seed {seed}, event {events}: {kind}{error}\n{stories}\n"
        f"replay: python -m tests.sim {replay}"
    )


class Run:
    """The outside of one world: engines, an administrator, and bad luck."""

    def __init__(self, world: World, prompts: Prompts | None = None) -> None:
        self.world = world
        contexts = CONTEXTS[:2] if world.setting.roomy else CONTEXTS
        self.theme = world.setting.theme
        prompts = prompts or draw_prompts(world.rng, contexts, self.theme.tokens_max)
        self.prompts = prompts
        self.engines = [FakeEngine(world, shape, prompts) for shape in world.setting.shapes]
        self.watchers = Watchers(world)
        self.quotas = QuotaCheck()

    def all(self, steps: int) -> None:
        """All that happens until nothing goes wrong any more."""
        self.world.start()
        for step in range(steps):
            self.one(step)

    def one(self, step: int) -> None:
        """One action, and what time brings before it."""
        self.world.run_for(self.world.rng.choice((0.0, 0.001, 0.004, 0.02)))
        self.luck(step)
        self.turn(step).act()
        self.watchers.act()
        if self.world.rng.random() < 0.1:
            check_inside(self.world.service, self.world.model.sessions.values())
            self.quotas.check(self.world.service)

    def turn(self, step: int) -> FakeEngine:
        """Whose turn it is to do something."""
        rng, turns = self.world.rng, self.theme.turns
        if turns and rng.random() < 0.95:
            return self.engines[step // turns % len(self.engines)]
        return rng.choice(self.engines)

    def luck(self, step: int) -> None:
        """What happens to everyone."""
        world, faults = self.world, self.world.faults
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
        if rng.random() < faults.spell_rate:
            world.story.note(world.now, f"{world.device.befall(world.now).name} begins")
        if rng.random() < faults.crash_rate * (50 if world.is_delicate() else 1):
            self.crash(None if world.setting.roomy else shrunk(world.limits, rng))
        elif self.theme.shrinks and not world.setting.roomy and step % 150 == 149:
            self.crash(replace(world.limits, host=TierLimits(rng.randint(1, 2), HOST_SLAB_BYTES)))
        if rng.random() < 0.01:
            world.run_for(rng.uniform(0.1, 20.0))
        if rng.random() < 0.05:
            world.deliver(Tick())

    def crash(self, limits: Limits | None) -> None:
        """The daemon dies, and its engines see that."""
        self.world.saw(Fault.DAEMON_DIES)
        self.world.crash(limits)
        self.quotas.restart()
        for engine in self.engines:
            engine.lost()
