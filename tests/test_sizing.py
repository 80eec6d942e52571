"""Sizes fitted to the machine: sane by default, refused where they don't fit, kept over
restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import sizing
from kvstore.config import Settings, load
from kvstore.core.errors import ConfigError
from kvstore.machine import DiskFacts, MemoryFacts
from kvstore.sizing import Config, Machine, NvmeFolder, fit
from kvstore.tiers import manifest

MIB, GIB = 1 << 20, 1 << 30


def machine(
    limit: int = 16 * GIB,
    free: int = 100 * GIB,
    kind: str = "ext4",
    folder: Any = None,
    total: int = 0,
) -> Machine:
    memory = MemoryFacts(limit, limit, limit, "physical memory")
    disk = DiskFacts(total or 2 * free, free, kind, "/data")
    return Machine(memory, disk, folder or NvmeFolder(), 4)


def settings_of(folder: Path, **flags: str) -> Settings:
    return load({k.replace("__", "."): v for k, v in flags.items()}, {"HOME": str(folder)})


def fitted(folder: Path, facts: Machine, **flags: str) -> Config:
    return fit(settings_of(folder, **flags), facts)


def shortage(folder: Path, facts: Machine, **flags: str) -> str:
    config = fitted(folder, facts, **flags)
    return sizing.shortage(settings_of(folder, **flags), config.nvme, facts)


def refusal(folder: Path, facts: Machine, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        fitted(folder, facts, **flags)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("limit", [256 * MIB, GIB, 8 * GIB, 64 * GIB, 512 * GIB])
@pytest.mark.parametrize("free", [300 * MIB, 10 * GIB, 4 << 40])
def test_automatic_sizes_are_sane_on_every_machine(tmp_path: Path, limit: int, free: int) -> None:
    """20 % within bounds; slabs hold the whole and leave room for several models; all of it
    fits."""
    config = fitted(tmp_path, machine(limit, free))
    assert 64 * MIB <= config.host.size + MIB <= 64 * GIB + MIB
    assert config.host.size + sizing.OWN_BYTES <= limit
    assert config.host.slabs() >= 2
    assert (
        config.host.slabs() + config.host.staging_slots
    ) * config.host.slab_size == config.host.size
    assert MIB <= config.host.slab_size <= GIB
    assert 256 * MIB <= config.nvme.size <= 256 * GIB
    assert config.nvme.size <= free
    assert config.nvme.slabs() >= 4
    assert config.nvme.slabs() * config.nvme.slab_size + sizing.MANIFEST_BYTES <= config.nvme.size


def test_shares_are_of_what_the_machine_has(tmp_path: Path) -> None:
    """A percentage is of the memory limit, or of the disk's free space."""
    config = fitted(tmp_path, machine(8 * GIB, 100 * GIB), host__size="50%", nvme__size="10%")
    assert config.host.size == 4 * GIB
    assert config.nvme.size == 10 * GIB


@pytest.mark.parametrize("text", ["off", "0"])
def test_nvme_can_be_turned_off(tmp_path: Path, text: str) -> None:
    """No NVMe tier, and none is made by accident."""
    config = fitted(tmp_path, machine(), nvme__size=text)
    assert config.nvme.size == 0
    assert config.nvme.slabs() == 0


def test_host_memory_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """field case 90: with a limit of 8 GiB a pool of 10 GiB is refused at start, with limit,
    request and a suggestion that then works."""
    facts = machine(limit=8 * GIB)
    message = refusal(tmp_path, facts, host__size="10GiB")
    assert "host.size=10GiB (flag --host-size) doesn't fit" in message
    assert "the limit is 8 GiB" in message
    advice = message.rpartition("at most ")[2]
    assert fitted(tmp_path, facts, host__size=advice).host.size <= 8 * GIB


def test_everything_that_takes_memory_counts_against_the_limit(tmp_path: Path) -> None:
    """field case 90: host memory and an NVMe folder on a tmpfs fit one by one, but not together."""
    facts = machine(limit=8 * GIB, free=8 * GIB, kind="tmpfs")
    assert fitted(tmp_path, facts, host__size="5GiB", nvme__size="1GiB")
    message = refusal(tmp_path, facts, host__size="5GiB", nvme__size="4GiB")
    assert "+ nvme.size 4 GiB (nvme.path is in memory: tmpfs)" in message


def test_staging_is_part_of_host_size(tmp_path: Path) -> None:
    """field case 90: one arena, shared by all ranks, and no pool beside it."""
    config = fitted(tmp_path, machine(), host__size="1GiB", host__slab_size="64MiB")
    assert config.host.slabs() + config.host.staging_slots == 16


def test_nvme_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    """The request, what there is, and what would fit."""
    facts = machine(free=10 * GIB)
    message = refusal(tmp_path, facts, nvme__size="1TiB")
    assert "nvme.size=1TiB (flag --nvme-size) doesn't fit" in message
    assert "has 20 GiB, 10 GiB of it free" in message
    assert not shortage(tmp_path, facts, nvme__size=message.split("at most ")[1].split(",")[0])


