"""The header at rest: a format for ever."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.codecs.base import (
    HEADER_BYTES,
    Payload,
    differing_field,
    erased,
    is_free,
    pack,
    payload_checksum,
    unpack,
)
from kvstore.core.errors import ChunkCorruptError, LayoutMismatchError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import DTYPES, Part
from kvstore.core.messages import ChunkHeader
from kvstore.testing import pattern, sample_header

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
DIGEST = st.binary(min_size=32, max_size=32)
TENANT = st.text(max_size=128).filter(lambda t: len(t.encode("utf-8", "surrogatepass")) <= 128)
HEADERS = st.builds(
    ChunkHeader, key=DIGEST.map(ChunkKey), parent=DIGEST.map(ChunkKey), depth=U32, tenant=TENANT,
    namespace=DIGEST, epoch=U64, dtype=st.sampled_from(sorted(DTYPES)), tokens=U32, shard=U32,
    shards=U32, part=st.sampled_from(Part), payload_bytes=U64, sequence=U64,
)  # fmt: skip
PAYLOADS = st.builds(Payload, codec_id=U16, codec_version=U16, stored_bytes=U64, checksum=U64)

GOLDEN_HEADER = ChunkHeader(
    key=ChunkKey(bytes(range(32))), parent=ChunkKey(bytes(range(32, 64))), depth=3, tenant="tenänt",
    namespace=bytes(range(64, 96)), epoch=5, dtype="float16", tokens=256, shard=1, shards=2,
    part=Part.WINDOW, payload_bytes=1_000_000, sequence=77,
)  # fmt: skip
GOLDEN_PAYLOAD = Payload(0, 1, 999_999, 0x0123456789ABCDEF)
GOLDEN_FIELDS = (
    "6b766368756e6b0a" "01000000" "01000000" "40420f0000000000" "3f420f0000000000"
    "efcdab8967452301" "4d00000000000000"
    + bytes(range(96)).hex()
    + "0500000000000000" "03000000" "00010000" "01000000" "02000000" "0100" "0200" "0000" "0100"
    "0700" "000000000000" "74656ec3a46e74"
)  # fmt: skip
SAMPLE = sample_header(1, 5000)


def reseal(block: bytes) -> bytes:
    """The block with a checksum that fits, as if somebody had meant it."""
    return block[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(block[:-8]))


@given(HEADERS, PAYLOADS)
@example(
    dataclasses.replace(
        sample_header(1, (1 << 64) - 1), epoch=(1 << 64) - 1, sequence=(1 << 64) - 1,
        depth=(1 << 32) - 1, tokens=(1 << 32) - 1, shard=(1 << 32) - 1, shards=(1 << 32) - 1,
    ),
    Payload((1 << 16) - 1, (1 << 16) - 1, (1 << 64) - 1, (1 << 64) - 1),
)  # fmt: skip
def test_round_trip(header: ChunkHeader, payload: Payload) -> None:
    block = pack(header, payload)
    assert len(block) == HEADER_BYTES
    assert unpack(block) == (header, payload)
    assert unpack(np.frombuffer(block, np.uint8)) == (header, payload)


@given(HEADERS, PAYLOADS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_flipped_bit_is_corrupt(header: ChunkHeader, payload: Payload, bit: int) -> None:
    """Wherever it is, in fields, padding or checksum."""
    block = bytearray(pack(header, payload))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChunkCorruptError):
        unpack(bytes(block))
    assert not is_free(bytes(block))


@given(st.integers(0, HEADER_BYTES - 1), st.booleans())
def test_truncated_is_corrupt(nbytes: int, padded: bool) -> None:
    """Cut off, or torn with zeros behind."""
    block = pack(SAMPLE, GOLDEN_PAYLOAD)[:nbytes]
    with pytest.raises(ChunkCorruptError):
        unpack(block.ljust(HEADER_BYTES, b"\0") if padded else block)


@given(st.binary(min_size=1, max_size=200))
def test_anything_else_is_corrupt(seed: bytes) -> None:
    block = (seed * HEADER_BYTES)[:HEADER_BYTES]
    with pytest.raises(ChunkCorruptError):
        unpack(block)


def test_bytes_at_rest_never_change() -> None:
    """Chunks written by any version must be readable, or refused, by all later ones."""
    block = pack(GOLDEN_HEADER, GOLDEN_PAYLOAD)
    fields = bytes.fromhex(GOLDEN_FIELDS)
    assert block[: len(fields)] == fields
    assert not any(block[len(fields) : -8])
    assert block[-8:] == xxhash.xxh3_64_intdigest(block[:-8]).to_bytes(8, "little")
    assert block[-8:].hex() == "11d2fef9c04b81bc"


def test_every_dtype_has_its_own_code_at_rest() -> None:
    """Field case 11: bf16 and fp16, and the three kinds of eight bits, are never taken for one
    another, though their sizes are equal."""
    codes = set()
    for dtype in DTYPES:
        block = pack(dataclasses.replace(SAMPLE, dtype=dtype), GOLDEN_PAYLOAD)
        assert unpack(block)[0].dtype == dtype
        codes.add(block[170:172])
    assert len(codes) == len(DTYPES)


def test_flipped_dtype_is_corrupt_and_a_meant_one_is_foreign() -> None:
    """Field case 11: the dtype byte of a stored header is flipped, with and without a checksum
    that fits."""
    block = bytearray(pack(SAMPLE, GOLDEN_PAYLOAD))
    block[170] ^= 1
    with pytest.raises(ChunkCorruptError, match="checksum"):
        unpack(bytes(block))
    found, _ = unpack(reseal(bytes(block)))
    assert differing_field(found, SAMPLE) == "dtype"


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [(8, 2, "version 2"), (12, 9, "kind=9"), (170, 99, "dtype=99"), (168, 5, "part=5"),
     (0, 0, "magic"), (184, 255, "UTF-8")],
)  # fmt: skip
def test_whole_header_of_another_format_is_corrupt(offset: int, value: int, word: str) -> None:
    """A later version wrote it, or nobody did: a miss, not a guess."""
    block = bytearray(pack(SAMPLE, GOLDEN_PAYLOAD))
    block[offset] = value
    with pytest.raises(ChunkCorruptError, match=word):
        unpack(reseal(bytes(block)))


def test_every_field_but_sequence_makes_a_chunk_foreign() -> None:
    """Field case 10: the whole identity is compared, not the index's idea of it."""
    others = {
        "key": ChunkKey(bytes(32)), "parent": ChunkKey(b"p" * 32), "depth": 1, "tenant": "other",
        "namespace": bytes(32), "epoch": 2, "dtype": "float16", "tokens": 32, "shard": 1,
        "shards": 2, "part": Part.WINDOW, "payload_bytes": 4999,
    }  # fmt: skip
    assert set(others) | {"sequence"} == {f.name for f in dataclasses.fields(ChunkHeader)}
    for name, value in others.items():
        assert differing_field(dataclasses.replace(SAMPLE, **{name: value}), SAMPLE) == name
    assert differing_field(dataclasses.replace(SAMPLE, sequence=9), SAMPLE) is None


