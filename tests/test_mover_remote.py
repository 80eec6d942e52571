"""The mover and the remote tier: threads of its own, and an answer to each question, whatever
happens."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import CapacityError, InvariantError, TierUnavailableError
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, Move, MoveKind, MoveStatus, Place, TierName
from kvstore.core.remote_messages import Probe, Probed, RemoteClear, RemoteCleared, RemoteEnter
from kvstore.daemon_hands import Hands
from kvstore.mover import Mover, MoverThreads
from tests.link_rig import eventually
from tests.mover_bench import PAYLOAD_BYTES, MoverBench

EPOCH = 1_764_000_000_000_000
REMOTE = Place(TierName.REDIS, EPOCH, 0, 0)
Act = Callable[[], None]


class ScriptedRemote:
    """A remote tier that keeps values in a dict; ``act`` runs first in each call, to hang or
    fail."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.entered: list[str] = []
        self.act: dict[str, Act] = {}

    def read(self, place: Place, header: ChunkHeader, out: np.ndarray) -> None:
        self._begin("read")
        out[:] = np.frombuffer(self.values[header.key], np.uint8)

    def write(self, place: Place, header: ChunkHeader, payload: np.ndarray) -> None:
        self._begin("write")
        self.values[header.key] = payload.tobytes()

    def probe(self, probe: Probe) -> Probed:
        self._begin("probe")
        keys = [probe.keys[i : i + 32] for i in range(0, len(probe.keys), 32)]
        return Probed(probe.id, EPOCH, (bytes(key in self.values for key in keys),))

    def enter(self, enter: RemoteEnter) -> None:
        self._begin("enter")
        self.entered.append(enter.model)

    def clear(self, clear: RemoteClear) -> RemoteCleared:
        self._begin("clear")
        return RemoteCleared(clear.number, len(self.entered))

    def _begin(self, call: str) -> None:
        self.act.get(call, lambda: None)()


class RemoteBench(MoverBench):
    """A mover with a scripted remote tier, and the answers that it gave."""

    def __init__(self, folder: Path) -> None:
        self.answers: queue.Queue[Probed | RemoteCleared] = queue.Queue()
        self.remote = ScriptedRemote()
        super().__init__(folder)

    def make_mover(self, threads: MoverThreads) -> Mover:
        tiers = {TierName.NVME: self.nvme}
        return Mover(self.host, tiers, self.report, threads, answer=self.answers.put)

    def open(self) -> None:
        super().open()
        self.mover.open_remote(self.remote)

    def shared(self, kind: MoveKind, seed: int = 1, slot: int = 0) -> Move:
        """A READ or WRITE of chunk ``seed`` between Redis and a host slot."""
        move = self.move(kind, seed, slot=slot)
        change = {"source": REMOTE} if kind is MoveKind.READ else {"target": REMOTE}
        return dataclasses.replace(move, **change)

    def answer(self) -> Probed | RemoteCleared:
        return self.answers.get(timeout=60)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[RemoteBench]:
    bench = RemoteBench(tmp_path)
    bench.open()
    yield bench
    bench.close()
    assert bench.reports.empty(), "a Move was reported twice"
    assert bench.answers.empty(), "a question was answered twice"


def probe(number: int = 1, keys: bytes = b"\1" * 32) -> Probe:
    return Probe(number, "t", b"n" * 32, keys, (0,), (Part.FULL,))


def test_bytes_travel_to_redis_and_back(bench: RemoteBench) -> None:
    """Store, write to Redis, probe, read into another slot, load: what was stored comes back."""
    before, image = bench.memory.copy(), bench.image()
    assert bench.run(bench.move(MoveKind.STORE)) is MoveStatus.OK
    written = bench.shared(MoveKind.WRITE)
    assert bench.run(written) is MoveStatus.OK
    bench.mover.remote(probe(7, written.header.key + b"\0" * 32))
    assert bench.answer() == Probed(7, EPOCH, (b"\1\0",))
    for block in (3, 9):
        bench.memory[block * 4096 : (block + 1) * 4096] = 0
    assert bench.run(bench.shared(MoveKind.READ, slot=5)) is MoveStatus.OK
    np.testing.assert_array_equal(bench.slot(5), image)
    assert bench.run(bench.move(MoveKind.LOAD, slot=5)) is MoveStatus.OK
    np.testing.assert_array_equal(bench.memory, before)


def test_sick_server_occupies_only_its_own_threads(bench: RemoteBench) -> None:
    """Redis hangs in every call: what goes to host and NVMe goes on; a probe doesn't wait for a
    clear, nor a read for a write."""
    go = threading.Event()
    bench.run(bench.move(MoveKind.WRITE, at=7))
    hung = queue.Queue()

    def hang() -> None:
        hung.put(None)
        assert go.wait(60)

    bench.remote.act = dict.fromkeys(("read", "write", "probe", "clear"), hang)
    threads = MoverThreads()
    for _ in range(threads.redis_read):
        bench.mover.submit(bench.shared(MoveKind.READ))
    for _ in range(threads.redis_write):
        bench.mover.submit(bench.shared(MoveKind.WRITE))
    for number in range(threads.redis_probe):
        bench.mover.remote(probe(number))
    bench.mover.remote(RemoteClear(1, None, None))
    moves = threads.redis_read + threads.redis_write
    for _ in range(moves + threads.redis_probe + 1):
        hung.get(timeout=60)
    for kind in (MoveKind.STORE, MoveKind.READ, MoveKind.LOAD, MoveKind.WRITE):
        assert bench.run(bench.move(kind, at=7)) is MoveStatus.OK
    go.set()
    for _ in range(moves):
        bench.reports.get(timeout=60)
    for _ in range(threads.redis_probe + 1):
        bench.answer()


