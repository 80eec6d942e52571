"""SIGSTOP and SIGCONT of engine and daemon at random moments: who isn't stopped goes on, and who
was goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import Client, HitStatus
from tests.conftest import RunningDaemon
from tests.crash.conftest import CHUNKS, OLD, OLD_PROMPTS, POINTS, check_hits
from tests.crash.engine_process import RETRIEVE, STORE, EngineProcess, Life, moments
from tests.crash.watch import Watch
from tests.small_engine import WAIT_S, SmallEngine, tokens

PROMPTS = 3


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + WAIT_S
    while any(_state(task) not in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until_s


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def life_of(daemon: RunningDaemon, work: str) -> Life:
    """A life that stores fresh prompts or retrieves old ones."""
    fresh = tuple(range(OLD_PROMPTS, OLD_PROMPTS + PROMPTS))
    return Life(daemon.socket, work, OLD[:PROMPTS] if work == RETRIEVE else fresh, CHUNKS)


def seeds_of(point: int, work: str) -> tuple[int, ...]:
    """What the engine of one point works on."""
    start = 1000 + point * (PROMPTS + 1)
    return tuple(range(start, start + PROMPTS)) if work == STORE else OLD[-PROMPTS:]


@pytest.mark.parametrize("work", [STORE, RETRIEVE])
def test_an_engine_stopped_at_any_moment_keeps_nobody_waiting(
    crowded: RunningDaemon, observer: SmallEngine, work: str
) -> None:
    """While the engine stands still another one stores, looks up and retrieves to the end; then
    it goes on and ends its work, all of it right, and leaves nothing."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    watch = Watch(crowded)
    life = life_of(crowded, work)
    when = moments(life, randomness)
    before = watch.idle_holdings()
    for point, moment in zip(range(POINTS), when, strict=False):
        what = f"seed {seed} point {point} {moment}"
        seeds = seeds_of(point, work)
        with EngineProcess(replace(life, seeds=seeds)) as engine:
            moment.wait(engine)
            stop(engine.pid)
            fresh = observer.keys(tokens(CHUNKS, seeds_of(point, STORE)[-1] + 1))
            observer.fill(fresh)
            assert observer.store(fresh).leading_chunks == CHUNKS, what
            assert observer.hits(fresh) == CHUNKS, what
            assert check_hits(observer, [OLD[point % OLD_PROMPTS]], what) == CHUNKS, what
            engine.signal(signal.SIGCONT)
            steps = [event for event in engine.rest() if event.step == work]
            assert all(step.chunks == CHUNKS and not step.wrong for step in steps), (
                f"{what} {steps}"
            )
        assert check_hits(observer, seeds, what) == PROMPTS * CHUNKS, what
        watch.written()
        watch.wait_until_holds(before, what)


@pytest.mark.parametrize("work", [STORE, RETRIEVE])
def test_a_daemon_stopped_at_any_moment_is_missed_and_goes_on(
    crowded: RunningDaemon, observer: SmallEngine, work: str
) -> None:
    """While the daemon stands still lookups are misses. Then it goes on: the engine's work ends
    well, or, where the engine was killed meanwhile, it leaves nothing behind."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    watch = Watch(crowded)
    life = life_of(crowded, work)
    when = moments(life, randomness)
    with Client(crowded.socket, lookup_timeout_s=0.01) as client:
        hasty = client.attach("observer")
        assert hasty.wait_ready(WAIT_S)
        old = hasty.keys(tokens(CHUNKS, 0))
        before = watch.idle_holdings()
        for point, moment in zip(range(POINTS), when, strict=False):
            what = f"seed {seed} point {point} {moment}"
            seeds = seeds_of(point, work)
            with EngineProcess(replace(life, seeds=seeds)) as engine:
                moment.wait(engine)
                stop(crowded.pid)
                assert hasty.lookup("r", old).status is HitStatus.MISS, what
                kills = randomness.random() < 0.5
                if kills:
                    engine.end()
                os.kill(crowded.pid, signal.SIGCONT)
                steps = [] if kills else [e for e in engine.rest() if e.step == work]
                assert all(s.chunks == CHUNKS and not s.wrong for s in steps), f"{what} {steps}"
            found = check_hits(observer, seeds, what)
            assert kills or found == PROMPTS * CHUNKS, what
            until_s = time.monotonic() + WAIT_S
            while hasty.lookup("r", old).chunks < CHUNKS:
                assert time.monotonic() < until_s, what
            hasty.release("r")
            watch.written()
            watch.wait_until_holds(before, what)
