"""kill -9 of the daemon at random moments while it stores, writes to NVMe and gives back: what is
found afterwards is whole, or a miss."""

from __future__ import annotations

import json
import random
import select
import time
from dataclasses import dataclass

from kvstore import ChunkKeys, Ticket
from kvstore.codecs.base import HEADER_BYTES
from kvstore.machine import folder_bytes
from tests.conftest import RunningDaemon, StartDaemon
from tests.crash.at_rest import chunks_at_rest
from tests.crash.conftest import POINTS, check_hits
from tests.crash.watch import Watch
from tests.small_engine import WAIT_S, SmallEngine, tokens

CHUNKS = 24
STORES, RETRIEVES = 6, 2


@dataclass(frozen=True, slots=True)
class Round:
    """What is under way when the daemon is killed: each prompt lies in memory of its own."""

    fresh: list[int]
    old: list[int]
    stored: list[Ticket]
    retrieved: list[tuple[ChunkKeys, Ticket]]


def begin(engine: SmallEngine, fresh: list[int], old: list[int]) -> Round:
    """Ask for stores of the fresh prompts and retrieves of the old ones, all at once."""
    engine.wipe()
    keys = [engine.keys(tokens(CHUNKS, seed)) for seed in fresh]
    for number, prompt in enumerate(keys):
        engine.fill(prompt, number * CHUNKS)
    wanted = [engine.keys(tokens(CHUNKS, seed)) for seed in old]
    stored, retrieved = [], []
    for number, prompt in enumerate(keys):
        stored.append(engine.begin_store(prompt, number * CHUNKS))
        if number < len(wanted):
            place = (STORES + number) * CHUNKS
            retrieved.append((wanted[number], engine.begin_retrieve(wanted[number], place)))
    return Round(fresh, old, stored, retrieved)


def check_outcomes(engine: SmallEngine, under_way: Round, what: str) -> None:
    """Every ticket has ended, and what was reported as retrieved is right."""
    assert all(ticket.wait(WAIT_S) is not None for ticket in under_way.stored), what
    for number, (keys, ticket) in enumerate(under_way.retrieved):
        outcome = ticket.wait(WAIT_S)
        assert outcome is not None, what
        for chunk, done in enumerate(outcome.done):
            right = engine.is_right(keys, chunk, (STORES + number) * CHUNKS)
            assert right or not done, f"{what} chunk {chunk}"


def life_s(engine: SmallEngine, watch: Watch, old: list[int]) -> float:
    """How long a round takes, from its first store to its last write to NVMe."""
    start_s = time.monotonic()
    under_way = begin(engine, old, [])
    check_outcomes(engine, under_way, "undisturbed")
    watch.written()
    return time.monotonic() - start_s


