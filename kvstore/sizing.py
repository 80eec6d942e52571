"""Sizing: settings fitted to the machine give the Config that the daemon is built from.

Defaults: host memory 20 % of what this process may use (64 MiB to 64 GiB), NVMe 20 % of the disk
that is free for it (256 MiB to 256 GiB). Host memory, the daemon's own needs and a file system in
memory count against one limit: the sum is refused at start, never found out by the out-of-memory
killer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import Settings
from kvstore.core.errors import ConfigError
from kvstore.machine import ROOT, DiskFacts, MemoryFacts, disk_facts, folder_bytes, memory_facts
from kvstore.sizing_redis import RedisConfig, fit_redis
from kvstore.tiers import manifest
from kvstore.tiers.slab_files import slab_files
from kvstore.units import format_exact_size, format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OWN_BYTES = 160 * MIB
"""Beside the arena: 120 MiB that an idle daemon may take, and room for its index."""
REDIS_BYTES = 64 * MIB
"""More of it beside Redis: redis-py, its connections, and what eight threads pack and unpack."""
SLAB_BYTES_MIN = 1 * MIB
HOST_SHARE, HOST_MIN, HOST_MAX = 0.20, 64 * MIB, 64 * GIB
NVME_SHARE, NVME_MIN, NVME_MAX = 0.20, 256 * MIB, 256 * GIB
MANIFEST_BYTES = 1 * MIB
"""Room for the NVMe tier's manifest within its limit."""
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NvmeFolder:
    """What is in the NVMe folder already: the slab size of its manifest (0: none), one more than
    its highest slab's number, and the bytes that its files occupy."""

    slab_bytes: int = 0
    slabs: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """``address`` is ``unix:/path`` or a loopback ``host:port``."""

    address: str


@dataclass(frozen=True, slots=True)
class HostConfig:
    """``size`` bytes in all, of which ``staging_slots`` slabs receive reads from below."""

    size: int
    slab_size: int
    huge_pages: str
    staging_slots: int

    def slabs(self) -> int:
        """Slabs that hold chunks."""
        return self.size // self.slab_size - self.staging_slots


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """``size`` 0: no NVMe tier. ``direct_io`` is auto, on or off; ``prewrite`` is bytes that are
    written ahead, ``write_budget`` bytes a second."""

    size: int
    path: Path
    slab_size: int
    direct_io: str
    prewrite: int
    write_budget: int
    admit_after: int

    def slabs(self) -> int:
        """Slab files within the limit, the manifest's room taken off."""
        return max(0, self.size - MANIFEST_BYTES) // self.slab_size if self.size else 0


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """``bytes_max`` of stores may be in flight per session; ``partial`` is serve or miss."""

    bytes_max: int
    partial: str


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """``quota``: (tenant, share of each local tier); the tenant ``*`` is every other one."""

    quota: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class ThreadsConfig:
    """Worker threads of the mover."""

    copy: int
    read: int
    write: int


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``level`` is debug, info, warning or error."""

    level: str


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the daemon is built from; only the composition root sees it."""

    socket: Path
    admin: AdminConfig
    host: HostConfig
    nvme: NvmeConfig
    redis: RedisConfig
    eviction: str
    tenants: TenantsConfig
    lease_s: float
    session: SessionConfig
    threads: ThreadsConfig
    log: LogConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that sizing needs."""

    memory: MemoryFacts
    disk: DiskFacts
    folder: NvmeFolder
    cores: int


def fit(settings: Settings, machine: Machine) -> Config:
    """The Config of these settings on this machine. Raises ConfigError where they don't fit."""
    redis = fit_redis(settings)
    host = _fit_host(settings, machine.memory, redis)
    nvme = _fit_nvme(settings, machine, host.slab_size)
    own = OWN_BYTES + (REDIS_BYTES if redis.url else 0)
    _check_memory(settings, machine, host, nvme, own)
    return Config(
        socket=settings.socket(),
        admin=AdminConfig(settings.admin_address()),
        host=host,
        nvme=nvme,
        redis=redis,
        eviction=settings.text("eviction"),
        tenants=TenantsConfig(settings.shares("tenants.quota")),
        lease_s=settings.seconds("lease_s"),
        session=SessionConfig(
            settings.integer("session.bytes_max"), settings.text("session.partial")
        ),
        threads=ThreadsConfig(
            copy=settings.integer("threads.copy") or _copy_threads(machine.cores),
            read=settings.integer("threads.read") or 6,
            write=settings.integer("threads.write") or 6,
        ),
        log=LogConfig(settings.text("log.level")),
    )


