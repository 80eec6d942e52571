"""Faults that other services were seen to have: more than fits."""

from __future__ import annotations

import os
from collections import deque

from kvstore import ChunkKeys, Ticket
from tests.conftest import RunningDaemon, StartDaemon
from tests.crash.watch import Watch
from tests.small_engine import CHUNK_BYTES, WAIT_S, SmallEngine, tokens

MIB = 1 << 20
ARENA_MIB = int(os.environ.get("BURST_ARENA_MIB", "24"))
"""Host memory of the burst, staging left out; ``make soak`` takes 1,024."""
PROMPT_CHUNKS = 64
PROMPTS = 2 * ARENA_MIB * MIB // (PROMPT_CHUNKS * CHUNK_BYTES)
"""Twice what fits."""
IN_FLIGHT = 4
PLACES = 56


def settled(ticket: Ticket) -> tuple[bool, ...]:
    """How a transfer ended, per chunk."""
    outcome = ticket.wait(WAIT_S)
    assert outcome is not None
    return outcome.done


def leading(done: tuple[bool, ...]) -> int:
    """Chunks done; none may be behind one that isn't."""
    assert sorted(done, reverse=True) == list(done), done
    return sum(done)


def burst_daemon(start_daemon: StartDaemon, arena_mib: int) -> RunningDaemon:
    """A daemon with an arena of this size and without NVMe."""
    slab_mib = arena_mib // 8
    return start_daemon(
        KVSTORE_HOST_SIZE=f"{arena_mib + 2 * slab_mib}MiB",
        KVSTORE_HOST_SLAB_SIZE=f"{slab_mib}MiB",
        KVSTORE_NVME_SIZE="off",
    )


def test_a_burst_of_twice_the_arena_drops_nothing_while_anything_is_evictable(
    start_daemon: StartDaemon,
) -> None:
    """Prompts of 2 MiB, four in flight, twice as many bytes as the arena has: every chunk is kept,
    older ones leave for it, and what is there at the end is hit and right."""
    watch = Watch(burst_daemon(start_daemon, ARENA_MIB))
    with SmallEngine(watch.daemon.socket, IN_FLIGHT * PROMPT_CHUNKS) as engine:
        under_way: deque[Ticket] = deque()
        prompts: list[ChunkKeys] = []
        for number in range(PROMPTS):
            if len(under_way) == IN_FLIGHT:
                assert all(settled(under_way.popleft())), number
            prompts.append(engine.keys(tokens(PROMPT_CHUNKS, number)))
            place = number % IN_FLIGHT * PROMPT_CHUNKS
            engine.fill(prompts[-1], place)
            under_way.append(engine.begin_store(prompts[-1], place))
        assert all(all(settled(ticket)) for ticket in under_way)
        figures = watch.stats()
        assert figures["drops"].get("host_full", 0) == 0
        assert figures["tiers"][0]["slots_used"] == figures["tiers"][0]["slots_total"]
        places = figures["tiers"][0]["slots_total"]
        assert figures["tiers"][0]["evictions"] == PROMPTS * PROMPT_CHUNKS - places
        for keys in prompts[-places // PROMPT_CHUNKS :]:
            engine.wipe()
            assert engine.hits(keys) == PROMPT_CHUNKS
            assert engine.retrieve(keys).leading_chunks == PROMPT_CHUNKS
            assert engine.right_chunks(keys) == PROMPT_CHUNKS


def test_a_burst_all_at_once_keeps_the_leading_part_of_each_prompt(
    start_daemon: StartDaemon,
) -> None:
    """Nobody waits for anything: twice the arena is in flight. What can't be kept is told and
    counted; what was kept is the beginning of its prompt, hit and right, and the arena is full."""
    watch = Watch(burst_daemon(start_daemon, 24))
    prompts = 24
    with SmallEngine(watch.daemon.socket, prompts * PROMPT_CHUNKS) as engine:
        keys = [engine.keys(tokens(PROMPT_CHUNKS, number)) for number in range(prompts)]
        for number, prompt in enumerate(keys):
            engine.fill(prompt, number * PROMPT_CHUNKS)
        tickets = [engine.begin_store(k, n * PROMPT_CHUNKS) for n, k in enumerate(keys)]
        kept = [leading(settled(ticket)) for ticket in tickets]
        figures = watch.stats()
        assert figures["drops"].get("host_full", 0) == prompts * PROMPT_CHUNKS - sum(kept)
        places = figures["tiers"][0]["slots_total"]
        assert sum(kept) >= places
        found = 0
        for prompt, most in zip(keys, kept, strict=True):
            engine.wipe()
            hits = engine.hits(prompt)
            assert hits <= most
            assert engine.retrieve(prompt[:hits]).leading_chunks == hits
            assert engine.right_chunks(prompt[:hits]) == hits
            found += hits
        assert found == places


def small_host(start_daemon: StartDaemon) -> RunningDaemon:
    """A daemon whose host tier is one slab with PLACES places."""
    slab_kib = PLACES * CHUNK_BYTES >> 10
    return start_daemon(
        KVSTORE_HOST_SIZE=f"{3 * slab_kib}KiB", KVSTORE_HOST_SLAB_SIZE=f"{slab_kib}KiB"
    )


def test_64_chunks_with_56_places_keep_the_leading_56(start_daemon: StartDaemon) -> None:
    """A prompt longer than the whole tier: its first 56 chunks are kept, acknowledged and hit, and
    the others are told as not kept; asked for again, it is the same."""
    daemon = small_host(start_daemon)
    with SmallEngine(daemon.socket, PROMPT_CHUNKS) as engine:
        keys = engine.keys(tokens(PROMPT_CHUNKS))
        engine.fill(keys)
        for _ in range(2):
            assert engine.store(keys).done == (True,) * PLACES + (False,) * 8
            assert engine.hits(keys) == PLACES
        engine.wipe()
        assert engine.retrieve(keys[:PLACES]).leading_chunks == PLACES
        assert engine.right_chunks(keys[:PLACES]) == PLACES
    figures = Watch(daemon).stats()
    assert figures["drops"]["host_full"] == 16
    assert figures["tiers"][0]["evictions"] == 0


def test_prompts_larger_than_the_host_tier_finish_together(start_daemon: StartDaemon) -> None:
    """Prompts of 100 chunks on NVMe, 56 places in the host: two engines retrieve one at a time, so
    that their half-done reads together fill the tier, and two retrieve another. All finish, all
    right; so they do again."""
    daemon = start_daemon()
    with SmallEngine(daemon.socket, 100) as engine:
        for seed in range(2):
            keys = engine.keys(tokens(100, seed))
            engine.fill(keys)
            assert engine.store(keys).leading_chunks == 100
        Watch(daemon).written()
    assert daemon.stop() == 0
    restarted = small_host(start_daemon)
    watch = Watch(restarted)
    watch.written()
    with (
        SmallEngine(restarted.socket, 200, name="one") as one,
        SmallEngine(restarted.socket, 200, name="two") as two,
    ):
        prompts = [one.keys(tokens(100, seed)) for seed in range(2)]
        for _ in range(2):
            tickets = []
            for engine in (one, two):
                engine.wipe()
                assert [engine.hits(keys) for keys in prompts] == [100, 100]
                tickets += [engine.begin_retrieve(k, 100 * i) for i, k in enumerate(prompts)]
            assert all(all(settled(ticket)) for ticket in tickets)
            for engine in (one, two):
                right = [engine.right_chunks(k, 100 * i) for i, k in enumerate(prompts)]
                assert right == [100, 100]
        watch.written()
    assert watch.stats()["tiers"][0]["pinned"] == 0