def test_every_hit_after_a_kill_is_whole(start_daemon: StartDaemon) -> None:
    """Field cases 50, 54 and 65: the daemon is killed at random moments while it stores, writes and
    gives back. Each time every ticket ends at once and nothing is acknowledged until it is
    back; then every chunk that is a hit is retrieved, done and right, and nothing is left in
    shared memory, and the folder never takes more room than it may."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    daemon = start_daemon()
    watch = Watch(daemon)
    known = list(range(STORES))
    hits = 0
    with SmallEngine(daemon.socket, chunks=(STORES + RETRIEVES) * CHUNKS) as engine:
        whole_s = life_s(engine, watch, known)
        before = watch.idle_holdings()
        for point in range(POINTS):
            fresh = list(range(100 + point * STORES, 100 + (point + 1) * STORES))
            delay_s = randomness.random() * whole_s
            under_way = begin(engine, fresh, randomness.sample(known, RETRIEVES))
            once_more = engine.keys(tokens(CHUNKS, fresh[0]))
            select.select([], [], [], delay_s)
            daemon.kill()
            what = f"seed {seed} point {point} {delay_s:.6f} s"
            check_outcomes(engine, under_way, what)
            assert engine.store(once_more).done == (False,) * CHUNKS, what
            assert folder_bytes(daemon.nvme) <= 256 << 20, what
            daemon.launch()
            engine.rejoin(daemon.pid)
            daemon.await_ready()
            watch.written()
            hits += check_hits(engine, [*fresh, *randomness.sample(known, 4)], what, CHUNKS)
            known += fresh
            watch.written()
            watch.wait_until_holds(before, what)
    assert hits > POINTS, f"seed {seed}: {hits} hits"
    assert daemon.stop() == 0
    counts = verify(daemon)
    assert (counts["torn"], counts["corrupt"], counts["clean"]) == (0, 0, True), counts


def test_a_daemon_killed_while_it_starts_loses_nothing(start_daemon: StartDaemon) -> None:
    """Killed again and again at random moments of its start (the lock, the manifest, the scan, what
    is written ahead), after a first kill in the middle of its writes: all that was on disk before
    is there, and right, once it may start."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    daemon = start_daemon()
    watch = Watch(daemon)
    old = list(range(STORES))
    with SmallEngine(daemon.socket, chunks=STORES * CHUNKS) as engine:
        check_outcomes(engine, begin(engine, old, []), "at first")
        watch.written()
        under_way = begin(engine, list(range(100, 100 + STORES)), [])
        daemon.kill()
        check_outcomes(engine, under_way, "killed")
        start_s = time.monotonic()
        daemon.start()
        whole_s = time.monotonic() - start_s
        for _ in range(POINTS // 2):
            daemon.kill()
            daemon.launch()
            select.select([], [], [], randomness.random() * whole_s)
        daemon.kill()
        daemon.start()
        engine.rejoin(daemon.pid)
        watch.written()
        what = f"seed {seed}"
        assert check_hits(engine, old, what, CHUNKS) == STORES * CHUNKS, what
        check_hits(engine, under_way.fresh, what, CHUNKS)


def verify(daemon: RunningDaemon, *flags: str) -> dict[str, int]:
    """``kvstore verify`` of its folder."""
    done = daemon.kvstore("verify", "--json", *flags)
    counts: dict[str, int] = json.loads(done.stdout)
    assert done.returncode == (0 if counts["ok"] else 1), done.stderr
    return counts


def test_verify_tells_what_a_killed_daemon_left_and_repairs_it(start_daemon: StartDaemon) -> None:
    """Straight after a kill, with a cleared model, a chunk torn in the middle and a header that is
    none: each is counted as what it is; repaired, the folder is clean, and a daemon finds all
    that was left whole."""
    daemon = start_daemon()
    watch = Watch(daemon)
    with (
        SmallEngine(daemon.socket, CHUNKS, model="org/gone", name="gone") as gone,
        SmallEngine(daemon.socket, 2 * CHUNKS, model="org/kept", name="kept") as kept,
    ):
        for engine in (gone, kept):
            keys = engine.keys(tokens(CHUNKS))
            engine.fill(keys)
            assert engine.store(keys).leading_chunks == CHUNKS
            watch.written()
        with watch.admin() as admin:
            assert admin.clear("org/gone", "").chunks == CHUNKS
        namespace = kept.worker.state().namespace
        daemon.kill()
        chunks = chunks_at_rest(daemon.nvme, namespace)
        chunks[CHUNKS - 1].flip(HEADER_BYTES + 5)
        chunks[CHUNKS - 3].flip(100)
        found = verify(daemon)
        assert (found["clean"], found["ok"]) == (False, False)
        assert (found["old_epoch"], found["torn"], found["corrupt"]) == (CHUNKS, 1, 1)
        assert (found["valid"], found["orphan"]) == (CHUNKS - 3, 1)
        repaired = verify(daemon, "--repair")
        assert repaired["erased"] == CHUNKS + 3
        clean = verify(daemon)
        assert clean["ok"]
        assert clean["valid"] == CHUNKS - 3
        assert clean["valid"] + clean["empty"] == clean["slots"]
        daemon.start()
        kept.rejoin(daemon.pid)
        watch.written()
        assert check_hits(kept, [0], "repaired", CHUNKS) == CHUNKS - 3
        gone.rejoin(daemon.pid)
        assert gone.hits(gone.keys(tokens(CHUNKS))) == 0
