"""Machine: what this machine gives the process (memory limit, disk, limits of the kernel), as
facts.

No policy: what is made of these facts is decided in config and doctor. Everything is read below
``root``, which a test points at a folder of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of the machine and what this process may have of it, in bytes.

    ``limit_bytes`` is the smallest of physical memory and the limits of the process's cgroup and
    its parents; ``limit_source`` names where it comes from.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int
    limit_source: str


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The file system that holds (or will hold) a path. ``kind`` is its type, such as ``ext4``."""

    total_bytes: int
    free_bytes: int
    kind: str
    mount: str

    def in_memory(self) -> bool:
        """Whether what is written there takes memory."""
        return self.kind in ("tmpfs", "ramfs")


def memory_facts(root: Path = ROOT) -> MemoryFacts:
    """Memory and its limit, from /proc/meminfo and cgroup v1 or v2, whichever is mounted."""
    meminfo = _meminfo(root)
    total = meminfo.get("MemTotal", 0)
    limit, source = total, "physical memory"
    for path, value in _cgroup_limits(root):
        if value < limit:
            limit, source = value, f"cgroup limit {path}"
    available = meminfo.get("MemAvailable", total)
    return MemoryFacts(total, min(available, limit), limit, source)


def disk_facts(path: Path, root: Path = ROOT) -> DiskFacts:
    """Space of the file system of ``path``, or of its nearest parent that exists."""
    existing = nearest_existing(path)
    space = os.statvfs(existing)
    mount, kind = _mount_of(existing.resolve(), root)
    return DiskFacts(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize, kind, mount)


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists and may be looked at."""
    for candidate in (path, *path.parents):
        if os.path.exists(candidate):
            return candidate
    return ROOT


def folder_bytes(path: Path) -> int:
    """Bytes that the files directly inside a folder occupy on disk; 0 where there is no folder."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return total
    return total


def resident_bytes(root: Path = ROOT) -> int:
    """Resident memory of this process."""
    text = _read(root / "proc/self/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def open_files(root: Path = ROOT) -> int:
    """Descriptors that this process has open."""
    try:
        return len(os.listdir(root / "proc/self/fd"))
    except OSError:
        return 0


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    facts: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * (1024 if len(words) > 1 else 1)
    return facts


def _cgroup_limits(root: Path) -> list[tuple[str, int]]:
    """(file, bytes) of each memory limit on the way from the process's cgroup to the root.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist below the
    mount: then the nearest parent that does exist counts, and the mount's root in any case.
    """
    limits: list[tuple[str, int]] = []
    mounts: tuple[str, ...]
    names: tuple[str, ...]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
            names = ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            mounts, names = ("sys/fs/cgroup/memory",), ("memory.limit_in_bytes",)
        else:
            continue
        for mount in mounts:
            limits += _limits_upward(root / mount, path, names)
    return limits


def _limits_upward(mount: Path, path: str, names: tuple[str, ...]) -> list[tuple[str, int]]:
    limits: list[tuple[str, int]] = []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        for name in names:
            file = mount.joinpath(*parts[:depth]) / name
            text = _read(file).strip()
            if text.isdigit():
                limits.append((str(file), int(text)))
    return limits


def _mount_of(path: Path, root: Path) -> tuple[str, str]:
    """(mount point, file system type) of the mount that holds a path; the latest mount wins."""
    best, kind = "", "unknown"
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = fields[4].encode().decode("unicode_escape")
        inside = point == "/" or path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return best or "/", kind


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
