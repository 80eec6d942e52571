"""``kvstore verify``: an NVMe folder without its daemon, slot by slot."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.core.errors import ChunkCorruptError, ConfigError, TierUnavailableError
from kvstore.core.messages import ChunkHeader, Place, SpaceRecord, TierName
from kvstore.testing.samples import pattern, sample_header
from kvstore.tiers import manifest
from kvstore.tiers.nvme import NvmeTier
from kvstore.verify import FolderCheck, FolderReport, Verdict
from tests.conftest import private_environment, run_kvstore
from tests.nvme_bench import KINDS, make_odd, remove_odd

PAYLOAD_BYTES = 8192
SLOT_BYTES = 4096 + PAYLOAD_BYTES
SLAB_BYTES = 4 * SLOT_BYTES
SPACE = SpaceRecord("tenant", bytes(range(32)), "model", "", 1)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    """An open tier of two slabs of four slots, which knows one namespace at epoch 1."""
    tier = NvmeTier(tmp_path / "nvme", slabs=2, slab_bytes=SLAB_BYTES)
    tier.open()
    tier.save_manifest((SPACE,))
    yield tier
    tier.close()


def place(slot: int) -> Place:
    return Place(TierName.NVME, slot // 4, slot % 4, SLOT_BYTES)


def put(tier: NvmeTier, slot: int, header: ChunkHeader) -> ChunkHeader:
    tier.write(place(slot), header, pattern(header.sequence, PAYLOAD_BYTES))
    return header


def root(seed: int) -> ChunkHeader:
    return sample_header(seed, PAYLOAD_BYTES)


def below(parent: ChunkHeader, seed: int) -> ChunkHeader:
    return replace(root(seed), parent=parent.key, depth=parent.depth + 1)


def flip(folder: Path, slot: int, offset: int) -> None:
    """Turn one bit over in a slot."""
    with open(folder / f"slab_{slot // 4}_{SLOT_BYTES}.kv", "r+b") as file:
        at = slot % 4 * SLOT_BYTES + offset
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def check(tier: NvmeTier, repair: bool = False) -> FolderReport:
    tier.close()
    with FolderCheck(tier.folder) as checked:
        return checked.run(repair)


def counts(report: FolderReport) -> dict[str, int]:
    return {verdict.value: count for verdict, count in report.counts.items() if count}


def test_whole_chain_is_valid_and_the_rest_is_empty(tier: NvmeTier) -> None:
    """Three chunks in a chain in one slab; its fourth slot was never written."""
    first = put(tier, 0, root(1))
    second = put(tier, 1, below(first, 2))
    put(tier, 2, below(second, 3))
    report = check(tier)
    assert counts(report) == {"valid": 3, "empty": 1}
    assert report.clean
    assert report.read_bytes >= 3 * SLOT_BYTES


def test_each_kind_of_damage_has_its_count(tier: NvmeTier) -> None:
    """A flipped bit in a header, one in a payload, an erased slot."""
    for slot in range(4):
        put(tier, slot, root(slot + 1))
    flip(tier.folder, 1, 100)
    flip(tier.folder, 2, 4096 + 5000)
    tier.erase(place(3))
    assert counts(check(tier)) == {"valid": 1, "corrupt": 1, "torn": 1, "empty": 1}


def test_slot_cut_off_by_the_files_end_is_torn(tier: NvmeTier) -> None:
    """A crash while the file grew."""
    for slot in range(4):
        put(tier, slot, root(slot + 1))
    with open(tier.folder / f"slab_0_{SLOT_BYTES}.kv", "r+b") as file:
        file.truncate(3 * SLOT_BYTES + 5000)
    assert counts(check(tier)) == {"valid": 3, "torn": 1}


def test_cleared_and_unknown_namespaces_are_old_epochs(tier: NvmeTier) -> None:
    """What a clear left behind, and what the manifest never heard of."""
    put(tier, 0, root(1))
    put(tier, 1, replace(root(2), epoch=0))
    put(tier, 2, replace(root(3), namespace=bytes(32)))
    put(tier, 3, replace(root(4), tenant="another"))
    assert counts(check(tier)) == {"valid": 1, "old_epoch": 3}


def test_chunks_without_their_chain_are_orphans(tier: NvmeTier) -> None:
    """A gap orphans everything below it; an incomplete family of shards is a gap."""
    first = put(tier, 0, root(1))
    gap = below(first, 2)
    put(tier, 1, below(gap, 3))
    half = put(tier, 2, replace(root(4), shards=2))
    put(tier, 3, replace(below(half, 5), shards=1))
    assert counts(check(tier)) == {"valid": 1, "orphan": 3}


def test_chunk_written_again_elsewhere_counts_once(tier: NvmeTier) -> None:
    """The later sequence is the chunk, the earlier a duplicate."""
    first = put(tier, 0, root(1))
    later = replace(first, sequence=9)
    tier.write(place(1), later, pattern(1, PAYLOAD_BYTES))
    assert counts(check(tier, repair=True)) == {"valid": 1, "duplicate": 1, "empty": 2}
    tier.open()
    tier.read(place(1), later, pattern(0, PAYLOAD_BYTES))
    with pytest.raises(ChunkCorruptError):
        tier.read(place(0), first, pattern(0, PAYLOAD_BYTES))


def test_without_repair_nothing_changes(tier: NvmeTier) -> None:
    """A check is a check: every file has the bytes that it had, and an unclean mark stays."""
    put(tier, 0, root(1))
    put(tier, 1, below(below(root(1), 7), 3))
    flip(tier.folder, 0, 5000)
    tier.close()
    before = {path.name: path.read_bytes() for path in tier.folder.glob("[!l]*")}
    with FolderCheck(tier.folder) as checked:
        checked.run(repair=False)
    assert {path.name: path.read_bytes() for path in tier.folder.glob("[!l]*")} == before


def test_repair_erases_what_a_daemon_would_drop(tier: NvmeTier) -> None:
    """Afterwards only valid and empty slots are left, and a tier finds the valid ones."""
    kept = put(tier, 0, root(1))
    put(tier, 1, below(below(kept, 7), 3))
    put(tier, 2, root(4))
    flip(tier.folder, 2, 200)
    put(tier, 3, replace(root(5), epoch=0))
    assert check(tier, repair=True).erased == 3
    assert counts(check(tier)) == {"valid": 1, "empty": 3}
    tier.open()
    out = pattern(0, PAYLOAD_BYTES)
    tier.read(place(0), kept, out)
    assert bytes(out) == bytes(pattern(1, PAYLOAD_BYTES))


@pytest.mark.parametrize(
    "name",
    ["slab_0_x.kv", "slab_3_0.kv", f"slab_3_{1 << 50}.kv", "slab_3_4096_9.kv", "slab_²_8192.kv",
     "slab_01_8192.kv", "slab_3_8193.kv"],
)  # fmt: skip
def test_names_that_are_no_slabs_are_left_out(tier: NvmeTier, name: str) -> None:
    """As a daemon leaves them alone; the report names them."""
    put(tier, 0, root(1))
    (tier.folder / name).write_bytes(b"x" * 9000)
    report = check(tier, repair=True)
    assert counts(report) == {"valid": 1, "empty": 3}
    assert report.ignored == [name]
    assert (tier.folder / name).read_bytes() == b"x" * 9000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_left_out(tier: NvmeTier, tmp_path: Path, kind: str) -> None:
    """A folder, a pipe or a link with a slab's name: nothing hangs and nothing is followed."""
    put(tier, 0, root(1))
    (tmp_path / "elsewhere").write_bytes(b"x" * SLAB_BYTES)
    make_odd(tier.folder / "slab_1_8192.kv", kind, tmp_path / "elsewhere")
    report = check(tier)
    assert counts(report) == {"valid": 1, "empty": 3}
    assert report.ignored == ["slab_1_8192.kv"]


