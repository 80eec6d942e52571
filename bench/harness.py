"""Harness: what turns calls into rows of a table that can be trusted.

A question compares sides (ours, and what it is measured by) that do equal work. ``interleave``
calls them in turn, in alternating order, within one process and one run, so that whatever the
machine does meanwhile meets both. A question makes three runs; a row states the median of their
figures and how far they lie apart. Ratios are made within a run, never across runs.

A row may have a bar. ``Bench`` collects the rows; ``GATE=1`` fails by those whose median is beyond
their bar.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from bench.control import ControlEcho

RUNS = 3
MICRO, MILLI = 1e6, 1e3

Side = Callable[[int], float]
"""Does its work once, given the number of the round, and returns the seconds that count."""


class Size(Enum):
    """FULL is what the table states. SMALL proves that a benchmark works, in a second or two."""

    FULL = "full"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row promises: its median is on the right side of ``limit``."""

    limit: float
    sign: str

    def met(self, value: float) -> bool:
        """Whether a figure keeps the promise."""
        return value <= self.limit if self.sign == "<=" else value >= self.limit


def at_most(limit: float) -> Bar:
    """The figure is no larger."""
    return Bar(limit, "<=")


def at_least(limit: float) -> Bar:
    """The figure is no smaller."""
    return Bar(limit, ">=")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``values`` are the runs' figures in ``unit`` ("x" is a ratio);
    ``beside`` is what must be seen next to them."""

    question: str
    name: str
    unit: str
    values: tuple[float, ...]
    bar: Bar | None = None
    beside: str = ""

    def median(self) -> float:
        """The figure that counts."""
        return statistics.median(self.values)

    def met(self) -> bool:
        """Whether its bar, if it has one, is met."""
        return self.bar is None or self.bar.met(self.median())

    def document(self) -> dict[str, Any]:
        """Plain values."""
        bar = None if self.bar is None else f"{self.bar.sign} {self.bar.limit:g}"
        return {
            "question": self.question, "name": self.name, "unit": self.unit,
            "median": self.median(), "runs": list(self.values), "bar": bar, "met": self.met(),
            "beside": self.beside,
        }  # fmt: skip


@dataclass(slots=True)
class Bench:
    """What a question is given: its size, a scratch folder on a disk, and where its rows go."""

    size: Size
    folder: Path
    out: TextIO = field(default_factory=lambda: sys.stdout)
    runs: int = RUNS
    rows: list[Row] = field(default_factory=list)
    question: str = ""

    def row(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        bar: Bar | None = None,
        beside: str = "",
    ) -> Row:
        """Add a row to the table and show it."""
        row = Row(self.question, name, unit, tuple(values), bar, beside)
        self.rows.append(row)
        show(row, self.out)
        return row

    @contextmanager
    def control(self, pace_s: float = 0.010) -> Iterator[ControlEcho]:
        """Two other processes that echo a small frame meanwhile: what the machine alone does."""
        with ControlEcho(pace_s) as echo:
            yield echo


@dataclass(frozen=True, slots=True)
class Question:
    """A group of rows, and what it asks."""

    name: str
    asks: str
    measure: Callable[[Bench], None]


def interleave(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Each side once a round, the order turned round after each: the seconds of every call."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(sides[name](number))
    return taken


def interleave_batches(
    sides: Mapping[str, Callable[[int], Sequence[float]]], rounds: int
) -> dict[str, list[float]]:
    """The same for sides that make many calls at a time and return the seconds of each."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            taken[name] += sides[name](number)
    return taken


def timed(work: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all don't exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def p50(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    """What one call of a hundred exceeds."""
    return percentile(values, 0.99)


def rates(runs: Sequence[Mapping[str, Sequence[float]]], side: str, by: str) -> list[float]:
    """Per run, how fast a side is by another one: the ratio of their median times, turned so that
    more is better."""
    return [p50(run[by]) / p50(run[side]) for run in runs]


def show(row: Row, out: TextIO) -> None:
    """One line of the table, and one below for what stands beside it."""
    low, high = min(row.values), max(row.values)
    spread = f"{number(low)} to {number(high)}"
    bar = "" if row.bar is None else f"{row.bar.sign} {number(row.bar.limit)}"
    verdict = "" if row.bar is None else ("met" if row.met() else "NOT MET")
    figure = f"{number(row.median())} {row.unit}"
    line = f"{row.question:<9} {row.name:<58} {figure:>12} {spread:>18} {bar:>9} {verdict}"
    print(line.rstrip(), file=out)
    if row.beside:
        print(f"{'':<12}{row.beside}", file=out)
    out.flush()


def heading(out: TextIO) -> None:
    """The table's first line."""
    print(f"{'question':<9} {'':<58} {'median':>12} {'runs':>18} {'bar':>9}", file=out, flush=True)


def number(value: float) -> str:
    """Three digits, or whole."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
