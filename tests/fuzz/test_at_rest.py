"""Mutated headers, manifests and settings: errors of one line, and nothing else."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import xxhash

from kvstore import config
from kvstore.codecs.base import HEADER_BYTES, Payload, pack, unpack
from kvstore.core.errors import ChunkCorruptError, ConfigError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, SpaceRecord
from kvstore.sizing_redis import fit_redis, redis_settings
from kvstore.tiers import manifest
from tests.fuzz.mutate import EXAMPLES, TEXTS, fuzz, is_line, mangle, only_lines
from tests.nvme_bench import KINDS, make_odd

HEADER = ChunkHeader(
    key=ChunkKey(b"k" * 32), parent=ChunkKey(b"p" * 32), depth=1, tenant="uid:0",
    namespace=b"n" * 32, epoch=2, dtype="bfloat16", tokens=16, shard=0, shards=1,
    part=Part.FULL, payload_bytes=8192, sequence=3,
)  # fmt: skip
MANIFEST = manifest.Manifest(1 << 20, True, (SpaceRecord("uid:0", b"n" * 32, "m", "a", 1),))


@fuzz(EXAMPLES)
def test_a_mutated_header_is_corrupt_or_a_chunks(seed: int) -> None:
    """With and without a checksum that fits the damage."""
    rng = random.Random(seed)
    raw = mangle(rng, pack(HEADER, Payload(0, 1, 8192, 7)))
    if rng.random() < 0.7:
        body = raw.ljust(HEADER_BYTES, b"\0")[: HEADER_BYTES - 8]
        raw = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    with only_lines(ChunkCorruptError):
        header, payload = unpack(raw)
        assert pack(header, payload)[:HEADER_BYTES]


@fuzz(EXAMPLES // 10)
def test_a_mutated_manifest_is_refused_or_one(seed: int) -> None:
    """What is read can be written again."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest.save(folder, MANIFEST)
        file = folder / manifest.FILE_NAME
        file.write_bytes(mangle(rng, file.read_bytes()))
        with only_lines(ConfigError):
            found = manifest.load(folder)
            assert found is not None
            manifest.save(folder, found)


@fuzz(EXAMPLES // 4)
def test_mutated_settings_are_refused_in_one_line_or_taken(seed: int) -> None:
    """By file and by environment."""
    rng = random.Random(seed)
    name = rng.choice(("HOST_SIZE", "NVME_SIZE", "SOCKET", "NVME_PATH", "ADMIN", "LEASE", "X"))
    value = mangle(rng, rng.choice(("1GiB", "/tmp/s.sock", "60s", "true"))
        .encode()).decode("utf-8", "replace")  # fmt: skip
    value = rng.choice((value, *TEXTS))[:2000].replace("\0", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kvstore.toml"
        file.write_bytes(mangle(rng, b'[host]\nsize = "1GiB"\n[nvme]\nsize = 5\n'))
        environment = {"HOME": folder, f"KVSTORE_{name}": value}
        if rng.random() < 0.5:
            environment["KVSTORE_CONFIG"] = str(file)
        with only_lines(ConfigError):
            config.load({}, environment)


URLS = (
    "redis://user:geheim@host:6379/0",
    "rediss://:geheim@[::1]:1,b:2/1?db=3",
    "unix://u:geheim@/run/r.sock?db=2",
    "redis+sentinel://u:geheim@a:1,b/main/2",
    "redis+cluster://u:geheim@a,b:1",
)
REDIS = ("prefix", "ttl", "codec", "timeout", "connections", "split_size", "namespace_size")


@fuzz(EXAMPLES // 4)
def test_mutated_redis_settings_are_refused_or_taken_and_tell_no_password(seed: int) -> None:
    """An address, and one other setting. What stands before the last @ is shown nowhere."""
    rng = random.Random(seed)
    url = mangle(rng, rng.choice(URLS).encode()).decode("utf-8", "replace").replace("\0", "")
    other = mangle(rng, rng.choice((b"1", b"1s", b"1MiB", b"lz4", b"a/b"))).decode(
        "utf-8", "replace"
    )
    environment = {
        "HOME": "/nowhere",
        "KVSTORE_REDIS_URL": url,
        f"KVSTORE_REDIS_{rng.choice(REDIS).upper()}": other.replace("\0", "")[:2000],
    }
    told = ""
    try:
        settings = config.load({}, environment)
        told = settings.values["redis.url"].text + settings.given("redis.url")
        redis = fit_redis(settings)
        told += repr(redis)
        if redis.url:
            told += repr(redis_settings(redis))
    except ConfigError as error:
        told += str(error)
    assert is_line(told), told
    if "geheim" not in url.rpartition("@")[2] + other:
        assert "geheim" not in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_for_tls_that_is_none_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A folder, a pipe that nobody writes to, a link to nothing: no start waits for it."""
    make_odd(tmp_path / "ca", "folder" if kind == "link" else kind, tmp_path / "target")
    environment = {
        "HOME": str(tmp_path),
        "KVSTORE_REDIS_URL": "rediss://host",
        "KVSTORE_REDIS_CA": str(tmp_path / "ca"),
    }
    with pytest.raises(ConfigError, match=r"redis\.ca") as refused:
        fit_redis(config.load({}, environment))
    assert is_line(str(refused.value))
