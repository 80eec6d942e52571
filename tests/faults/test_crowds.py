"""Many at once: nobody gets anybody else's bytes, and nothing is done twice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvstore.tiers.base import IOKind
from tests.faults.conftest import StartEngine, StartNode
from tests.link_rig import eventually
from tests.small_engine import WAIT_S, SmallEngine, tokens

MODELS = ("org/a", "org/b", "org/c")
PROMPTS = 50
ROUNDS = 25


def test_nobody_gets_anothers_bytes_from_a_tiny_host_and_a_large_disk(
    start_node: StartNode,
) -> None:
    """Field case 24: the host has 4 places, the disk a thousand. Eight writers and eight readers of
    three models work on the same fifty prompts at once; what a reader gets is its own model's
    chunk, every time."""
    seed = random.randrange(1 << 32)
    node = start_node(4, 1024)
    got: Counter[str] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        randomness = random.Random(seed + number)
        with SmallEngine(node.path, 4, MODELS[number % 3], name=f"e{number}") as engine:
            for _ in range(ROUNDS):
                keys = engine.keys(tokens(randomness.randint(1, 4), randomness.randrange(PROMPTS)))
                if number < 8:
                    engine.fill(keys)
                    assert engine.store(keys) is not None
                    continue
                engine.wipe()
                done = engine.retrieve(keys[: engine.hits(keys)]).done
                wrong = [c for c, ok in enumerate(done) if ok and not engine.is_right(keys, c)]
                assert not wrong, f"seed {seed} engine {number}: chunks {wrong}"
                with lock:
                    got["right"] += sum(done)

    with ThreadPoolExecutor(16) as threads:
        for worker in [threads.submit(work, number) for number in range(16)]:
            worker.result(WAIT_S)
    eventually(lambda: node.stats().sessions == 0)
    node.rest()
    assert got["right"] > 0, f"seed {seed}"
    assert not {"corrupt", "key_collision"} & set(node.stats().drops)
    assert not any(tier.pinned for tier in node.stats().tiers)


def test_fifty_loads_of_one_prefix_read_each_chunk_once(
    start_node: StartNode, start_engine: StartEngine
) -> None:
    """Field case 80: forty chunks are on the disk only; two engines ask for them twenty-five times
    each, all at once: forty reads, and every copy is right. Field case 87: asked again, none."""
    node = start_node(64, 256)
    assert node.nvme is not None
    engines = [start_engine(node, 25 * 40, name) for name in ("one", "two")]
    first = engines[0]
    keys = first.keys(tokens(40))
    first.fill(keys)
    assert first.store(keys).leading_chunks == 40
    node.rest()
    assert first.store(first.keys(tokens(64, 1))).leading_chunks == 64
    node.rest()
    for again in range(2):
        for engine in engines:
            engine.wipe()
        tickets = [e.begin_retrieve(keys, 40 * i) for i in range(25) for e in engines]
        outcomes = [ticket.wait(WAIT_S) for ticket in tickets]
        assert all(outcome is not None and all(outcome.done) for outcome in outcomes)
        assert all(e.right_chunks(keys, 40 * i) == 40 for i in range(25) for e in engines)
        reads = [place for kind, place in node.nvme.calls if kind is IOKind.READ]
        assert len(reads) == len(set(reads)) == 40, again
