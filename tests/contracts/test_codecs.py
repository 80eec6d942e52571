"""Our codecs under the published contract, and what each promises beside it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.codecs import registry
from kvstore.codecs.base import CODEC_IDS, OTHERS_ID_MIN, Codec
from kvstore.codecs.identity import IdentityCodec
from kvstore.codecs.lz4 import Lz4Codec
from kvstore.codecs.registry import codec, codec_of
from kvstore.codecs.zstd import CompressionParameter, ZstdCodec, compress
from kvstore.core.errors import ChunkCorruptError, ConfigError
from kvstore.core.layout import DTYPES
from kvstore.testing import CodecContract, pattern
from kvstore.testing.codecs import decoded, numbers, smooth

OURS = ("lz4", "zstd")
Bytes = NDArray[np.uint8]


class TestIdentityCodec(CodecContract):
    @pytest.fixture
    def codec(self) -> IdentityCodec:
        return IdentityCodec()

    def test_no_copy_is_made(self, codec: IdentityCodec) -> None:
        """What is stored is the slot itself, and what is read stays where it was read."""
        raw = pattern(1, 100)
        assert codec.encode(raw) is raw
        codec.decode(raw, raw)

    def test_id_is_the_one_at_rest(self, codec: IdentityCodec) -> None:
        assert codec.id == CODEC_IDS["identity"] == 0


class PlanesContract(CodecContract):
    """What both codecs over split planes do."""

    def test_noise_is_stored_as_it_is(self, codec: Codec) -> None:
        """Without a copy, so that the header can name the identity."""
        raw = pattern(1, 3_000_000)
        assert codec.encode(raw) is raw

    def test_a_block_that_does_not_shrink_costs_its_bytes_only(self, codec: Codec) -> None:
        """Blocks are judged by themselves: the half that is noise doesn't spoil the other one."""
        raw = np.concatenate([pattern(1, 1 << 21), np.zeros(1 << 21, np.uint8)])
        stored = codec.encode(raw)
        assert stored.nbytes < 0.52 * raw.nbytes
        np.testing.assert_array_equal(decoded(codec, stored, raw), raw)

    def test_no_interpreter_lock_is_held(self, codec: Codec) -> None:
        """Another thread runs while a long array is encoded and decoded, though nobody makes the
        working thread give the lock up."""
        raw = np.tile(smooth(1, 1 << 20), 64)
        stored = codec.encode(raw)
        out = np.empty_like(raw)
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            assert _steps_beside(lambda: codec.encode(raw)) > 10
            assert _steps_beside(lambda: codec.decode(stored, out)) > 10
        finally:
            sys.setswitchinterval(before_s)


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
class TestLz4Codec(PlanesContract):
    @pytest.fixture
    def codec(self, item_bytes: int) -> Lz4Codec:
        return Lz4Codec(item_bytes)


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
class TestZstdCodec(PlanesContract):
    @pytest.fixture
    def codec(self, item_bytes: int) -> ZstdCodec:
        return ZstdCodec(item_bytes)


def _steps_beside(work: Callable[[], object]) -> int:
    """How often this thread runs while another one does the work."""
    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while thread.is_alive():
        time.sleep(0.0002)
        steps += 1
    return steps


@pytest.mark.parametrize("name", OURS)
def test_a_plane_that_repeats_shrinks_among_noise(name: str) -> None:
    """Every other byte is the same: nothing to find for a compressor, unless they lie together."""
    raw = numbers(1, 3_000_000, 0)
    assert codec(name, "bfloat16").encode(raw).nbytes < 0.52 * raw.nbytes
    assert codec(name, "float16").encode(raw).nbytes < 0.52 * raw.nbytes


@given(
    st.sampled_from(OURS), st.sampled_from(sorted(DTYPES)), st.integers(0, 1_300_000),
    st.integers(0, 8), st.integers(0, 9),
)  # fmt: skip
def test_any_chunk_comes_back(
    name: str, dtype: str, nbytes: int, noise_bits: int, seed: int
) -> None:
    """Any dtype, length and kind of content; whatever reads it knows only the ID."""
    raw = numbers(seed, nbytes, noise_bits)
    written = codec(name, dtype)
    stored = written.encode(raw)
    reader = codec_of(written.id, written.version)
    assert reader is not None
    np.testing.assert_array_equal(decoded(reader, stored, raw), raw)


@given(st.sampled_from(OURS), st.sampled_from(sorted(DTYPES)), st.binary(max_size=3000))
def test_any_short_bytes_come_back(name: str, dtype: str, data: bytes) -> None:
    raw = np.frombuffer(data, np.uint8)
    chosen = codec(name, dtype)
    np.testing.assert_array_equal(decoded(chosen, chosen.encode(raw), raw), raw)


def planes(size: int, *parts: bytes) -> Bytes:
    """An encoding of one block, written by hand."""
    lengths = np.array([len(part) for part in parts], "<u4").tobytes()
    return np.frombuffer(bytes([size, *bytes(7)]) + lengths + b"".join(parts), np.uint8)


