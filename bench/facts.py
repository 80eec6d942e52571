"""Facts: the machine that figures come from, and whether it was quiet meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.echo import ROOT
from kvstore.device.rows import COMPILED
from kvstore.wire import VERSION

_LOOK_S = 0.5
_IDLE_LEAST = 0.9
_STEAL_MOST = 0.01


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """/proc/stat's first line, in ticks over all cores."""

    total: int
    idle: int
    stolen: int


def cpu_times() -> CpuTimes:
    """As they stand now."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return CpuTimes(sum(fields), fields[3] + fields[4], fields[7])


def idle_share() -> float:
    """How idle the cores are, looked at for half a second."""
    before = cpu_times()
    time.sleep(_LOOK_S)
    after = cpu_times()
    return (after.idle - before.idle) / max(1, after.total - before.total)


@dataclass(slots=True)
class Watch:
    """The machine before a run and what was stolen from it during one."""

    before: CpuTimes
    idle: float
    load: tuple[float, float, float]

    @classmethod
    def begin(cls) -> Watch:
        """Look at the machine, for half a second."""
        idle = idle_share()
        return cls(cpu_times(), idle, os.getloadavg())

    def stolen_share(self) -> float:
        """The share of the cores' time since then that the hypervisor gave to others."""
        now = cpu_times()
        return (now.stolen - self.before.stolen) / max(1, now.total - self.before.total)

    def warnings(self) -> list[str]:
        """Why the figures may be worse than the machine allows; none if it was quiet."""
        found = []
        if self.idle < _IDLE_LEAST:
            found.append(
                f"something else was running before the start: the cores were {self.idle:.0%} "
                f"idle, load {self.load[0]:.2f}"
            )
        stolen = self.stolen_share()
        if stolen > _STEAL_MOST:
            found.append(f"the hypervisor took {stolen:.1%} of the cores' time meanwhile")
        return found


def facts(watch: Watch, folder: Path) -> dict[str, Any]:
    """What stands in the JSON line: hardware, versions, commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "disk": disk(folder),
        "load_before": watch.load[0],
        "idle_before": round(watch.idle, 3),
        "stolen": round(watch.stolen_share(), 4),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rows_copied": "compiled" if COMPILED else "by numpy",
        "kvstore": VERSION,
        "commit": _commit(),
    }


def describe(watch: Watch, folder: Path) -> str:
    """The same for a person, in two lines."""
    found = facts(watch, folder)
    return (
        f"{found['cores']} cores ({found['cpu']}), {found['memory_gib']} GiB, Linux "
        f"{found['kernel']}, Python {found['python']}, numpy {found['numpy']}, "
        f"kvstore {found['kvstore']} {found['commit']}, rows copied {found['rows_copied']}\n"
        f"load before {found['load_before']:.2f}, cores {found['idle_before']:.0%} idle; "
        f"scratch on {found['disk']}"
    )


def disk(folder: Path) -> str:
    """The device and file system below a folder."""
    best = ("", "?", "?")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, device, kind)
    return f"{best[1]} ({best[2]})"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    command: Sequence[str] = ("git", "describe", "--always", "--dirty")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
