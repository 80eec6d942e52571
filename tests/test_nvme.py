"""The NVMe tier on a real disk: faults of the device, foreign and damaged slots."""

from __future__ import annotations

import dataclasses
import errno
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs import base as codecs
from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    InvariantError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.core.messages import Place, TierName
from kvstore.testing import SlabBytes, pattern, sample_header
from kvstore.tiers.base import ChunkForeignError
from kvstore.tiers.block_io import IN_DEVICE, aligned_empty
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slabs import DirectIO
from tests.link_rig import eventually
from tests.nvme_bench import (
    PAYLOAD_BYTES,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    FaultyIO,
    found,
    header,
    holds,
    place,
    put,
)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def tier(tmp_path: Path, io: FaultyIO) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "nvme", SLABS, SLAB_BYTES, DirectIO.AUTO, io)
    tier.open()
    yield tier
    tier.close()


def test_chunk_goes_out_and_comes_back_in_one_call_each(tier: NvmeTier, io: FaultyIO) -> None:
    """Header and payload in one vectored write; the slab is preallocated first, once."""
    io.calls.clear()
    put(tier, 0, 1)
    put(tier, 1, 2)
    assert io.calls == ["allocate", "pwritev", "pwritev"]
    assert holds(tier, 0, 1)
    assert io.calls[3:] == ["preadv"]


def test_tail_of_a_slot_is_zero(tier: NvmeTier) -> None:
    """Field case 64: what lies behind an odd payload is nobody's bytes."""
    put(tier, 0, 1)
    at_rest = SlabBytes(tier.folder)
    assert at_rest.peek(place(0), 4096, PAYLOAD_BYTES) == pattern(1, PAYLOAD_BYTES).tobytes()
    assert not any(at_rest.peek(place(0), 4096 + PAYLOAD_BYTES, 288))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_write_leaves_nothing_valid(tier: NvmeTier, io: FaultyIO, code: int) -> None:
    """Field case 21: the device fails after half of the bytes, over an older chunk. Neither the old
    nor the new chunk is there, not even after a clean restart; the next write is fine."""
    put(tier, 0, 1)
    io.calls.clear()
    io.write_error = code
    with pytest.raises(CapacityError if code == errno.ENOSPC else TierUnavailableError):
        put(tier, 0, 2)
    io.write_error = None
    assert not holds(tier, 0, 1)
    assert not holds(tier, 0, 2)
    tier.close()
    tier.open()
    assert found(tier) == {}
    put(tier, 0, 3)
    assert holds(tier, 0, 3)
    assert tier.stats().errors == 3


@pytest.mark.parametrize("direct", [DirectIO.AUTO, DirectIO.OFF])
@pytest.mark.parametrize("shift", [0, 1])
def test_chunk_of_odd_size(tmp_path: Path, direct: DirectIO, shift: int) -> None:
    """Field case 64: 4096 KiB and one byte, from an aligned and an unaligned source, the last slot
    of its slab: bytes equal, file size right."""
    nbytes = (4096 << 10) + 1
    slot_bytes = 4096 + (4096 << 10) + 4096
    tier = NvmeTier(tmp_path, 1, 2 * slot_bytes + 4096, direct)
    tier.open()
    source, out = (aligned_empty(nbytes + shift)[shift:] for _ in range(2))
    source[:] = pattern(1, nbytes)
    where = Place(TierName.NVME, 0, 1, slot_bytes)
    tier.write(where, sample_header(1, nbytes), source)
    tier.read(where, sample_header(1, nbytes), out)
    np.testing.assert_array_equal(out, source)
    assert (tmp_path / f"slab_0_{slot_bytes}.kv").stat().st_size == 2 * slot_bytes
    tier.close()