ZEROS = bytes(100_000)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("zstd", compress(ZEROS[:-1])),
        ("zstd", compress(ZEROS + b"1")),
        ("zstd", compress(ZEROS) + b"1"),
        ("zstd", compress(ZEROS)[:-1]),
        ("zstd", compress(ZEROS[:50_000]) + compress(ZEROS[50_000:])),
        ("zstd", bytes.fromhex("502a4d1804000000") + b"skip"),
        ("zstd", bytes.fromhex("28b52ffd" "00" "78" "03350c" "00")),
        ("zstd", compress(ZEROS, options={CompressionParameter.checksum_flag: 1})[:-4]),
        ("zstd", compress(ZEROS, options={CompressionParameter.checksum_flag: 1})[:-1] + b"?"),
        ("zstd", b""),
        ("lz4", lz4.block.compress(ZEROS[:-1], store_size=False)),
        ("lz4", lz4.block.compress(ZEROS + b"1", store_size=False)),
        ("lz4", b""),
        ("lz4", b"\xff" * 100),
    ],
)  # fmt: skip
def test_what_expands_to_another_length_is_corrupt(name: str, part: bytes) -> None:
    """Frames that are whole, but not of the plane's length, and bytes behind them; one that is
    right, but for a window of 32 MiB, which would be allocated; checksums cut off and wrong."""
    with pytest.raises(ChunkCorruptError):
        codec(name, "int8").decode(planes(1, part), np.zeros(len(ZEROS), np.uint8))


def test_a_plane_that_grew_is_corrupt() -> None:
    """Such a plane is stored as it is; so nobody reads more than the raw length."""
    with pytest.raises(ChunkCorruptError, match="by their lengths"):
        codec("zstd", "int8").decode(planes(1, compress(b"x")), np.zeros(1, np.uint8))


def test_bytes_at_rest_never_change() -> None:
    """Written by any version, read by all later ones: two planes, one as it is, and a rest."""
    part = lz4.block.compress(bytes(1000), store_size=False)
    noise = pattern(1, 1000).tobytes()
    stored = np.concatenate([planes(2, noise, part), np.array([9], np.uint8)])
    wanted = np.zeros(2001, np.uint8)
    wanted[:-1:2], wanted[-1] = np.frombuffer(noise, np.uint8), 9
    out = np.empty(2001, np.uint8)
    codec("lz4", "bfloat16").decode(stored, out)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(codec("lz4", "bfloat16").encode(wanted), stored)


@pytest.fixture
def own_codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two codecs that others have installed: one good, one with an ID of ours."""
    entries = [
        EntryPoint(name, f"{__name__}:{made}", "kvstore.codecs")
        for name, made in (("good", "good_codec"), ("bad", "bad_codec"), ("gone", "no_such"))
    ]
    monkeypatch.setattr("kvstore.codecs.registry.entry_points", lambda group: entries)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for cached in (registry.codec, registry.codec_of, registry._others):
        cached.cache_clear()


def good_codec(item_bytes: int) -> Codec:
    made = Lz4Codec(item_bytes)
    made.id = OTHERS_ID_MIN
    return made


def bad_codec(item_bytes: int) -> Codec:
    return Lz4Codec(item_bytes)


@pytest.mark.usefixtures("own_codecs")
def test_codecs_of_others_are_found_by_name_and_id() -> None:
    """An entry point's ID is outside ours; one that can't be loaded hides no other."""
    found = codec("good", "float16")
    assert found.id == OTHERS_ID_MIN
    assert codec("good", "float16") is found
    read = codec_of(OTHERS_ID_MIN, 1)
    assert read is not None
    assert read.id == OTHERS_ID_MIN
    with pytest.raises(ConfigError, match="codec=bad: ID 1 is ours; valid are 32768 or more"):
        codec("bad", "float16")
    with pytest.raises(ConfigError, match="codec=gone: "):
        codec("gone", "float16")
    with pytest.raises(
        ConfigError, match=r"codec=x: no such .* valid are identity, lz4, zstd, good, bad, gone"
    ):
        codec("x", "float16")


def test_an_unknown_id_or_version_has_no_codec() -> None:
    """Another node may have more codecs than this one."""
    assert codec_of(9, 1) is None
    assert codec_of(CODEC_IDS["zstd"], 2) is None
    for name, number in CODEC_IDS.items():
        found = codec_of(number, 1)
        assert found is not None, name
        assert found.id == number


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the daemon says what to install, and chunks of that codec are a miss."""
    monkeypatch.setitem(sys.modules, "kvstore.codecs.zstd", None)
    _forget()
    try:
        with pytest.raises(ConfigError, match=r"codec=zstd: .* pip install 'kvstore\[redis\]'"):
            codec("zstd", "bfloat16")
        assert codec_of(CODEC_IDS["zstd"], 1) is None
        assert codec("lz4", "bfloat16").id == CODEC_IDS["lz4"]
    finally:
        _forget()
