"""kill -9 of the engine at random moments of a store or a retrieve: whatever is hit afterwards is
whole, and the daemon is left as it was before the engine came."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest

from tests.conftest import RunningDaemon
from tests.crash.conftest import CHUNKS, OLD, OLD_PROMPTS, POINTS, check_hits
from tests.crash.engine_process import RETRIEVE, STORE, EngineProcess, Life, moments
from tests.crash.watch import Watch
from tests.small_engine import SmallEngine

PROMPTS = 3


@pytest.mark.parametrize("work", [STORE, RETRIEVE])
def test_an_engine_killed_at_any_moment_leaves_nothing_but_whole_chunks(
    crowded: RunningDaemon, observer: SmallEngine, work: str
) -> None:
    """Field case 49: the engine is killed at random moments from its first connection to its last
    answer. What it stored is hit whole or not at all; its memory, descriptors, leases and pins
    are gone, and the other engine is served throughout."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    watch = Watch(crowded)
    fresh = tuple(range(OLD_PROMPTS, OLD_PROMPTS + PROMPTS))
    life = Life(crowded.socket, work, OLD[:PROMPTS] if work == RETRIEVE else fresh, CHUNKS)
    when = moments(life, randomness)
    before = watch.idle_holdings()
    hits = 0
    for point, moment in zip(range(POINTS), when, strict=False):
        start = 1000 + point * PROMPTS
        seeds = tuple(range(start, start + PROMPTS)) if work == STORE else OLD[-PROMPTS:]
        what = f"seed {seed} point {point} {moment}"
        with EngineProcess(replace(life, seeds=seeds)) as engine:
            moment.wait(engine)
            engine.signal(signal.SIGKILL)
        hits += check_hits(observer, (*seeds, OLD[point % OLD_PROMPTS]), what)
        watch.written()
        watch.wait_until_holds(before, what)
    assert hits > POINTS * CHUNKS, f"seed {seed}: {hits} hits"
    figures = watch.stats()
    assert figures["process"]["state"] == "ok"
    assert not figures["drops"].get("corrupt", 0)
