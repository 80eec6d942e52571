"""Mutated headers, manifests and settings: errors of one line, and nothing else."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import xxhash

from kvstore import config
from kvstore.codecs.base import HEADER_BYTES, Payload, pack, unpack
from kvstore.core.errors import ChunkCorruptError, ConfigError
from kvstore.core.keys import ChunkKey
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, SpaceRecord
from kvstore.tiers import manifest
from tests.fuzz.mutate import EXAMPLES, TEXTS, fuzz, mangle, only_lines

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
