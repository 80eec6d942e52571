"""Everything for long: ``python -m tests.soak --seconds 240``; a summary at the end, 1 if any part
failed.

The parts run one after the other, each in a process of its own: kills and stops of real processes
at 200 random moments each, bursts of 2 GiB and damaged files, fuzzing, the simulator with fresh
seeds, and a daemon under load. ``--seconds`` is how long each of the last two runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a module and its arguments, and settings in the environment."""

    name: str
    command: tuple[str, ...]
    settings: dict[str, str] = field(default_factory=dict)


def parts(points: int, seconds: float) -> list[Part]:
    """What there is to run."""
    kills = {"KILL_POINTS": str(points)}
    faults = {"BURST_ARENA_MIB": "1024", "DAMAGES": str(10 * points)}
    return [
        Part("kills and stops", (*PYTEST, "tests/crash"), kills),
        Part("faults and bursts", (*PYTEST, "tests/faults"), faults),
        Part("simulator", ("tests.sim", "--seconds", str(seconds), "--quiet")),
        Part("load", ("tests.soak.load", "--seconds", str(seconds))),
    ]


def main() -> int:
    """Run the parts whose names begin as asked; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--points", type=int, default=200, help="moments of each kill and stop")
    parser.add_argument("--only", default="", help="parts whose names begin so")
    options = parser.parse_args()
    summary: list[str] = []
    failed = 0
    for part in parts(options.points, options.seconds):
        if not part.name.startswith(options.only):
            continue
        print(f"---- {part.name}", flush=True)
        start_s = time.monotonic()
        command = [sys.executable, "-m", *part.command]
        done = subprocess.run(command, env={**os.environ, **part.settings}, check=False)
        failed += done.returncode != 0
        outcome = f"FAILED (exit {done.returncode})" if done.returncode else "ok"
        summary.append(f"{part.name:<20} {time.monotonic() - start_s:6.0f} s  {outcome}")
    print("---- soak", *summary, sep="\n")
    return 1 if failed or not summary else 0


if __name__ == "__main__":
    sys.exit(main())
