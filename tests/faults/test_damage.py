"""Faults that other services were seen to have: bytes at rest that changed, behind a real daemon's
back."""

from __future__ import annotations

import os
import random

import pytest

from kvstore.codecs.base import HEADER_BYTES
from tests.conftest import RunningDaemon, StartDaemon
from tests.crash.at_rest import ChunkAtRest, chunks_at_rest
from tests.crash.watch import Watch
from tests.small_engine import CHUNK_BYTES, SmallEngine, tokens

CHUNKS = 12
BAD = 5
DAMAGES = int(os.environ.get("DAMAGES", "80"))
"""Random damages; ``make soak`` does more."""


def at_rest_after_a_stop(daemon: RunningDaemon) -> dict[int, ChunkAtRest]:
    """Store a prompt of CHUNKS chunks, wait until it is on NVMe, stop; its chunks by depth."""
    with SmallEngine(daemon.socket, CHUNKS) as engine:
        keys = engine.keys(tokens(CHUNKS))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == CHUNKS
        Watch(daemon).written()
        namespace = engine.worker.state().namespace
    assert daemon.stop() == 0
    return chunks_at_rest(daemon.nvme, namespace)


def heal(daemon: RunningDaemon, engine: SmallEngine) -> None:
    """Store the prompt again: all of it is hit and right, now and after a restart."""
    keys = engine.keys(tokens(CHUNKS))
    engine.fill(keys)
    assert engine.store(keys).leading_chunks == CHUNKS
    Watch(daemon).written()
    for restart in (False, True):
        if restart:
            assert daemon.stop() == 0
            daemon.start()
            engine.rejoin(daemon.pid)
            Watch(daemon).written()
        engine.wipe()
        assert engine.hits(keys) == CHUNKS
        assert engine.retrieve(keys).leading_chunks == CHUNKS
        assert engine.right_chunks(keys) == CHUNKS


@pytest.mark.parametrize("byte", [HEADER_BYTES + CHUNK_BYTES - 1, 50])
def test_a_flipped_byte_on_disk_is_a_miss_and_is_counted(
    start_daemon: StartDaemon, byte: int
) -> None:
    """The last one of the payload, or one of the key in the header: the
    chunk and what follows it are no hit, and never data; stored again, they are."""
    daemon = start_daemon()
    at_rest_after_a_stop(daemon)[BAD].flip(byte)
    daemon.start()
    watch = Watch(daemon)
    watch.written()
    with SmallEngine(daemon.socket, CHUNKS) as engine:
        keys = engine.keys(tokens(CHUNKS))
        outcome = engine.retrieve(keys)
        assert outcome.done[:BAD] == (True,) * BAD
        assert not outcome.done[BAD]
        assert all(engine.is_right(keys, c) for c, done in enumerate(outcome.done) if done)
        assert engine.hits(keys) == BAD
        drops = watch.written()["drops"]
        assert drops.get("corrupt", 0) + drops.get("scan_torn", 0) == 1
        heal(daemon, engine)


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_truncated_file_heals(start_daemon: StartDaemon, kept: float) -> None:
    """The file ends before a chunk's slot or in the middle of it: neither it nor what lies behind
    is a hit. The prompt can be stored again and then hits, also after a restart."""
    daemon = start_daemon()
    chunk = at_rest_after_a_stop(daemon)[BAD]
    slot_bytes = HEADER_BYTES + CHUNK_BYTES
    os.truncate(chunk.file, chunk.offset + int(kept * slot_bytes))
    daemon.start()
    Watch(daemon).written()
    with SmallEngine(daemon.socket, CHUNKS) as engine:
        keys = engine.keys(tokens(CHUNKS))
        assert engine.hits(keys) == BAD
        assert engine.retrieve(keys).leading_chunks == BAD
        assert engine.right_chunks(keys[:BAD]) == BAD
        heal(daemon, engine)


