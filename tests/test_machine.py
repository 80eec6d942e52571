"""Facts of the machine, read below folders that a test makes: cgroups, memory, file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import load
from kvstore.core.errors import ConfigError
from kvstore.machine import (
    disk_facts,
    folder_bytes,
    memory_facts,
    nearest_existing,
    open_files,
    resident_bytes,
)
from kvstore.sizing import fit, look

MIB, GIB = 1 << 20, 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def memory(total: int, available: int) -> dict[str, str]:
    text = (
        f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"
    )
    return {"proc/meminfo": text}


def test_without_cgroups_physical_memory_is_the_limit(tmp_path: Path) -> None:
    """A plain machine."""
    facts = memory_facts(write(tmp_path, memory(32 * GIB, 20 * GIB)))
    assert (facts.limit_bytes, facts.available_bytes) == (32 * GIB, 20 * GIB)
    assert facts.limit_source == "physical memory"


def test_cgroup_v2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    """field case 90: the process's own cgroup has no limit, its parent's has."""
    root = write(
        tmp_path,
        memory(64 * GIB, 50 * GIB)
        | {
            "proc/self/cgroup": "0::/pods/pod1/engine\n",
            "sys/fs/cgroup/pods/pod1/engine/memory.max": "max\n",
            "sys/fs/cgroup/pods/pod1/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pods/memory.max": f"{32 * GIB}\n",
        },
    )
    facts = memory_facts(root)
    assert facts.limit_bytes == 8 * GIB
    assert facts.available_bytes == 8 * GIB
    assert facts.limit_source.endswith("pods/pod1/memory.max")


def test_cgroup_v2_counts_the_throttling_limit_too(tmp_path: Path) -> None:
    """Beyond memory.high the kernel slows a process to a crawl."""
    root = write(
        tmp_path,
        memory(64 * GIB, 50 * GIB)
        | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.high": f"{4 * GIB}\n"},
    )
    assert memory_facts(root).limit_bytes == 4 * GIB


def test_inside_a_container_the_hosts_path_need_not_exist(tmp_path: Path) -> None:
    """/proc/self/cgroup names the host's path, and only the mount's root is there."""
    root = write(
        tmp_path,
        memory(64 * GIB, 50 * GIB)
        | {
            "proc/self/cgroup": "0::/../../kubepods/burstable/pod9/abc\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        },
    )
    assert memory_facts(root).limit_bytes == 2 * GIB


def test_cgroup_v1_limit_counts_and_its_unlimited_value_doesnt(tmp_path: Path) -> None:
    """v1 writes "no limit" as 2^63 rounded down to a page."""
    files = memory(64 * GIB, 50 * GIB) | {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = write(tmp_path, files)
    assert memory_facts(root).limit_bytes == 6 * GIB
    (root / "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes").write_text(
        "9223372036854771712"
    )
    assert memory_facts(root).limit_source == "physical memory"


def test_daemon_in_a_small_cgroup_refuses_a_larger_pool(tmp_path: Path) -> None:
    """field case 90: cgroup v2 limit 8 GiB, pool 10 GiB: the start is refused with limit, request
    and suggestion; without a size the default follows the cgroup, not the machine."""
    root = write(
        tmp_path,
        memory(256 * GIB, 200 * GIB)
        | {"proc/self/cgroup": "0::/kv\n", "sys/fs/cgroup/kv/memory.max": f"{8 * GIB}\n"},
    )
    home = {"HOME": str(tmp_path)}
    automatic = load({"nvme.size": "off"}, home)
    assert fit(automatic, look(automatic, root)).host.size <= 8 * GIB // 5
    settings = load({"host.size": "10GiB", "nvme.size": "off"}, home)
    with pytest.raises(ConfigError) as caught:
        fit(settings, look(settings, root))
    message = str(caught.value)
    for part in ("host.size=10GiB", "limit is 8 GiB", "cgroup limit", "set host.size to at most"):
        assert part in message
    assert "\n" not in message


def test_file_system_of_a_path_that_isnt_there_yet(tmp_path: Path) -> None:
    """The nearest parent that exists decides; the longest mount point wins."""
    root = write(
        tmp_path / "root",
        {
            "proc/self/mountinfo": (
                "1 0 8:1 / / rw - ext4 /dev/a rw\n"
                f"2 1 0:5 / {tmp_path} rw shared:1 - tmpfs tmpfs rw\n"
                f"3 1 0:6 / {tmp_path}x rw - xfs /dev/b rw\n"
            )
        },
    )
    facts = disk_facts(tmp_path / "not" / "there", root)
    assert (facts.kind, facts.mount) == ("tmpfs", str(tmp_path))
    assert facts.in_memory()
    assert facts.free_bytes > 0
    assert nearest_existing(tmp_path / "not" / "there") == tmp_path


def test_mount_points_with_spaces_are_understood(tmp_path: Path) -> None:
    """The kernel writes a space as \\040."""
    place = tmp_path / "my disk"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    root = write(tmp_path / "root", {"proc/self/mountinfo": f"1 0 8:1 / {escaped} rw - xfs a rw\n"})
    assert disk_facts(place, root).kind == "xfs"


def test_folder_bytes_count_what_is_on_disk(tmp_path: Path) -> None:
    """Blocks, not lengths: a hole takes no room; a folder that isn't there takes none."""
    (tmp_path / "full").write_bytes(b"x" * 100_000)
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 30)
    assert 100_000 <= folder_bytes(tmp_path) < 1 << 20
    assert folder_bytes(tmp_path / "none") == 0


def test_facts_of_this_process() -> None:
    """Resident memory and descriptors, as the kernel counts them."""
    assert resident_bytes() > 1 << 20
    before = open_files()
    read, written = os.pipe()
    try:
        assert open_files() == before + 2
    finally:
        os.close(read)
        os.close(written)


def test_an_empty_machine_is_no_reason_to_crash(tmp_path: Path) -> None:
    """Without /proc there is nothing to know, and nothing raises."""
    assert memory_facts(tmp_path).limit_bytes == 0
    assert resident_bytes(tmp_path) == 0
    assert open_files(tmp_path) == 0
