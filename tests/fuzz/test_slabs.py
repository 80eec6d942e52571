"""Slab files of mutated and random content: a start, its reads and a check find what is whole,
count what is dropped, and take nothing for a chunk that isn't it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.codecs.base import HEADER_BYTES, is_free
from kvstore.core.errors import ChunkCorruptError, ConfigError, TierUnavailableError
from kvstore.core.layout import Part
from kvstore.core.limits import Limits, TierLimits
from kvstore.core.messages import (
    ChunkHeader,
    Place,
    ScanDone,
    Scanned,
    ScannedSlot,
    SpaceRecord,
    Tick,
    TierName,
)
from kvstore.core.service import Service
from kvstore.core.stats import Drop
from kvstore.testing import pattern, sample_header, scanned
from kvstore.tiers import lock, manifest
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slab_files import slab_files
from kvstore.tiers.slabs import DirectIO
from kvstore.verify import FolderCheck, FolderReport, Verdict
from tests.fuzz.mutate import EXAMPLES, fuzz, mangle, only_lines
from tests.nvme_bench import KINDS, make_odd

SLABS, SLAB_BYTES = 3, 6 * 8192
SMALL, LARGE = (8192, 4096), (16_384, 10_000)
"""Bytes of a slot and of the payload in it."""
SPACE = SpaceRecord("tenant", bytes(range(32)), "model", "", 1)
OTHER = SpaceRecord("tenant", bytes(32), "other", "", 7)
SCAN_DROPS = (Drop.SCAN_TORN, Drop.SCAN_ORPHAN, Drop.SCAN_OLD_EPOCH, Drop.SCAN_DUPLICATE)
ROOM_BYTES = 2 << 30
SOON_S = 0.1
"""The core has a Tick so soon only while it has something to do."""
OUTCOMES = {"adopted", "whole", "not whole", *(drop.value for drop in SCAN_DROPS)}
"""What becomes of a hundred folders, or the mutations are too wild or too tame."""


def chunks() -> dict[Place, ChunkHeader]:
    """A chain in each of two namespaces, one of them with a window and an older copy of a chunk;
    a chunk that was cleared."""
    found: dict[Place, ChunkHeader] = {}
    for slab, ((size, payload), space) in enumerate(((SMALL, SPACE), (LARGE, OTHER))):
        header = None
        for index in range(SLAB_BYTES // size - slab):
            made = replace(
                sample_header(10 + 10 * slab + index, payload),
                namespace=space.namespace, epoch=space.epoch,
            )  # fmt: skip
            if header is not None:
                made = replace(made, parent=header.key, depth=header.depth + 1)
            found[Place(TierName.NVME, slab, index, size)] = header = made
    third = found[Place(TierName.NVME, 0, 2, SMALL[0])]
    for index, made in enumerate(
        (
            replace(third, sequence=1),
            replace(third, sequence=30, part=Part.WINDOW),
            replace(sample_header(40, SMALL[1]), epoch=0),
        )
    ):
        found[Place(TierName.NVME, 2, index, SMALL[0])] = made
    return found


CHUNKS = chunks()
PAYLOADS = {h: pattern(h.key[0] + 300 * h.part, h.payload_bytes) for h in CHUNKS.values()}


def new_tier(folder: Path) -> NvmeTier:
    """A tier on the folder, not open yet."""
    return NvmeTier(folder, SLABS, SLAB_BYTES, DirectIO.OFF)


@pytest.fixture(scope="module")
def sound() -> Iterator[Path]:
    """A folder with all chunks, as a kill leaves it."""
    with tempfile.TemporaryDirectory() as name:
        tier = new_tier(Path(name) / "nvme")
        tier.open()
        tier.save_manifest((SPACE, OTHER))
        for where, header in CHUNKS.items():
            tier.write(where, header, PAYLOADS[header])
        tier._let_go()
        yield tier.folder


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Counter[str]]:
    """What became of the slots of all folders. A header that has the core allocate without end
    fails the test, not the machine."""
    counts: Counter[str] = Counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    yield counts
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert counts["folders"] < 100 or counts.keys() >= OUTCOMES, counts


def damage(rng: random.Random, folder: Path) -> None:
    """One change of the slab files, behind everybody's back."""
    paths = sorted(folder.glob("slab_*.kv"))
    if not paths:
        return
    path = rng.choice(paths)
    raw = bytearray(path.read_bytes())
    size = SMALL[0]
    slot = rng.randrange(max(1, len(raw) // size)) * size
    kind = rng.randrange(9)
    if kind == 0 and raw:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        raw[slot : slot + HEADER_BYTES] = sealed(rng, bytes(raw[slot : slot + HEADER_BYTES]))
    elif kind == 2:
        other = rng.choice(paths).read_bytes()
        begin = rng.randrange(max(1, len(other) // size)) * size
        nbytes = rng.choice((HEADER_BYTES, size))
        raw[slot : slot + nbytes] = other[begin : begin + nbytes]
    elif kind == 3:
        raw[slot:] = rng.randbytes(rng.choice((0, 1, 5000, len(raw) - slot)))
    elif kind == 4:
        del raw[rng.randrange(len(raw) + 1) :]
    elif kind == 5:
        raw = bytearray(mangle(rng, bytes(raw)))
    elif kind == 6:
        raw[slot : slot + size] = bytes(size)
    elif kind == 7:
        raw = bytearray(rng.randbytes(rng.choice((0, 100, SLAB_BYTES, 2 * SLAB_BYTES))))
    else:
        name = f"slab_{rng.randrange(4)}_{rng.choice((8192, 16_384, 8193, 1 << 40))}.kv"
        path = path.rename(folder / name)
    path.write_bytes(raw)


def sealed(rng: random.Random, block: bytes) -> bytes:
    """A header whose fields are mangled and whose checksum fits them."""
    body = bytearray(block.ljust(HEADER_BYTES, b"\0")[: HEADER_BYTES - 8])
    begin = rng.choice((16, 16, 24, 32, 40, 48, 80, 112, 144, 152, 156, 160, 164, 168, 172, 176))
    body[begin:200] = mangle(rng, bytes(body[begin:200])).ljust(200 - begin, b"\0")[: 200 - begin]
    return bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")


def slots_in_use(folder: Path) -> int:
    """Slots of the tier's files that hold anything, by their bytes alone."""
    used = 0
    for slab, file in slab_files(folder, SLAB_BYTES).current.items():
        raw = (folder / file.name()).read_bytes()[:SLAB_BYTES] if slab < SLABS else b""
        for index in range(SLAB_BYTES // file.slot_bytes):
            block = raw[index * file.slot_bytes :][:HEADER_BYTES]
            used += len(block) == HEADER_BYTES and not is_free(block)
    return used


def start(tier: NvmeTier) -> tuple[Service, list[ScannedSlot]]:
    """A core that has taken in what the tier's scan found."""
    limits = Limits(TierLimits(1, 1 << 20), TierLimits(SLABS, SLAB_BYTES))
    service = Service(limits, tier.load_manifest())
    found = scanned(tier)
    service.handle(Scanned(tuple(found)), 0.0)
    service.handle(ScanDone(TierName.NVME), 0.0)
    while service.next_tick_s(0.0) < SOON_S:
        service.handle(Tick(), 0.0)
    service.check_invariants()
    return service, found


def reads(tier: NvmeTier, where: Place, header: ChunkHeader) -> str:
    """Whether a place gives a chunk's bytes; other bytes never."""
    out = np.zeros(header.payload_bytes, np.uint8)
    try:
        tier.read(where, header, out)
    except ChunkCorruptError:
        return "not whole"
    known = PAYLOADS.get(header)
    assert known is None or np.array_equal(out, known)
    return "whole"


def check(folder: Path, repair: bool) -> FolderReport:
    """What a check says of the folder; each slot is counted once."""
    with FolderCheck(folder) as checked:
        report = checked.run(repair)
    useful = report.counts[Verdict.VALID] + report.counts[Verdict.EMPTY]
    assert report.erased == (report.counts.total() - useful if repair else 0)
    return report


@fuzz(EXAMPLES // 20)
def test_a_mutated_folder_gives_whole_chunks_or_none(
    sound: Path, outcomes: Counter[str], seed: int
) -> None:
    """What a start drops is counted, slot by slot; what it keeps is read as it was written, or is a
    miss; a check finds the same, and what it has repaired is whole."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "nvme"
        shutil.copytree(sound, folder)
        for _ in range(rng.choice((1, 2, 5, 20))):
            damage(rng, folder)
        before = check(folder, repair=False)
        used = slots_in_use(folder)
        outcomes["folders"] += 1
        judge_start(folder, used, outcomes)
        repaired = check(folder, repair=True)
        assert repaired.counts[Verdict.VALID] <= before.counts[Verdict.VALID]
        after = check(folder, repair=False)
        assert after.counts[Verdict.VALID] + after.counts[Verdict.EMPTY] == after.counts.total()
        tier = new_tier(folder)
        tier.open()
        try:
            service, found = start(tier)
            held = [slot for slot in found if slot.header is not None]
            assert len(held) == after.counts[Verdict.VALID]
            if {slot.header for slot in held} <= PAYLOADS.keys():
                assert service.stats(0.0).tiers[1].slots_used == len(held)
                assert all(reads(tier, slot.place, slot.header) == "whole" for slot in held)
        finally:
            tier.close()


def judge_start(folder: Path, used: int, outcomes: Counter[str]) -> None:
    """A daemon's start on the folder, and reads of all chunks at all places."""
    tier = new_tier(folder)
    tier.open()
    try:
        service, found = start(tier)
        stats = service.stats(0.0)
        adopted = stats.tiers[1].slots_used
        dropped = {drop.value: stats.drops.get(drop.value, 0) for drop in SCAN_DROPS}
        assert adopted + sum(dropped.values()) == used, (adopted, dropped, used)
        outcomes.update({"adopted": adopted} | {k: n for k, n in dropped.items() if n})
        for slot in found:
            fits = [h for h in PAYLOADS if HEADER_BYTES + h.payload_bytes <= slot.place.slot_bytes]
            outcomes.update(reads(tier, slot.place, header) for header in fits)
            if slot.header is not None and slot.header not in PAYLOADS:
                outcomes[reads(tier, slot.place, slot.header)] += 1
    finally:
        tier.close()


@fuzz(EXAMPLES // 40)
def test_a_folder_of_anything_is_refused_in_one_line_or_opened(seed: int) -> None:
    """Names and contents of all kinds, with a manifest or one that was mutated."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "nvme"
        tier = new_tier(folder)
        tier.open()
        tier.save_manifest((SPACE,))
        tier.close()
        for _ in range(rng.choice((1, 3, 8))):
            path = folder / rng.choice(
                ("slab_0_8192.kv", "slab_1_16384.kv", "slab_9_8192.kv", "spare_0.kv", "spare.part",
                 "slab_00_8192.kv", "\udcff.kv", manifest.FILE_NAME, manifest.TEMPORARY_NAME,
                 manifest.RESERVE_NAME, lock.FILE_NAME)
            )  # fmt: skip
            if not os.path.lexists(path) and rng.random() < 0.3:
                make_odd(path, rng.choice(KINDS), folder / "lock")
            elif path.is_file():
                path.write_bytes(rng.randbytes(rng.choice((0, 1, 4096, 8192, SLAB_BYTES))))
        tier = new_tier(folder)
        with only_lines(ConfigError, TierUnavailableError):
            check(folder, repair=rng.random() < 0.5)
        with only_lines(ConfigError, TierUnavailableError):
            tier.open()
            start(tier)
        tier.close()
