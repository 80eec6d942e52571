"""Run fresh seeds: ``python -m tests.sim --seconds 60 --seed 1``; a failure prints its story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.errors import SimulationError
from tests.sim.run import STEPS, simulate

FAILED_MAX = 20


def main() -> int:
    """Run seeds until the time or the count is over; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="run this long")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: the time")
    parser.add_argument("--count", type=int, default=0, help="run this many seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="actions a seed")
    parser.add_argument("--quiet", action="store_true", help="only the first line of a failure")
    options = parser.parse_args()
    first = int(time.time() * 1000) if options.seed is None else options.seed
    end = time.monotonic() + options.seconds
    totals: Counter[str] = Counter()
    failed = seeds = 0
    while (time.monotonic() < end or seeds < options.count) and failed < FAILED_MAX:
        try:
            totals.update(simulate(first + seeds, options.steps))
        except SimulationError as error:
            failed += 1
            text = str(error)
            print(text.splitlines()[0] if options.quiet else text, flush=True)
            if not options.quiet:
                return 1
        seeds += 1
    print(f"{seeds} seeds from {first}: {failed} failed")
    for name, number in sorted(totals.items()):
        print(f"  {name}: {number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
