"""The mover's lanes: what goes first, and when an end is reported."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.core.messages import (
    Move,
    Moved,
    MoveID,
    MoveKind,
    MoveStatus,
)
from kvstore.device.pages import HostPages
from kvstore.mover import Mover, MoverThreads
from kvstore.mover_lanes import Lane, LaneName
from kvstore.tiers.priority import Home
from tests.link_rig import eventually
from tests.mover_bench import LAYOUT, SESSION, MoverBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MoverBench]:
    bench = MoverBench(tmp_path)
    bench.open()
    yield bench
    bench.close()
    assert bench.reports.empty(), "a Move was reported twice"


def transfer(bench: MoverBench, kind: MoveKind, number: int, chunks: int) -> list[Move]:
    """The Moves of one store or retrieve."""
    moves = [bench.move(kind, slot=n % 8) for n in range(chunks)]
    return [dataclasses.replace(move, transfer=number) for move in moves]


def carried_out(
    bench: MoverBench, moves: Sequence[Move]
) -> tuple[list[MoveID], list[list[MoveID]]]:
    """Have one copy thread carry out Moves that all wait when it begins the first: the order in
    which they begin, and how they are reported."""
    stopped, go, all_told = threading.Event(), threading.Event(), threading.Event()
    begun: list[MoveID] = []
    reported: list[list[MoveID]] = []

    def report(ended: Sequence[Moved]) -> None:
        reported.append([moved.move for moved in ended])
        if sum(map(len, reported)) == 1 + len(moves):
            all_told.set()

    def at(point: str, move: Move) -> None:
        if point == "begin":
            begun.append(move.id)
            stopped.set()
            wait(go)

    mover = Mover(bench.host, {}, report, MoverThreads(1, 1, 1), at)
    mover.attach(SESSION, HostPages(bench.memory, LAYOUT))
    mover.open()
    mover.submit(bench.move(MoveKind.STORE))
    wait(stopped)
    mover.submit(*moves)
    go.set()
    wait(all_told)
    mover.close()
    return begun[1:], reported[1:]


def test_loads_overtake_stores(bench: MoverBench) -> None:
    """An engine waits for its retrieve: it doesn't stand in line behind what others store."""
    stores = transfer(bench, MoveKind.STORE, 1, 6)
    loads = transfer(bench, MoveKind.LOAD, 2, 6)
    begun, _ = carried_out(bench, [*stores, *loads])
    assert begun == [move.id for move in [*loads, *stores]]


def test_moves_of_a_transfer_are_reported_together(bench: MoverBench) -> None:
    """Each report wakes the loop, so one does for all chunks that a thread copies one after the
    other; but no transfer's end is held back by another's."""
    first, second = (transfer(bench, MoveKind.STORE, number, 6) for number in (1, 2))
    _, reported = carried_out(bench, [*first, *second])
    ids = [move.id for move in [*first, *second]]
    assert reported == [ids[:6], ids[6:]]


def wait(event: threading.Event) -> None:
    """Wait for what must happen."""
    assert event.wait(60)


def test_threads_wait_on_cores_of_their_own_and_work_anywhere(bench: MoverBench) -> None:
    """Woken on the loop's core they would copy one after the other, beside an idle one; bound to a
    core while they copy they would wait for whatever else runs there."""
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)
    threads = {t.name: t.native_id for t in threading.enumerate() if t.name.startswith("copy-")}
    assert set(threads) == {"copy-0", "copy-1"}

    def waits_at_home(number: int) -> bool:
        native = threads[f"copy-{number}"]
        assert native is not None
        return os.sched_getaffinity(native) == {cores[number % len(cores)]}

    eventually(lambda: waits_at_home(0) and waits_at_home(1))
    working: list[set[int]] = []
    bench.hooks.append(lambda point, move: working.append(os.sched_getaffinity(0)))
    assert bench.run(bench.move(MoveKind.STORE)) is MoveStatus.OK
    assert working == [mine, mine]
    eventually(lambda: waits_at_home(0) and waits_at_home(1))


def test_a_move_that_comes_while_a_thread_falls_asleep_is_not_left_behind(
    bench: MoverBench,
) -> None:
    """It comes after the thread has looked and before there is a bell to ring; no other follows."""
    lane, late = Lane(LaneName.COPY, 1), bench.move(MoveKind.STORE)
    coming = [late]
    done: queue.SimpleQueue[MoveID] = queue.SimpleQueue()

    class Bells(list[threading.Lock]):
        def append(self, bell: threading.Lock) -> None:
            if coming:
                lane.put(coming.pop())
            super().append(bell)

    def run(lane: Lane, home: Home) -> None:
        while (move := lane.take(home)) is not None:
            done.put(move.id)

    lane._bells = Bells()
    lane.start(run)
    assert done.get(timeout=60) == late.id
    lane.stop()
