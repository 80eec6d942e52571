"""Doctor: checks of this machine, each one line with what to do about it (``kvstore doctor``).

It changes nothing: what it creates to try something is gone when the check ends. ``skip`` says why
a check doesn't apply; only ``fail`` makes the command fail.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import platform
import resource
import stat
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvstore import sizing
from kvstore.config import Settings
from kvstore.core.errors import KVStoreError
from kvstore.device.rows import COMPILED
from kvstore.doctor_findings import Finding, Status, show
from kvstore.machine import disk_facts, memory_facts, nearest_existing
from kvstore.sizing_redis import fit_redis, redis_settings
from kvstore.units import format_size

PYTHON_MIN = 0x030B0000
KERNEL_MIN = (5, 14)
"""MADV_POPULATE_WRITE: without it the arena can't be touched while it is in use."""
OPEN_FILES_MIN = 4096
PAGE_BYTES = 4096
EXTRAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("transformers", ("torch", "transformers", "safetensors")),
    ("vllm", ("vllm",)),
    ("redis", ("redis", "hiredis")),
)
REQUIRED = ("numpy", "protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection", "xxhash")


Check = Callable[[Settings], Finding]


def run(settings: Settings, namespace: argparse.Namespace) -> int:
    """Run every check and print it; 1 if one failed. With ``--redis`` the servers' alone."""
    if namespace.redis is not None:
        return show(_redis(settings), namespace.json)
    findings = [_checked(check, settings) for check in CHECKS]
    if settings.text("redis.url"):
        findings += _redis(settings)
    return show(findings, namespace.json)


def _redis(settings: Settings) -> list[Finding]:
    from kvstore import doctor_redis

    redis = fit_redis(settings)
    return doctor_redis.examine(redis_settings(redis), redis.probe_timeout)


def _checked(check: Check, settings: Settings) -> Finding:
    """A check's finding; what the system refuses while it looks is one, too."""
    try:
        return check(settings)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        name = check.__name__.replace("_", " ")
        return Finding(name, Status.FAIL, f"{error.strerror or error}{where}")


def python(settings: Settings) -> Finding:
    """The interpreter is new enough."""
    detail = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.hexversion < PYTHON_MIN:
        return Finding("python", Status.FAIL, detail, "install Python 3.11 or newer")
    return Finding("python", Status.OK, detail)


def packages(settings: Settings) -> Finding:
    """The packages that the daemon needs are there."""
    found = {name: _version(name) for name in REQUIRED}
    missing = [name for name, text in found.items() if not text]
    if missing:
        return Finding(
            "packages",
            Status.FAIL,
            f"missing {', '.join(missing)}",
            "install kvstore again from its checkout: pip install .",
        )
    return Finding("packages", Status.OK, ", ".join(f"{n} {v}" for n, v in found.items()))


def copies(settings: Settings) -> Finding:
    """Blocks are copied by the compiled code, not by numpy."""
    if COMPILED is None:
        return Finding(
            "copies",
            Status.WARN,
            "by numpy: nothing compiled of this version is installed, for want of a C compiler",
            "install one (Debian: gcc), then kvstore anew (pip install --force-reinstall "
            "--no-cache-dir); stores and retrieves take less time then",
        )
    return Finding("copies", Status.OK, "compiled, past the caches")


def kernel(settings: Settings) -> Finding:
    """Linux, and new enough to fault pages in while they are in use."""
    release = platform.release()
    if platform.system() != "Linux":
        return Finding("kernel", Status.FAIL, platform.system(), "kvstore needs Linux")
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < KERNEL_MIN:
        wanted = ".".join(map(str, KERNEL_MIN))
        return Finding(
            "kernel",
            Status.WARN,
            f"Linux {release}",
            f"below {wanted} memory is touched at first use, which is slower",
        )
    return Finding("kernel", Status.OK, f"Linux {release}")


def sealing(settings: Settings) -> Finding:
    """Memory files can be sealed against shrinking, which an engine on a CPU must do."""
    name, advice = "memfd sealing", "allow memfd_create in the container's seccomp profile"
    try:
        fd = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(name, Status.FAIL, f"memfd_create: {error.strerror}", advice)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        return Finding(name, Status.FAIL, f"F_ADD_SEALS: {error.strerror}", advice)
    finally:
        os.close(fd)
    return Finding(name, Status.OK, "works")


def sizes(settings: Settings) -> Finding:
    """The configured or automatic sizes fit this machine."""
    try:
        machine = sizing.look(settings)
        config = sizing.fit(settings, machine)
    except KVStoreError as error:
        return Finding("sizes", Status.FAIL, str(error))
    short = sizing.shortage(settings, config.nvme, machine)
    if short:
        return Finding("sizes", Status.WARN, short)
    nvme = f"nvme {format_size(config.nvme.size)}" if config.nvme.size else "nvme off"
    return Finding("sizes", Status.OK, f"host {format_size(config.host.size)}, {nvme}")


def memory(settings: Settings) -> Finding:
    """Memory that this process may use, and what of it is free now."""
    facts = memory_facts()
    detail = (
        f"limit {format_size(facts.limit_bytes)} ({facts.limit_source}), "
        f"{format_size(facts.available_bytes)} available"
    )
    if facts.available_bytes < sizing.HOST_MIN + sizing.OWN_BYTES:
        return Finding("memory", Status.WARN, detail, "free some, or raise the limit")
    return Finding("memory", Status.OK, detail)


