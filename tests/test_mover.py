"""The mover: every Move ends, is reported once, and touches nothing afterwards."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import (
    CapacityError,
    ChunkCorruptError,
    InvariantError,
    TierUnavailableError,
)
from kvstore.core.layout import NULL_BLOCK
from kvstore.core.messages import (
    Move,
    Moved,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from kvstore.mover import Mover, MoverThreads
from kvstore.mover_lanes import KindStats
from kvstore.testing import SlabBytes, packed, pattern
from kvstore.tiers.base import ChunkForeignError, IOKind
from tests.mover_bench import PAYLOAD_BYTES, SESSION, MoverBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MoverBench]:
    bench = MoverBench(tmp_path)
    bench.open()
    yield bench
    bench.close()
    assert bench.reports.empty(), "a Move was reported twice"


def test_bytes_travel_from_blocks_to_disk_and_back(bench: MoverBench) -> None:
    """Store, write, forget, read into another slot, load: the blocks hold what they held, and no
    other block changed. Sizes are odd on purpose (field case 64)."""
    before, image = bench.memory.copy(), bench.image()
    assert bench.run(bench.move(MoveKind.STORE)) is MoveStatus.OK
    np.testing.assert_array_equal(bench.slot(), image)
    assert bench.run(bench.move(MoveKind.WRITE)) is MoveStatus.OK
    bench.slot()[:] = 0
    for block in (3, 9):
        bench.memory[block * 4096 : (block + 1) * 4096] = 0
    assert bench.run(bench.move(MoveKind.READ, slot=5)) is MoveStatus.OK
    assert bench.run(bench.move(MoveKind.LOAD, slot=5)) is MoveStatus.OK
    np.testing.assert_array_equal(bench.memory, before)


def test_null_block_is_skipped_by_load(bench: MoverBench) -> None:
    """Field case 35, the copy's part: a block that slid out of the window isn't written."""
    before = bench.memory.copy()
    bench.slot()[:] = 1
    move = dataclasses.replace(bench.move(MoveKind.LOAD), blocks=((0, packed(NULL_BLOCK, 9)),))
    assert bench.run(move) is MoveStatus.OK
    assert (bench.memory[9 * 4096 : 10 * 4096] == 1).all()
    np.testing.assert_array_equal(bench.memory[: 9 * 4096], before[: 9 * 4096])


def test_read_of_b_where_a_lies_is_foreign(bench: MoverBench) -> None:
    """Field case 10: the index mixes up two chunks. B's read is FOREIGN, A is intact."""
    bench.slot()[:] = pattern(1, PAYLOAD_BYTES)
    assert bench.run(bench.move(MoveKind.WRITE, seed=1)) is MoveStatus.OK
    assert bench.run(bench.move(MoveKind.READ, seed=2, slot=1)) is MoveStatus.FOREIGN
    assert bench.run(bench.move(MoveKind.READ, seed=1, slot=2)) is MoveStatus.OK
    np.testing.assert_array_equal(bench.slot(2), pattern(1, PAYLOAD_BYTES))


def test_damaged_torn_erased_and_absent_are_corrupt(bench: MoverBench) -> None:
    """Field case 22: each is told, none is data."""
    bit, torn, erased, absent = 0, 1, 2, 3
    bench.slot()[:] = pattern(1, PAYLOAD_BYTES)
    place = bench.move(MoveKind.WRITE, at=torn).target
    assert place is not None
    bench.nvme.tear(place, 4096 + PAYLOAD_BYTES // 2)
    for at in (bit, torn, erased):
        assert bench.run(bench.move(MoveKind.WRITE, at=at)) is MoveStatus.OK
    SlabBytes(bench.nvme._tier.folder).flip(dataclasses.replace(place, index=bit), 50_000)
    assert bench.run(bench.move(MoveKind.ERASE, at=erased)) is MoveStatus.OK
    for at in (bit, torn, erased, absent):
        assert bench.run(bench.move(MoveKind.READ, at=at, slot=1)) is MoveStatus.CORRUPT
    assert bench.mover.stats().degraded == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("full"), MoveStatus.NO_SPACE), (TierUnavailableError("x"), MoveStatus.FAILED),
     (OSError(5, "EIO"), MoveStatus.FAILED), (ChunkCorruptError("x"), MoveStatus.CORRUPT),
     (ChunkForeignError("x"), MoveStatus.FOREIGN)],
)  # fmt: skip
def test_expected_errors_become_statuses(
    bench: MoverBench, error: Exception, status: MoveStatus
) -> None:
    """Each kind of error that a tier may raise, told apart; none degrades the mover."""
    bench.nvme.fail(IOKind.WRITE, error)
    assert bench.run(bench.move(MoveKind.WRITE)) is status
    assert bench.run(bench.move(MoveKind.WRITE)) is MoveStatus.OK
    stats = bench.mover.stats()
    assert (stats.unexpected_errors, stats.degraded) == (0, "")