def test_erased_and_unwritten_are_free_and_no_chunk() -> None:
    for block in (erased(), bytes(HEADER_BYTES)):
        assert is_free(block)
        with pytest.raises(ChunkCorruptError):
            unpack(block)
    assert not is_free(pack(SAMPLE, GOLDEN_PAYLOAD))


@pytest.mark.parametrize(
    ("name", "value"),
    [("tenant", "x" * 129), ("tenant", "ä" * 65), ("key", b"short"), ("namespace", bytes(33)),
     ("dtype", "float128"), ("depth", 1 << 32), ("sequence", -1), ("payload_bytes", 1 << 64)],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(name: str, value: object) -> None:
    """Nothing is cut off silently: a tenant's name cut at 128 bytes could be another's."""
    with pytest.raises(LayoutMismatchError, match="header: "):
        pack(dataclasses.replace(SAMPLE, **{name: value}), GOLDEN_PAYLOAD)  # type: ignore[arg-type]


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_payload_checksum_sees_every_bit(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    damaged = np.frombuffer(payload, np.uint8).copy()
    before = payload_checksum(damaged)
    assert before == payload_checksum(np.frombuffer(payload, np.uint8))
    damaged[bit // 8] ^= 1 << bit % 8
    assert payload_checksum(damaged) != before


def test_payload_checksum_is_xxh3() -> None:
    raw = pattern(1, 10_000)
    assert payload_checksum(raw) == xxhash.xxh3_64_intdigest(raw.tobytes())