def test_a_file_truncated_under_a_running_daemon_heals(start_daemon: StartDaemon) -> None:
    """The daemon has the file open and its index full of what was there: those chunks fail when
    they are read, the daemon goes on, and they can be stored again."""
    daemon = start_daemon()
    file = at_rest_after_a_stop(daemon)[BAD].file
    daemon.start()
    Watch(daemon).written()
    os.truncate(file, 0)
    with SmallEngine(daemon.socket, CHUNKS) as engine:
        keys = engine.keys(tokens(CHUNKS))
        assert engine.hits(keys) == CHUNKS
        assert not any(engine.retrieve(keys).done)
        assert engine.hits(keys) == 0
        heal(daemon, engine)


def damage(daemon: RunningDaemon, randomness: random.Random) -> str:
    """Change bytes at rest at random: flip, tear, clear, misplace or cut off; tells what was
    done."""
    slot_bytes = HEADER_BYTES + CHUNK_BYTES
    file = randomness.choice(sorted(daemon.nvme.glob("slab_*.kv")))
    slots = max(1, file.stat().st_size // slot_bytes)
    here, there = (randomness.randrange(slots) * slot_bytes for _ in range(2))
    inside = randomness.randrange(slot_bytes)
    kind = randomness.choice(("flip", "tear", "zero", "header", "slot", "truncate"))
    with open(file, "r+b") as opened:
        slot = bytearray(os.pread(opened.fileno(), slot_bytes, here).ljust(slot_bytes, b"\0"))
        if kind == "flip":
            slot[inside] ^= 1 << randomness.randrange(8)
            os.pwrite(opened.fileno(), slot, here)
        elif kind == "tear":
            os.pwrite(opened.fileno(), slot[:inside], there)
        elif kind == "zero":
            os.pwrite(opened.fileno(), bytes(slot_bytes - inside), here + inside)
        elif kind == "header":
            os.pwrite(opened.fileno(), slot[:HEADER_BYTES], there)
        elif kind == "slot":
            os.pwrite(opened.fileno(), slot, there)
        elif randomness.random() < 0.2:
            opened.truncate(here + inside)
    return f"{kind} {file.name} {here}+{inside} {there}"


def test_random_damage_under_a_running_daemon_is_never_data(start_daemon: StartDaemon) -> None:
    """Bytes at rest are flipped, torn, zeroed, overwritten with other chunks' headers or whole
    slots, and cut off, while an engine of each of two models stores and retrieves what the host
    can't hold; now and then the daemon starts anew, killed or not. What is retrieved is right."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    daemon = start_daemon(
        KVSTORE_HOST_SIZE="3MiB", KVSTORE_HOST_SLAB_SIZE="1MiB",
        KVSTORE_NVME_SIZE="17MiB", KVSTORE_NVME_SLAB_SIZE="2MiB",
    )  # fmt: skip
    retrieved = noticed = 0
    with (
        SmallEngine(daemon.socket, CHUNKS, "org/a", name="a") as one,
        SmallEngine(daemon.socket, CHUNKS, "org/b", name="b") as two,
    ):
        for number in range(DAMAGES):
            engine = randomness.choice((one, two))
            keys = engine.keys(tokens(CHUNKS, randomness.randrange(12)))
            engine.fill(keys)
            engine.store(keys)
            keys = engine.keys(tokens(CHUNKS, randomness.randrange(12)))
            Watch(daemon).written()
            what = f"seed {seed} number {number}: {damage(daemon, randomness)}"
            engine.wipe()
            outcome = engine.retrieve(keys[: engine.hits(keys)])
            wrong = [c for c, ok in enumerate(outcome.done) if ok and not engine.is_right(keys, c)]
            assert not wrong, f"{what}: chunks {wrong}"
            retrieved += sum(outcome.done)
            if number % 20 == 19:
                drops = Watch(daemon).stats()["drops"]
                noticed += drops.get("corrupt", 0) + drops.get("key_collision", 0)
                randomness.choice((daemon.stop, daemon.kill))()
                daemon.start()
                one.rejoin(daemon.pid)
                two.rejoin(daemon.pid)
    assert retrieved > DAMAGES, f"seed {seed}"
    assert noticed > 0, f"seed {seed}"
