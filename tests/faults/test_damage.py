"""Faults that other services were seen to have: bytes at rest that changed, behind a real daemon's
back."""

from __future__ import annotations

import os

import pytest

from kvstore.codecs.base import HEADER_BYTES
from tests.conftest import RunningDaemon, StartDaemon
from tests.crash.at_rest import ChunkAtRest, chunks_at_rest
from tests.crash.watch import Watch
from tests.small_engine import CHUNK_BYTES, SmallEngine, tokens

CHUNKS = 12
BAD = 5


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
