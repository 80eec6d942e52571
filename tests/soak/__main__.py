"""Everything for long: ``python -m tests.soak --seconds 240``; a summary at the end, 1 if any part
failed.

The parts run one after the other, each in a process of its own: kills and stops of real processes
at 200 random moments each, bursts of 2 GiB and damaged files, fuzzing, the simulator with
fresh seeds, a daemon under load, and two of them with a server, whose engines' threads share
sessions. ``--seconds`` is how long each of the last three runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=3600")


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a module and its arguments, what is in the line that tells how it went, and
    settings in the environment."""

    name: str
    command: tuple[str, ...]
    tells: str
    settings: dict[str, str] = field(default_factory=dict)

    def run(self) -> tuple[int, str]:
        """Run it, with its output passed on; its exit code, and the line that tells how it
        went."""
        told = ""
        environment = {**os.environ, **self.settings}
        with subprocess.Popen(
            [sys.executable, "-m", *self.command],
            env=environment, stdout=subprocess.PIPE, text=True, errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                told = line.strip() if self.tells in line else told
        return process.returncode, told


def parts(points: int, seconds: float) -> list[Part]:
    """What there is to run."""
    kills = {"KILL_POINTS": str(points)}
    faults = {
        "BURST_ARENA_MIB": "1024",
        "DAMAGES": str(10 * points),
        "REDIS_FAULT_STEPS": str(max(1, points // 5)),
    }
    return [
        Part("kills and stops", (*PYTEST, "tests/crash"), "passed", kills),
        Part("faults and bursts", (*PYTEST, "tests/faults"), "passed", faults),
        Part("fuzzing", (*PYTEST, "tests/fuzz"), "passed", {"FUZZ_EXAMPLES": "100000"}),
        Part("simulator", ("tests.sim", "--seconds", str(seconds), "--quiet"), "seeds from"),
        Part("load", ("tests.soak.load", "--seconds", str(seconds)), "retrieved"),
        Part("threads", ("tests.soak.threads", "--seconds", str(seconds)), "retrieved"),
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
        code, told = part.run()
        failed += code != 0
        outcome = f"FAILED (exit {code})" if code else "ok"
        took_s = time.monotonic() - start_s
        summary.append(f"{part.name:<18} {took_s:6.0f} s  {outcome:<8}  {told}")
    moments = f"{options.points} moments of each kind of kill and stop"
    print(f"---- soak: {moments}, {options.seconds:g} s each of simulator, load, threads")
    print(*summary, sep="\n")
    return 1 if failed or not summary else 0


if __name__ == "__main__":
    sys.exit(main())
