"""kill -9 of the daemon while it stores to NVMe: what is found afterwards is whole, or a miss."""

from __future__ import annotations

import json
import os
import random

from kvstore import ChunkKeys
from tests.conftest import StartDaemon
from tests.small_engine import BLOCKS_PER_CHUNK, WAIT_S, SmallEngine, tokens

POINTS = int(os.environ.get("KILL_POINTS", "20"))
CHUNKS = 12
PROMPTS_A_POINT = 8


def store_until_killed(engine: SmallEngine, prompts: list[ChunkKeys], after: int) -> None:
    """Send stores of all prompts; returns when ``after`` of them are acknowledged, while the others
    and the writes to NVMe are under way."""
    tickets = []
    blocks = list(range(CHUNKS * BLOCKS_PER_CHUNK))
    for prompt in prompts:
        engine.fill(prompt)
        ticket = engine.worker.store("store", prompt, {"full": blocks})
        tickets.append(ticket)
        if len(tickets) == after:
            break
        assert ticket.wait(WAIT_S) is not None


def test_every_hit_after_a_kill_is_whole(start_daemon: StartDaemon) -> None:
    """Field case 65: the daemon is killed at random points while it stores; each time it starts
    again, every chunk that is a hit is retrieved, done and right, and the folder stays clean."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    daemon = start_daemon()
    known: list[ChunkKeys] = []
    hits = 0
    with SmallEngine(daemon.socket, chunks=CHUNKS) as engine:
        for point in range(POINTS):
            fresh = [
                engine.keys(tokens(CHUNKS, 1 + point * PROMPTS_A_POINT + i))
                for i in range(PROMPTS_A_POINT)
            ]
            store_until_killed(engine, fresh, randomness.randint(1, PROMPTS_A_POINT))
            daemon.kill()
            daemon.start()
            assert engine.worker.wait_ready(WAIT_S)
            known = randomness.sample(known, min(len(known), 8)) + fresh
            for prompt in known:
                found = engine.hits(prompt)
                engine.wipe()
                outcome = engine.retrieve(prompt[:found])
                what = f"seed {seed} point {point}: {found} hits, {outcome}"
                assert all(outcome.done), what
                assert engine.right_chunks(prompt[:found]) == found, what
                hits += found
    assert hits > 0
    assert daemon.stop() == 0
    verified = daemon.kvstore("verify", "--json")
    assert verified.returncode == 0, verified.stdout
    counts = json.loads(verified.stdout)
    assert (counts["torn"], counts["corrupt"]) == (0, 0), counts