def test_failed_read_is_no_miss(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 22: the device can't read. That is told apart from a chunk that is damaged."""
    put(tier, 0, 1)
    io.read_error = errno.EIO
    with pytest.raises(TierUnavailableError, match="read of slab 0"):
        holds(tier, 0, 1)
    io.read_error = None
    assert holds(tier, 0, 1)


def test_read_during_a_write_is_a_miss_or_whole(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 20: a reader comes when half of a chunk's bytes are written, over an older
    chunk. It gets neither, and afterwards the new one."""
    put(tier, 0, 1)
    io.calls.clear()
    io.half_way = threading.Barrier(2)
    writer = threading.Thread(target=put, args=(tier, 0, 2))
    writer.start()
    io.half_way.wait(60)
    assert not holds(tier, 0, 1)
    assert not holds(tier, 0, 2)
    io.half_way.wait(60)
    writer.join()
    assert holds(tier, 0, 2)


def test_second_of_two_writes_fails_half_way(tier: NvmeTier, io: FaultyIO) -> None:
    """Field case 21 B: two stores of one key, the second fails at 50 %: whole or absent."""
    put(tier, 0, 1)
    io.calls.clear()
    io.write_error = errno.EIO
    with pytest.raises(TierUnavailableError):
        put(tier, 0, 1)
    io.write_error = None
    holds(tier, 0, 1)
    assert found(tier) in ({}, {0: 1})
    assert holds(tier, 0, 1) == (found(tier) == {0: 1})


def test_many_threads_write_and_read_their_own_chunks(tier: NvmeTier) -> None:
    """Field case 24, the disk's part: 4 writers and readers over all places; each chunk read is
    the one asked for."""
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(10):
            for number in range(first, SLABS * 8, 4):
                seed = 1 + step * 1000 + number
                put(tier, number, seed)
                if not holds(tier, number, seed) or holds(tier, number, seed + 1000):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_device_is_given_few_chunks_at_a_time(
    tier: NvmeTier, io: FaultyIO, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The other threads wait before it, so that they are ready when it has ended those that it
    has."""
    for number in range(2 * IN_DEVICE):
        put(tier, number, 1 + number)
    inside, go = [], threading.Event()
    real = getattr(io, call)

    def slow(*arguments: Any) -> int:
        inside.append(threading.get_ident())
        assert go.wait(60)
        done: int = real(*arguments)
        return done

    monkeypatch.setattr(io, call, slow)
    work = holds if call == "preadv" else put
    threads = [
        threading.Thread(target=work, args=(tier, number, 1 + number))
        for number in range(2 * IN_DEVICE)
    ]
    for thread in threads:
        thread.start()
    enter = threading.Semaphore.acquire.__code__

    def waiting() -> int:
        callers = [frame.f_back for frame in sys._current_frames().values()]
        return sum(caller is not None and caller.f_code is enter for caller in callers)

    eventually(lambda: len(inside) == IN_DEVICE and waiting() == IN_DEVICE)
    go.set()
    for thread in threads:
        thread.join()
    assert len(inside) == 2 * IN_DEVICE


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(bit=st.integers(0, (4096 + PAYLOAD_BYTES) * 8 - 1))
def test_one_flipped_bit_is_corrupt(tier: NvmeTier, bit: int) -> None:
    """Wherever it is, in header or payload; and no other slot suffers."""
    put(tier, 0, 1)
    put(tier, 1, 2)
    SlabBytes(tier.folder).flip(place(0), bit)
    with pytest.raises(ChunkCorruptError) as caught:
        tier.read(place(0), header(1), np.zeros(PAYLOAD_BYTES, np.uint8))
    assert not isinstance(caught.value, ChunkForeignError)
    assert holds(tier, 1, 2)


def test_flipped_dtype_byte(tier: NvmeTier) -> None:
    """Field case 11: the dtype byte of a stored header is flipped: a miss and an error counted."""
    put(tier, 0, 1)
    SlabBytes(tier.folder).flip(place(0), 170 * 8)
    assert not holds(tier, 0, 1)
    assert tier.stats().errors == 1
    assert found(tier) == {}


@pytest.mark.parametrize("field", ["key", "tenant", "dtype", "epoch", "shard", "part"])
def test_another_identity_is_foreign(tier: NvmeTier, field: str) -> None:
    """Field case 10: whole, but not what was asked for; another tenant's, say."""
    put(tier, 0, 1)
    values: dict[str, Any] = {"key": b"x" * 32, "tenant": "b", "dtype": "float16"}
    other = dataclasses.replace(header(1), **{field: values.get(field, 2)})
    with pytest.raises(ChunkForeignError, match=field):
        tier.read(place(0), other, np.zeros(PAYLOAD_BYTES, np.uint8))
    assert holds(tier, 0, 1)


def test_unknown_codec_is_corrupt(tier: NvmeTier) -> None:
    """A later version's codec: a miss, not a guess."""
    payload = pattern(1, PAYLOAD_BYTES)
    put(tier, 0, 1)
    stored = codecs.Payload(9, 1, PAYLOAD_BYTES, codecs.payload_checksum(payload))
    SlabBytes(tier.folder).poke(place(0), 0, codecs.pack(header(1), stored))
    with pytest.raises(ChunkCorruptError, match="codec"):
        tier.read(place(0), header(1), np.zeros(PAYLOAD_BYTES, np.uint8))


def test_device_that_refuses_again_and_again_is_failing(tier: NvmeTier, io: FaultyIO) -> None:
    """Errors in a row of one kind count, until one succeeds; a full device is no failure, nor is a
    chunk that is damaged."""
    put(tier, 0, 1)
    io.allocate_error = errno.ENOSPC
    for number in (8, 16, 24):
        with pytest.raises(CapacityError):
            put(tier, number, 2)
    assert not any(holds(tier, 0, 9) for _ in range(3))
    assert tier.stats().failing == ""
    io.allocate_error = errno.EIO
    for number in (8, 16, 24):
        assert tier.stats().failing == ""
        with pytest.raises(TierUnavailableError):
            put(tier, number, 2)
    assert "write of slab 3 (16384) slot 0 failed: Input/output error" in tier.stats().failing
    assert holds(tier, 0, 1)
    assert tier.stats().failing
    io.allocate_error = None
    put(tier, 8, 2)
    assert tier.stats().failing == ""


def test_breaches_of_contract_are_bugs(tier: NvmeTier) -> None:
    """A place outside the tier or a payload of another size never touches the disk."""
    payload = pattern(1, PAYLOAD_BYTES)
    for bad in (place(SLABS * 8), place(0, 5000), Place(TierName.NVME, 0, 8, SLOT_BYTES)):
        with pytest.raises(InvariantError):
            tier.write(bad, header(1), payload)
    with pytest.raises(InvariantError):
        tier.write(place(0), header(1), payload[1:])
    with pytest.raises(InvariantError):
        tier.write(place(0), sample_header(1, 12_289), pattern(1, 12_289))
    with pytest.raises(LayoutMismatchError):
        tier.write(place(0), dataclasses.replace(header(1), tenant="x" * 129), payload)
    assert not list(tier.folder.glob("*.kv"))