@pytest.mark.parametrize(
    ("error", "text"),
    [(TierUnavailableError("redis: h:1 can't be reached"), "redis: h:1 can't be reached"),
     (InvariantError("secret"), "an unexpected InvariantError"),
     (ValueError("secret"), "an unexpected ValueError")],
)  # fmt: skip
def test_each_question_is_answered_also_when_the_tier_fails(
    bench: RemoteBench, error: Exception, text: str
) -> None:
    """An error that is expected is its text; of another one only the kind is told, it degrades the
    mover, and the thread lives on."""

    def fail() -> None:
        raise error

    bench.remote.act = dict.fromkeys(("probe", "clear", "enter"), fail)
    bench.mover.remote(probe(3))
    assert bench.answer() == Probed(3, 0, (), text)
    bench.mover.remote(RemoteEnter("t", b"n" * 32, "m", ""))
    bench.mover.remote(RemoteClear(4, None, "m"))
    assert bench.answer() == RemoteCleared(4, 0, text)
    expected = isinstance(error, TierUnavailableError)
    assert (bench.mover.stats().degraded == "") is expected
    bench.remote.act = {}
    bench.mover.remote(RemoteEnter("t", b"n" * 32, "m", ""))
    bench.mover.remote(RemoteClear(5, None, "m"))
    assert bench.answer() == RemoteCleared(5, 1)
    assert bench.remote.entered == ["m"]


def test_full_server_is_no_space_and_a_broken_one_failed(bench: RemoteBench) -> None:
    """The core tells them apart in its drops."""
    for error, status in (
        (CapacityError("full"), MoveStatus.NO_SPACE),
        (TierUnavailableError("down"), MoveStatus.FAILED),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        bench.remote.act = {"write": fail}
        assert bench.run(bench.shared(MoveKind.WRITE)) is status


def test_without_redis_everything_is_answered_at_once(tmp_path: Path) -> None:
    """Before it is opened, and where there is none: no thread waits, no question stays open."""
    bench = RemoteBench(tmp_path)
    MoverBench.open(bench)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("redis")]
    assert bench.run(bench.shared(MoveKind.READ)) is MoveStatus.FAILED
    bench.mover.remote(probe(1))
    assert bench.answer() == Probed(1, 0, (), "the tier isn't open")
    bench.mover.remote(RemoteClear(2, None, None))
    assert bench.answer() == RemoteCleared(2, 0, "the tier isn't open")
    bench.close()


def test_close_answers_what_waits_and_ends_the_threads(tmp_path: Path) -> None:
    """Eight probes wait behind two that hang when the mover is closed: ten answers, and the eight
    never reach a tier that is closed by then; what comes later is refused."""
    bench = RemoteBench(tmp_path)
    bench.open()
    go, hung = threading.Event(), queue.Queue()
    asked: list[int] = []

    def hang() -> None:
        asked.append(1)
        hung.put(None)
        assert go.wait(60)

    bench.remote.act = {"probe": hang}
    for number in range(10):
        bench.mover.remote(probe(number))
    for _ in range(2):
        hung.get(timeout=60)
    closing = threading.Thread(target=bench.close)
    closing.start()
    eventually(lambda: bench.mover._asks._tier is None)
    go.set()
    closing.join(60)
    assert not closing.is_alive()
    answers = [bench.answer() for _ in range(10)]
    assert sorted(answer.id for answer in answers) == list(range(10))
    assert sum(not answer.error for answer in answers) == len(asked) == 2
    bench.mover.remote(probe(99))
    assert bench.answer() == Probed(99, 0, (), "the tier isn't open")
    assert not [t.name for t in threading.enumerate() if t.name.startswith("redis")]


def test_host_traffic_counts_both_lower_tiers(bench: RemoteBench) -> None:
    """What was read from NVMe and from Redis into host slots, and written from them."""
    bench.run(bench.move(MoveKind.STORE))
    bench.run(bench.move(MoveKind.WRITE))
    bench.run(bench.shared(MoveKind.WRITE))
    bench.run(bench.move(MoveKind.READ, slot=1))
    bench.run(bench.shared(MoveKind.READ, slot=2))
    traffic = Hands(bench.mover).traffic()
    assert (traffic.writes, traffic.write_bytes) == (3, 3 * PAYLOAD_BYTES)
    assert (traffic.reads, traffic.read_bytes) == (2, 2 * PAYLOAD_BYTES)
    lanes = {lane.lane: lane for lane in bench.mover.stats().lanes}
    assert lanes["redis-read"].done["ok"] == lanes["redis-write"].done["ok"] == 1
