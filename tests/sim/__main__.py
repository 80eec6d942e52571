"""Run fresh seeds: ``python -m tests.sim --seconds 60 --seed 1``; a failure prints its story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.errors import SimulationError
from tests.sim.faults import Fault
from tests.sim.fleets import simulate_fleet
from tests.sim.run import STEPS, simulate

FAILED_MAX = 20


def main() -> int:
    """Run seeds until the time or the count is over; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="run this long")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: the time")
    parser.add_argument("--count", type=int, default=0, help="run this many seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="actions a seed")
    parser.add_argument(
        "--fleets",
        action="store_true",
        help="two daemons that share a remote tier; else every "
        "fourth seed is such a one unless it is alone",
    )
    parser.add_argument("--quiet", action="store_true", help="only the first line of a failure")
    options = parser.parse_args()
    first = int(time.time() * 1000) if options.seed is None else options.seed
    begun = time.monotonic()
    totals: Counter[str] = Counter()
    failed = seeds = 0
    while (spent_s(begun) < options.seconds or seeds < options.count) and failed < FAILED_MAX:
        try:
            fleet = options.fleets or (options.count != 1 and seeds % 4 == 3)
            run = simulate_fleet if fleet else simulate
            totals.update(run(first + seeds, options.steps))
        except SimulationError as error:
            failed += 1
            text = str(error)
            print(text.splitlines()[0] if options.quiet else text, flush=True)
            if not options.quiet:
                return 1
        seeds += 1
    print(report(totals, spent_s(begun)))
    print(f"{seeds} seeds from {first}: {failed} failed")
    return 1 if failed else 0


def spent_s(begun: float) -> float:
    """Seconds since then."""
    return time.monotonic() - begun


def report(totals: Counter[str], seconds: float) -> str:
    """Events and their rate, what the core did, and what befell it."""
    names = {fault.name for fault in Fault}
    events = totals["events"]
    lines = [f"  {name}: {count}" for name, count in sorted(totals.items()) if name not in names]
    lines += [f"  {totals[fault.name]:9,} {fault.value}" for fault in Fault]
    faults = sum(totals[name] for name in names)
    rate = events / max(seconds, 1e-9)
    lines.append(f"{events:,} events, {faults:,} faults and hard loads, {rate:,.0f} events/s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
