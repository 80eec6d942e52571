"""Fleets: worlds of several daemons that share a remote tier, from one seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from kvstore.core.keys import prefix_keys
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import Lookup, LookupReply, Release, Retrieve
from tests.sim import themes
from tests.sim.actors import FakeEngine
from tests.sim.errors import SimulationError
from tests.sim.faults import NONE_OF_FLEET, Fault, FleetFaults, draw
from tests.sim.fleet import Fleet
from tests.sim.inside import check_inside
from tests.sim.quiesce import Quiesce
from tests.sim.run import STEPS, Run, failure
from tests.sim.setting import Setting
from tests.sim.shapes import TOKENS_PER_CHUNK
from tests.sim.steps import drawn_steps
from tests.sim.timeline import Timeline
from tests.sim.world import BUGS, World

NODES = 2


def simulate_fleet(seed: int, steps: int = STEPS) -> Counter[str]:
    """Run a seed; returns what happened how often. Raises SimulationError with seed and story."""
    rng = random.Random(f"fleet {seed}")
    theme, roomy = themes.draw_theme(rng), rng.random() < 0.25
    faults, shapes = themes.faults(theme, draw(rng)), tuple(themes.engines(theme, rng))
    if rng.random() < 0.3:
        faults = replace(faults, clear_rate=0.05)
    calm = rng.random() < 0.25
    of_fleet = NONE_OF_FLEET if calm else FleetFaults()
    timeline = Timeline()
    fleet = Fleet(timeline, random.Random(rng.randrange(1 << 30)), of_fleet)
    remote = draw_remote(rng)
    worlds = []
    for _ in range(NODES):
        limits = replace(themes.limits(theme, rng, roomy), remote=remote)
        setting = Setting(limits, faults, shapes, roomy, theme)
        worlds.append(World(setting, rng.randrange(1 << 30), timeline, fleet))
    try:
        runs = [Run(worlds[0])]
        runs += [Run(world, runs[0].prompts) for world in worlds[1:]]
        with drawn_steps(seed):
            _run(fleet, runs, steps)
        _quiesce(fleet, runs)
    except BUGS as error:
        replay = f"--seed {seed} --count 1 --steps {steps} --fleets"
        raise failure(error, worlds, replay) from error
    total: Counter[str] = Counter({"world fleet": 1})
    for world in worlds:
        world.tally()
        total.update(world.model.counts)
    return total


def draw_remote(rng: random.Random) -> RemoteLimits:
    """What the nodes keep of the remote tier."""
    return RemoteLimits(
        probe_s=rng.choice((0.005, 0.02)),
        probes_max=rng.choice((1, 2, 64)),
        probe_names_max=rng.choice((4, 8192)),
        waiters_max=rng.choice((2, 1024)),
        answers_max=rng.choice((1, 8, 4096)),
        answer_s=rng.choice((0.01, 1.0)),
        read_depth=rng.randint(1, 4),
        write_depth=rng.randint(1, 3),
        backlog_max=rng.choice((3, 64, 16_384)),
    )


def _run(fleet: Fleet, runs: list[Run], steps: int) -> None:
    """All that happens until nothing goes wrong any more."""
    rng = fleet.rng
    for run in runs:
        run.world.start()
    for step in range(steps):
        for fault in fleet.luck():
            runs[0].world.saw(fault)
        run = rng.choice(runs)
        if run.world.node is not None and rng.random() < fleet.faults.down_rate:
            run.world.node.go_down(rng.uniform(0.05, 3.0))
        before = dict(fleet.epochs)
        run.one(step)
        if before != fleet.epochs and any(_promised(other.world) for other in runs):
            run.world.saw(Fault.EPOCH_RAISED)


def _promised(world: World) -> bool:
    """Whether a lease of a node promises chunks of the remote tier."""
    return any(lease.found is not None for lease in world.service._state.leases._order)


def _quiesce(fleet: Fleet, runs: list[Run]) -> None:
    """Nothing goes wrong any more: each node comes to rest, one finds what the other stores, and
    both end up empty."""
    fleet.calm()
    ends = [Quiesce(run.world, run.engines, run.watchers) for run in runs]
    for run in runs:
        run.world.calm()
    for end in ends:
        end.rest()
    for end in ends:
        end.probe()
    for number, (one, other) in enumerate(zip(runs[0].engines, runs[1].engines, strict=True)):
        _share(ends, number, one, other)
    for end in ends:
        end.close()
    for end in ends:
        end.empty()
        check_inside(end.world.service, ())


def _share(ends: list[Quiesce], number: int, one: FakeEngine, other: FakeEngine) -> None:
    """What one node stores, the other finds and gets."""
    giver, taker = one.world, other.world
    whole = all(end.complete(engine) for end, engine in zip(ends, (one, other), strict=True))
    if not whole or not all(end.fits(one.shape) for end in ends) or one.revision != other.revision:
        return
    parts = sum(bool(one.shape.layout.part_groups(part)) for part in Part)
    chunks = 1 if parts > 1 else 2
    remote, shards = giver.limits.remote, one.shape.shards[0].count()
    needed = chunks * parts * shards
    if remote is None or needed > min(remote.backlog_max, remote.probe_names_max):
        return
    if one.namespace() != other.namespace():
        return
    tokens = [2_000_000 + number, *range(chunks * TOKENS_PER_CHUNK - 1)]
    keys = prefix_keys(one.namespace(), TOKENS_PER_CHUNK, tokens)
    ends[0].store(one, keys)
    giver.run_until(giver.service.idle)
    views = list(other.workers.values())
    for view in views:
        body = ends[1].answer(view, Lookup("shared", keys.data))
        if not isinstance(body, LookupReply) or body.chunks < len(keys):
            raise SimulationError(f"all is quiet, but another node finds {body} of {len(keys)}")
    for view in views:
        lent = other.lend(view, len(keys))
        if lent is not None:
            ends[1].send(view, Retrieve("shared", keys.data, lent))
    ends[1].until_answered()
    taker.request(views[0].id, Release("shared"))
    taker.run_until(taker.service.idle)
    taker.model.counts["shared"] += 1