def look(settings: Settings, root: Path = ROOT) -> Machine:
    """The facts of this machine that these settings need."""
    path = settings.nvme_path()
    return Machine(memory_facts(root), disk_facts(path, root), nvme_folder(path), cores())


def shortage(settings: Settings, nvme: NvmeConfig, machine: Machine) -> str:
    """A warning, in one line, where the disk has less room than the NVMe tier may take, or none for
    a tier at all; else empty. A tier stops growing by itself, and goes on when there is room."""
    room = machine.disk.free_bytes + machine.folder.used_bytes
    if not nvme.size and settings.amount("nvme.size").automatic():
        return (
            f"no NVMe tier: only {format_size(room)} is free for {nvme.path} "
            f"({machine.disk.mount}), and {format_size(NVME_MIN)} is the least; free some space, "
            "or set nvme.path to another disk, or nvme.size to off or a size"
        )
    if nvme.size <= room:
        return ""
    return (
        f"only {format_size(room)} is free for nvme.size {format_size(nvme.size)} on "
        f"{machine.disk.mount}: the NVMe tier won't grow beyond that; free some space, or make "
        "nvme.size smaller"
    )


def nvme_folder(path: Path) -> NvmeFolder:
    """What an NVMe folder holds, read without touching it: a daemon may be using it. A manifest
    that can't be read counts as none here; the tier says what is wrong when it opens."""
    slab_bytes = slabs = 0
    with suppress(OSError, ConfigError):
        found = manifest.load(path)
        slab_bytes = found.slab_bytes if found is not None else 0
        slabs = max(slab_files(path, slab_bytes).current, default=-1) + 1
    return NvmeFolder(slab_bytes, slabs, folder_bytes(path))


def cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _fit_host(settings: Settings, memory: MemoryFacts, redis: RedisConfig) -> HostConfig:
    given = settings.amount("host.size")
    automatic = _clamp(int(HOST_SHARE * memory.limit_bytes), HOST_MIN, HOST_MAX)
    size = given.resolve(memory.limit_bytes, automatic)
    slab = _host_slab(settings, size)
    size -= size % slab
    staging = _staging_slots(size // slab, bool(redis.url))
    if size // slab < staging + 1:
        raise ConfigError(
            f"{settings.given('host.size')} is too small: it holds {size // slab} slabs of "
            f"{format_exact_size(slab)} and {staging + 1} are needed; "
            f"set host.size to at least {format_exact_size(slab * (staging + 1))}"
        )
    return HostConfig(size, slab, settings.text("host.huge_pages"), staging)


def _staging_slots(slabs: int, redis: bool) -> int:
    """Slabs of the host that receive reads when no slot of it can: a few for NVMe, half as many
    more beside Redis, so that reads of both are under way however full the host is."""
    nvme = 4 if slabs >= 32 else 2
    return nvme + (nvme // 2 if redis else 0)


def _host_slab(settings: Settings, size: int) -> int:
    """A slab holds slots of one size, so it must be large enough for one chunk of a large model
    and small enough that several models each get some: an eighth of a small arena up to 64 MiB, a
    16th up to 256 MiB, a 64th of a large one."""
    automatic = max(min(64 * MIB, size // 8), min(256 * MIB, size // 16), min(GIB, size // 64))
    return _slab(settings, "host.slab_size", size, automatic)


def _slab(settings: Settings, key: str, whole: int, automatic: int) -> int:
    given = settings.amount(key)
    slab = given.resolve(whole, max(SLAB_BYTES_MIN, _power_of_two(automatic)))
    if not SLAB_BYTES_MIN <= slab <= manifest.SLAB_BYTES_MAX or slab % PAGE_BYTES:
        raise ConfigError(
            f"{settings.given(key)} is refused; valid: auto, or a multiple of 4KiB from 1MiB to "
            "1TiB"
        )
    return slab


def _fit_nvme(settings: Settings, machine: Machine, host_slab: int) -> NvmeConfig:
    size = _nvme_size(settings, machine)
    slab = _nvme_slab(settings, machine.folder, size, host_slab) if size else SLAB_BYTES_MIN
    nvme = NvmeConfig(
        size=size,
        path=settings.nvme_path(),
        slab_size=slab,
        direct_io=settings.text("nvme.direct_io"),
        prewrite=settings.amount("nvme.prewrite").resolve(size, min(GIB, size // 8)),
        write_budget=settings.integer("nvme.write_budget"),
        admit_after=settings.integer("nvme.admit_after"),
    )
    if size and nvme.slabs() < 1:
        kept = slab == machine.folder.slab_bytes
        why = (
            "; the folder was made with that slab size, empty it to choose another" if kept else ""
        )
        raise ConfigError(
            f"{settings.given('nvme.size')} holds no slab of {format_exact_size(slab)}; "
            f"set nvme.size to at least {format_exact_size(slab + MANIFEST_BYTES)}, or off{why}"
        )
    return nvme


def _nvme_size(settings: Settings, machine: Machine) -> int:
    """Bytes of the tier. What the folder holds already counts as free. Auto never cuts off a slab
    that is in use, however full the disk is, and is off where an empty folder has too little; only
    what the disk could never hold is refused, as a disk that others fill mustn't stop a daemon."""
    given, folder, disk = settings.amount("nvme.size"), machine.folder, machine.disk
    room = disk.free_bytes + folder.used_bytes
    held = folder.slabs * folder.slab_bytes + MANIFEST_BYTES if folder.slabs else 0
    held = held if held <= disk.total_bytes else 0
    automatic = max(held, _clamp(int(NVME_SHARE * room), NVME_MIN, NVME_MAX))
    size = given.resolve(room, automatic if automatic <= room else held)
    if size > disk.total_bytes:
        raise ConfigError(
            f"{settings.given('nvme.size')} doesn't fit: the file system of {settings.nvme_path()} "
            f"({disk.mount}) has {format_size(disk.total_bytes)}, {format_size(room)} of it free "
            f"for the tier; set nvme.size to at most {_suggest(room * 0.9)}, or nvme.path to a "
            "larger disk"
        )
    return size


def _nvme_slab(settings: Settings, folder: NvmeFolder, size: int, host_slab: int) -> int:
    """The folder's own slab size where it has one; else a 16th, up to 256 MiB, and twice a host
    slab where that leaves four of them, so that every chunk that fits the host fits here too."""
    if folder.slab_bytes and settings.amount("nvme.slab_size").automatic():
        return folder.slab_bytes
    usable = max(0, size - MANIFEST_BYTES)
    automatic = min(256 * MIB, usable // 16)
    if 2 * host_slab <= usable // 4:
        automatic = max(automatic, 2 * host_slab)
    return _slab(settings, "nvme.slab_size", size, automatic)


def _check_memory(
    settings: Settings, machine: Machine, host: HostConfig, nvme: NvmeConfig, own_bytes: int
) -> None:
    limit = machine.memory.limit_bytes
    on_disk = nvme.size if machine.disk.in_memory() else 0
    needed = host.size + own_bytes + on_disk
    if needed <= limit:
        return
    parts = f"host.size {format_size(host.size)} + the daemon's own {format_size(own_bytes)}"
    advice = f"set host.size to at most {_suggest(max(0, limit - own_bytes - on_disk) * 0.8)}"
    if on_disk:
        parts += (
            f" + nvme.size {format_size(on_disk)} (nvme.path is in memory: {machine.disk.kind})"
        )
        advice = "make host.size or nvme.size smaller, or set nvme.path to a disk"
    raise ConfigError(
        f"{settings.given('host.size')} doesn't fit: {parts} = {format_size(needed)}, "
        f"and the limit is {format_size(limit)} ({machine.memory.limit_source}); {advice}"
    )


def _copy_threads(cores: int) -> int:
    """Two fill a memory channel that one doesn't; more help on large machines only."""
    return max(min(2, cores), min(8, cores // 2))


def _suggest(nbytes: float) -> str:
    """A round size not above ``nbytes``, to be given as a setting."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= factor:
            return f"{int(nbytes // factor)}{unit}"
    return "0"


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


def _power_of_two(value: int) -> int:
    """The largest power of two not above ``value``, at least 1."""
    return 1 << max(0, value.bit_length() - 1)