@pytest.mark.parametrize("error", [ValueError("a bug"), InvariantError("a bug"), MemoryError()])
def test_unexpected_error_costs_one_move_only(
    bench: MoverBench, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Field case 42: the tier raises something impossible on write 3 of 10: that one is FAILED,
    the others succeed, the queue is empty, the error is counted, logged and seen in the health."""
    bench.nvme.fail(IOKind.WRITE, error, after=2)
    statuses = [bench.run(bench.move(MoveKind.WRITE, at=at % 8)) for at in range(10)]
    assert statuses == [MoveStatus.OK] * 2 + [MoveStatus.FAILED] + [MoveStatus.OK] * 7
    stats = bench.mover.stats()
    write = next(lane for lane in stats.lanes if lane.lane == "write")
    assert (write.queued, write.running, write.threads_alive) == (0, 0, 1)
    assert write.done == {"ok": 9, "corrupt": 0, "foreign": 0, "failed": 1, "no space": 0}
    assert write.kinds[MoveKind.WRITE] == KindStats(9, 9 * PAYLOAD_BYTES)
    assert stats.unexpected_errors == 1
    assert "unexpected" in stats.degraded
    assert "Traceback" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_is_seen_in_the_health(bench: MoverBench) -> None:
    """Field case 42: a thread ends, whatever ended it."""

    def end(point: str, move: Move) -> None:
        if point == "before report":
            raise SystemExit

    bench.hooks.append(end)
    threads = [t for t in threading.enumerate() if t.name == "write-0"]
    bench.mover.submit(bench.move(MoveKind.WRITE))
    for thread in threads:
        thread.join(60)
    assert bench.mover.stats().degraded == "1 of 1 write threads have ended"


def test_report_that_fails_does_not_end_the_thread(tmp_path: Path) -> None:
    """The loop has just closed: the thread lives on until it is told to end."""
    bench = MoverBench(tmp_path)
    failures = iter([RuntimeError("Event loop is closed")])

    def report(ended: Sequence[Moved]) -> None:
        for failure in failures:
            raise failure
        bench.report(ended)

    bench.mover = Mover(bench.host, {TierName.NVME: bench.nvme}, report, MoverThreads(1, 1, 1))
    bench.open()
    bench.mover.submit(bench.move(MoveKind.STORE))
    assert bench.run(bench.move(MoveKind.STORE)) is MoveStatus.OK
    assert bench.mover.stats().unexpected_errors == 1
    bench.close()


def test_session_that_is_not_attached_fails(bench: MoverBench) -> None:
    """Before attach, after detach, or without a session: FAILED, and no memory is touched."""
    before = bench.memory.copy()
    unknown = dataclasses.replace(bench.move(MoveKind.LOAD), session=SessionID(99))
    nobody = dataclasses.replace(bench.move(MoveKind.STORE), session=None)
    assert bench.run(unknown) is MoveStatus.FAILED
    assert bench.run(nobody) is MoveStatus.FAILED
    bench.mover.detach(SESSION)
    bench.mover.detach(SESSION)
    assert bench.run(bench.move(MoveKind.LOAD)) is MoveStatus.FAILED
    np.testing.assert_array_equal(bench.memory, before)
    assert bench.mover.stats().sessions == 0
    assert bench.mover.stats().degraded == ""


def test_blocks_out_of_range_fail_and_touch_nothing(bench: MoverBench) -> None:
    """An engine names a block that it doesn't have: neither its memory nor the slot changes."""
    before = bench.memory.copy()
    bench.slot()[:] = 77
    for kind in (MoveKind.STORE, MoveKind.LOAD):
        move = dataclasses.replace(bench.move(kind), blocks=((0, packed(3, 16)),))
        assert bench.run(move) is MoveStatus.FAILED
    assert (bench.slot() == 77).all()
    np.testing.assert_array_equal(bench.memory, before)


def test_read_lands_in_its_slot_without_a_copy(bench: MoverBench) -> None:
    """What the tier fills is the slot itself."""
    addresses: list[int] = []
    real = bench.nvme._tier.read
    bench.run(bench.move(MoveKind.WRITE))

    def read(place: Place, header: object, out: np.ndarray) -> None:
        addresses.append(out.ctypes.data)
        real(place, header, out)  # type: ignore[arg-type]

    bench.nvme._tier.read = read  # type: ignore[method-assign]
    assert bench.run(bench.move(MoveKind.READ, slot=4)) is MoveStatus.OK
    assert addresses == [bench.slot(4).ctypes.data]


def test_lanes_do_not_wait_for_one_another(bench: MoverBench) -> None:
    """Field case 68: the disk hangs in a write; stores, loads and reads go on. Once it's back,
    writes go out in their order."""
    go = threading.Event()
    bench.run(bench.move(MoveKind.WRITE, at=7))
    bench.nvme.inject(IOKind.WRITE, lambda _: _wait(go))
    slow = [bench.move(MoveKind.WRITE, at=at) for at in (4, 2, 3)]
    for move in slow:
        bench.mover.submit(move)
    for kind in (MoveKind.STORE, MoveKind.READ, MoveKind.LOAD):
        assert bench.run(bench.move(kind, at=7)) is MoveStatus.OK
    go.set()
    assert [bench.reports.get(timeout=60).move for _ in slow] == [move.id for move in slow]


def test_sequence_points_surround_the_work(bench: MoverBench) -> None:
    """A race test can stop a Move before it begins, and after its last access."""
    seen: list[tuple[str, int]] = []
    bench.hooks.append(lambda point, move: seen.append((point, int(bench.slot()[0]))))
    bench.slot()[:] = 0
    bench.memory[3 * 4096] = 42
    assert bench.run(bench.move(MoveKind.STORE)) is MoveStatus.OK
    assert seen == [("begin", 0), ("before report", 42)]


def test_close_carries_out_what_was_submitted(tmp_path: Path) -> None:
    """A clean stop loses no write that the core has handed out, and ends all threads."""
    bench = MoverBench(tmp_path)
    bench.open()
    go = threading.Event()
    bench.nvme.inject(IOKind.WRITE, lambda _: _wait(go))
    for at in range(8):
        bench.mover.submit(bench.move(MoveKind.WRITE, at=at))
    closer = threading.Thread(target=bench.mover.close)
    closer.start()
    go.set()
    closer.join(60)
    statuses = [bench.reports.get(timeout=60).status for _ in range(8)]
    assert statuses == [MoveStatus.OK] * 8
    names = {thread.name for thread in threading.enumerate()}
    assert not {"copy-0", "copy-1", "read-0", "read-1", "write-0"} & names
    bench.close()


def test_threads_give_way_to_the_loop(bench: MoverBench) -> None:
    """The tail of lookups is the run queue: threads that move bytes run at a lower priority."""
    nice: dict[str, int] = {}

    def note(point: str, move: Move) -> None:
        nice[move.kind.value] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    bench.hooks.append(note)
    for kind in (MoveKind.STORE, MoveKind.WRITE, MoveKind.READ):
        bench.run(bench.move(kind))
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert nice == dict.fromkeys(("store", "write", "read"), min(19, mine + 10))


def test_every_move_is_reported_once_under_faults(bench: MoverBench) -> None:
    """Field case 25, the hands' part: hundreds of Moves from several threads, faults in between;
    as many reports as Moves, each once, and the counts add up."""
    moves = [
        bench.move(kind, slot=n % 8, at=n % 8)
        for n in range(50)
        for kind in (MoveKind.STORE, MoveKind.WRITE, MoveKind.READ, MoveKind.ERASE)
    ]
    for n in range(0, 50, 7):
        bench.nvme.fail(IOKind.WRITE, OSError(5, "EIO"), after=n % 3)
        bench.nvme.fail(IOKind.READ, ValueError("a bug"), after=n % 4)
    parts = [threading.Thread(target=lambda m=moves[i::4]: [*map(bench.mover.submit, m)]) for i in
             range(4)]  # fmt: skip
    for part in parts:
        part.start()
    reports = [bench.reports.get(timeout=60) for _ in moves]
    for part in parts:
        part.join()
    assert sorted(r.move for r in reports) == sorted(m.id for m in moves)
    lanes = bench.mover.stats().lanes
    assert sum(sum(lane.done.values()) for lane in lanes) == len(moves)
    assert all(lane.queued == lane.running == 0 for lane in lanes)


def _wait(event: threading.Event) -> None:
    assert event.wait(60)