def test_of_two_files_of_a_slab_the_newer_counts(tier: NvmeTier) -> None:
    """A daemon would remove the other."""
    put(tier, 0, root(1))
    other = tier.folder / "slab_0_8192.kv"
    other.write_bytes(bytes(SLAB_BYTES))
    os.utime(other, (1, 1))
    report = check(tier)
    assert counts(report) == {"valid": 1, "empty": 3}
    assert report.ignored == [other.name]


def test_slots_beyond_the_files_end_are_not_walked(tier: NvmeTier) -> None:
    """The manifest says that a slab has a terabyte, its file has one chunk: the slots that aren't
    there are empty, all at once."""
    put(tier, 0, root(1))
    tier.close()
    found = manifest.load(tier.folder)
    assert found is not None
    manifest.save(tier.folder, replace(found, slab_bytes=1 << 40))
    with FolderCheck(tier.folder) as checked:
        report = checked.run(repair=False)
    assert counts(report) == {"valid": 1, "empty": (1 << 40) // SLOT_BYTES - 1}
    assert report.read_bytes < SLAB_BYTES


@pytest.mark.parametrize("name", ["manifest.json", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifest_or_lock_that_is_no_file_is_refused(
    tier: NvmeTier, tmp_path: Path, name: str, kind: str
) -> None:
    """One line, and no lock stays behind."""
    tier.close()
    content = (tier.folder / name).read_bytes()
    (tier.folder / name).unlink()
    make_odd(tier.folder / name, kind, tmp_path)
    with pytest.raises(TierUnavailableError, match=f"can't be checked: {name}: "):
        FolderCheck(tier.folder).__enter__()
    remove_odd(tier.folder / name)
    (tier.folder / name).write_bytes(content)
    with FolderCheck(tier.folder):
        pass


def test_read_only_file_system_is_checked(tmp_path: Path) -> None:
    """A disk that was mounted read-only after an error: what is on it can still be told, and only
    a repair is refused."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        tier = NvmeTier(tmp_path / "nvme", slabs=2, slab_bytes=SLAB_BYTES)
        tier.open()
        tier.save_manifest((SPACE,))
        put(tier, 0, root(1))
        put(tier, 1, root(2))
        flip(tier.folder, 1, 100)
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert counts(check(tier)) == {"valid": 1, "corrupt": 1, "empty": 2}
        with pytest.raises(OSError, match="Read-only"):
            check(tier, repair=True)
        with pytest.raises(TierUnavailableError, match=r"can't be opened: .*Read-only"):
            tier.open()
        with FolderCheck(tier.folder):
            pass
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_folder_in_use_is_refused(tier: NvmeTier) -> None:
    """The one line names folder, process and how to go on."""
    with pytest.raises(TierUnavailableError, match=r"is in use by process \d+.*kvstore stats"):
        FolderCheck(tier.folder).__enter__()


def test_folder_that_no_daemon_used_is_refused(tmp_path: Path) -> None:
    """And nothing is made in it."""
    with pytest.raises(ConfigError, match="holds no manifest"):
        FolderCheck(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_command_reports_and_exits_by_what_it_found(tier: NvmeTier, private_folder: Path) -> None:
    """0 where all is sound, 1 where bytes are damaged, 0 again once they are repaired."""
    put(tier, 0, root(1))
    put(tier, 1, root(2))
    tier.close()
    environment = private_environment(private_folder, {"KVSTORE_NVME_PATH": str(tier.folder)})
    done = run_kvstore(environment, "verify")
    assert done.returncode == 0, done.stderr
    assert "2  valid" in done.stdout
    assert "the last daemon ended cleanly" in done.stdout
    flip(tier.folder, 1, 4096)
    done = run_kvstore(environment, "verify", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["ok"], report["valid"], report["torn"], report["empty"]) == (False, 1, 1, 2)
    assert report["slots"] == 4
    assert run_kvstore(environment, "verify", "--repair").returncode == 0
    assert run_kvstore(environment, "verify").returncode == 0


def test_every_verdict_is_explained() -> None:
    """A word in a report that isn't explained is noise."""
    assert all(verdict.meaning() for verdict in Verdict)