def test_disk_that_filled_up_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    """It ran on this disk before something else took the room: the tier stops growing by itself,
    so its size is a warning and no refusal."""
    facts = machine(free=10 * GIB)
    config = fitted(tmp_path, facts, nvme__size="15GiB")
    assert config.nvme.size == 15 * GIB
    short = shortage(tmp_path, facts, nvme__size="15GiB")
    assert "only 10 GiB is free for nvme.size 15 GiB" in short


@pytest.mark.parametrize("free", [0, 100 * MIB, GIB])
def test_cache_on_a_full_disk_is_kept(tmp_path: Path, free: int) -> None:
    """field case 63: the tier has 10 GiB, another program takes the rest: automatic sizes go on
    with all slabs there are, and grow no further than the disk."""
    folder = NvmeFolder(slab_bytes=32 * MIB, slabs=320, used_bytes=10 * GIB - 5 * MIB)
    config = fitted(tmp_path, machine(free=free, folder=folder, total=12 * GIB))
    assert config.nvme.slabs() >= 320
    assert config.nvme.size <= max(320 * 32 * MIB + sizing.MANIFEST_BYTES, folder.used_bytes + free)


def test_small_cache_on_a_full_disk_is_kept(tmp_path: Path) -> None:
    """Less than the least size that is chosen for an empty folder."""
    folder = NvmeFolder(slab_bytes=8 * MIB, slabs=3, used_bytes=24 * MIB)
    assert fitted(tmp_path, machine(free=0, folder=folder, total=GIB)).nvme.slabs() == 3


def test_automatic_nvme_is_off_on_a_full_disk(tmp_path: Path) -> None:
    """A daemon without settings starts on a full disk too, without the tier, and says why; who
    switched it off knows."""
    facts = machine(free=100 * MIB)
    assert fitted(tmp_path, facts).nvme.size == 0
    short = shortage(tmp_path, facts)
    assert "no NVMe tier: only 100 MiB is free for" in short
    assert "(/data), and 256 MiB is the least" in short
    assert shortage(tmp_path, facts, nvme__size="off") == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"host__size": "2MiB", "host__slab_size": "1MiB"}, "host.size=2MiB .*at least 3MiB"),
        ({"host__slab_size": "1000"}, "host.slab_size=1000 .* multiple of 4KiB"),
        ({"nvme__slab_size": "5000000"}, "nvme.slab_size=5000000 .* multiple of 4KiB"),
        (
            {"nvme__size": "8MiB", "nvme__slab_size": "8MiB"},
            "nvme.size=8MiB .*at least 9MiB, or off",
        ),
    ],
)
def test_sizes_that_hold_nothing_are_refused(
    tmp_path: Path, flags: dict[str, str], message: str
) -> None:
    """Each with the least that works."""
    with pytest.raises(ConfigError, match=message):
        fitted(tmp_path, machine(), **flags)


def test_existing_folder_keeps_its_slab_size_and_its_slabs(tmp_path: Path) -> None:
    """A restart on another day, with less disk free, doesn't cut off what is cached."""
    folder = NvmeFolder(slab_bytes=32 * MIB, slabs=100, used_bytes=3200 * MIB)
    config = fitted(tmp_path, machine(free=4 * GIB, folder=folder))
    assert config.nvme.slab_size == 32 * MIB
    assert config.nvme.slabs() >= 100


def test_folder_is_looked_at_without_being_touched(tmp_path: Path) -> None:
    """A daemon may be using it, so even a half-written manifest beside the real one stays."""
    manifest.save(tmp_path, manifest.Manifest(MIB, clean=False))
    (tmp_path / "manifest.json.tmp").write_text("half")
    (tmp_path / "slab_7_8192.kv").write_bytes(bytes(8192))
    found = sizing.nvme_folder(tmp_path)
    assert (found.slab_bytes, found.slabs) == (MIB, 8)
    assert found.used_bytes > 0
    assert (tmp_path / "manifest.json.tmp").exists()
    assert sizing.nvme_folder(tmp_path / "none") == NvmeFolder()


@pytest.mark.parametrize("text", ["[" * 200_000, '{"slab_bytes": Infinity}', "", "null"])
def test_damaged_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    """The tier says what is wrong when it opens; sizing has nothing to say about it."""
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "slab_²_8192.kv").write_bytes(bytes(8192))
    assert sizing.nvme_folder(tmp_path).slab_bytes == 0


@pytest.mark.parametrize("name", ["slab_999999999_8192.kv", "slab_9999999999_8192.kv"])
def test_one_name_does_not_turn_the_tier_off(tmp_path: Path, name: str) -> None:
    """A file is called like a slab far beyond any disk: the daemon removes it or leaves it alone,
    and the tier has its automatic size."""
    manifest.save(tmp_path, manifest.Manifest(MIB, clean=False))
    (tmp_path / name).write_bytes(bytes(8192))
    folder = sizing.nvme_folder(tmp_path)
    assert 20 * GIB <= fitted(tmp_path, machine(folder=folder)).nvme.size < 21 * GIB