def huge_pages(settings: Settings) -> Finding:
    """Transparent huge pages, which make touching the arena five to ten times as fast."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return Finding("huge pages", Status.SKIP, "this kernel doesn't have them")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        return Finding(
            "huge pages",
            Status.WARN,
            "never",
            "write madvise to /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding("huge pages", Status.OK, mode)


def open_files(settings: Settings) -> Finding:
    """Descriptors: each session takes two or three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"RLIMIT_NOFILE {_limit(soft)} (hard {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        advice = (
            f"the daemon raises it to the hard limit; for many sessions: ulimit -n {OPEN_FILES_MIN}"
        )
        return Finding("open files", Status.WARN, detail, advice)
    return Finding("open files", Status.OK, detail)


def locked_memory(settings: Settings) -> Finding:
    """Pinned memory, which only a GPU needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    detail = f"RLIMIT_MEMLOCK {size}"
    if not _gpus():
        return Finding("locked memory", Status.SKIP, f"{detail}; only a GPU needs pinned memory")
    return Finding("locked memory", Status.OK, detail)


def disk(settings: Settings) -> Finding:
    """Space of the NVMe tier's file system, and that it isn't memory."""
    path = settings.nvme_path()
    try:
        path.exists()
    except OSError as error:
        advice = "set nvme.path to a folder of your own, or nvme.size to off"
        return Finding("disk", Status.FAIL, f"{path}: {error.strerror}", advice)
    facts = disk_facts(path)
    detail = f"{path} on {facts.mount} ({facts.kind}): {format_size(facts.free_bytes)} free"
    if facts.in_memory():
        return Finding(
            "disk", Status.WARN, detail, "this file system is memory; set nvme.path to a disk"
        )
    if facts.free_bytes < sizing.NVME_MIN:
        return Finding(
            "disk", Status.WARN, detail, "free some space, or set nvme.path to another disk"
        )
    return Finding("disk", Status.OK, detail)


def direct_io(settings: Settings) -> Finding:
    """The NVMe folder's file system takes direct writes; else the tier works through the page
    cache."""
    folder = nearest_existing(settings.nvme_path())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvstore-doctor-") as file:
            return _try_direct(Path(file.name))
    except OSError as error:
        return Finding(
            "direct I/O",
            Status.FAIL,
            f"{folder} can't be written: {error.strerror}",
            "set nvme.path to a folder of your own, or nvme.size to off",
        )


def _try_direct(path: Path) -> Finding:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return _no_direct(error)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
    except OSError as error:
        return _no_direct(error)
    finally:
        os.close(fd)
    return Finding("direct I/O", Status.OK, "O_DIRECT works in the NVMe folder")


def _no_direct(error: OSError) -> Finding:
    return Finding(
        "direct I/O",
        Status.WARN,
        f"O_DIRECT is refused ({error.strerror})",
        "the tier uses the page cache; a local ext4 or xfs is faster",
    )


def socket_folder(settings: Settings) -> Finding:
    """The folder of the engines' socket is ours, and others can't write there."""
    folder = settings.socket().parent
    existing = nearest_existing(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "socket folder",
            Status.FAIL,
            f"{existing} can't be written",
            "set socket to a path in a folder of your own",
        )
    if existing != folder:
        return Finding("socket folder", Status.OK, f"{folder} will be made")
    facts = folder.stat()
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX:
        return Finding(
            "socket folder",
            Status.WARN,
            f"{folder} can be written by others",
            f"chmod 700 {folder}",
        )
    return Finding("socket folder", Status.OK, str(folder))


def daemon(settings: Settings) -> Finding:
    """Whether a daemon runs, and whether it is well."""
    from kvstore.cli_admin import AdminClient, NoDaemonError

    try:
        with AdminClient(settings.admin_address()) as client:
            process = client.stats()["process"]
    except NoDaemonError:
        return Finding(
            "daemon",
            Status.SKIP,
            f"none answers at {settings.admin_address()}",
            "start one with `kvstore serve`",
        )
    except KVStoreError as error:
        return Finding("daemon", Status.FAIL, str(error), "look at its log, or restart it")
    detail = f"pid {process['pid']}, version {process['version']}, {process['state']}"
    status = Status.OK if process["state"] == "ok" else Status.WARN
    return Finding("daemon", status, detail)


def extras(settings: Settings) -> Finding:
    """Which optional parts are installed."""
    there, missing = [], []
    for extra, names in EXTRAS:
        versions = [_version(name) for name in names]
        if all(versions):
            there.append(f"{extra} ({names[0]} {versions[0]})")
        else:
            missing.append(extra)
    detail = f"installed: {', '.join(there) or 'none'}"
    if not missing:
        return Finding("extras", Status.OK, detail)
    return Finding(
        "extras",
        Status.SKIP if not there else Status.OK,
        detail,
        f"not installed: {', '.join(missing)}; in the checkout: pip install '.[NAME]'",
    )


def gpu(settings: Settings) -> Finding:
    """GPUs of NVIDIA, seen without their driver library."""
    found = _gpus()
    if not found:
        return Finding("gpu", Status.SKIP, "no NVIDIA GPU here; engines on a CPU are served")
    return Finding("gpu", Status.SKIP, f"{len(found)} found; this version serves CPU engines only")


CHECKS: tuple[Check, ...] = (
    python, packages, copies, kernel, sealing, memory, sizes, huge_pages, open_files,
    locked_memory, disk, direct_io, socket_folder, daemon, extras, gpu,
)  # fmt: skip


def _gpus() -> list[str]:
    try:
        return os.listdir("/proc/driver/nvidia/gpus")
    except OSError:
        return []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
