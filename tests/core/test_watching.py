"""What sessions that watch are told, and that nobody else pays for it."""

from __future__ import annotations

import pytest

import kvstore.core.watching as watching
from kvstore.core.changes import ChangeKind, Changes, Watch
from kvstore.core.keys import KEY_BYTES, ChunkKeys
from kvstore.core.layout import Shard
from kvstore.core.messages import MoveKind, MoveStatus, Refused, SetRevision
from tests.core.driver import CHUNK_TOKENS, Driver, Engine, layout, limits

HOST_LOST, HOST_GAINED, NVME_LOST, NVME_GAINED, *_ = ChangeKind
HOST_WINDOW_LOST, HOST_WINDOW_GAINED = ChangeKind.HOST_WINDOW_LOST, ChangeKind.HOST_WINDOW_GAINED
Told = list[tuple[bytes, ChangeKind]]


def watch(engine: Engine) -> tuple[Told, bool]:
    """Ask, let a Tick pass, and give what was told and whether all before is void."""
    driver = engine.driver
    number = driver.send(engine.scheduler, Watch())
    driver.tick(1.0)
    body = driver.answer(engine.scheduler, number)
    assert isinstance(body, Changes)
    keys = [body.keys[i : i + KEY_BYTES] for i in range(0, len(body.keys), KEY_BYTES)]
    return list(zip(keys, map(ChangeKind, body.kinds), strict=True)), body.resync


def all_of(keys: ChunkKeys, kind: ChangeKind) -> Told:
    """The same for each key."""
    return [(bytes(key), kind) for key in keys]


def test_a_watcher_is_told_what_comes_and_what_leaves_each_tier() -> None:
    """The first answer starts from nothing; then head to tail what was committed, what was written,
    and, when others take the place, what had to go."""
    driver = Driver(limits(host_slots=2, nvme_slots=8))
    driver.scanned()
    engine = driver.engine()
    assert watch(engine) == ([], True)
    first, second = engine.chain(2, 1), engine.chain(2, 2)
    engine.put(first)
    told, void = watch(engine)
    assert not void
    assert sorted(told) == sorted(all_of(first, HOST_GAINED) + all_of(first, NVME_GAINED))
    assert [t for t in told if t[1] is HOST_GAINED] == all_of(first, HOST_GAINED)
    engine.put(second)
    told, _ = watch(engine)
    lost = [t for t in told if t[1] is HOST_LOST]
    assert sorted(lost) == sorted(all_of(first, HOST_LOST))
    assert sorted(t for t in told if t[1] is HOST_GAINED) == sorted(all_of(second, HOST_GAINED))
    engine.get(first)
    told, _ = watch(engine)
    assert set(all_of(first, NVME_GAINED) + all_of(first, HOST_GAINED)) <= set(told)


def test_what_is_stored_or_loaded_again_is_told_again() -> None:
    """An engine that comes later learns where chunks are that another one stored."""
    driver = Driver(limits(host_slots=8, nvme_slots=8))
    driver.scanned()
    one, other = driver.engine("e1"), driver.engine("e2")
    keys = one.chain(2)
    one.put(keys)
    assert watch(other) == ([], True)
    other.put(keys)
    assert sorted(watch(other)[0]) == sorted(all_of(keys, HOST_GAINED) + all_of(keys, NVME_GAINED))
    other.get(keys[:1])
    assert {key for key, _ in watch(other)[0]} == {bytes(keys[0])}


def test_a_chunk_is_told_when_its_last_rank_has_stored_it() -> None:
    """Half a chunk isn't a chunk."""
    driver = Driver(limits(host_slots=8))
    engine = driver.engine(shards=(Shard(0, 2), Shard(1, 2)))
    watch(engine)
    keys = engine.chain(1)
    engine.store(keys, rank=0)
    driver.run()
    number = driver.send(engine.scheduler, Watch())
    driver.tick(1.0)
    assert driver.is_open(engine.scheduler, number)
    engine.store(keys, rank=1)
    driver.run()
    driver.tick(1.0)
    assert driver.answer(engine.scheduler, number) == Changes(keys.data, b"\1", False)


def test_what_windows_keep_of_a_chunk_is_told_apart() -> None:
    """It comes after its chunk, may leave before it or with it, and is told again when it is
    used."""
    driver = Driver(limits(host_slots=4))
    engine = driver.engine(shape=layout(window=CHUNK_TOKENS))
    watch(engine)
    first, second, third = engine.chain(2, 1), engine.chain(1, 2), engine.chain(1, 3)
    engine.put(first)
    told = [kind for _, kind in watch(engine)[0]]
    assert told == [HOST_GAINED, HOST_WINDOW_GAINED] * 2
    engine.put(second)
    came = [(bytes(second[0]), HOST_GAINED), (bytes(second[0]), HOST_WINDOW_GAINED)]
    assert watch(engine)[0] == all_of(first, HOST_WINDOW_LOST) + came
    engine.put(third)
    left = all_of(first, HOST_LOST)[::-1]
    assert watch(engine)[0][:2] == left
    engine.put(first[:1])
    assert set(watch(engine)[0]) == {
        (bytes(second[0]), HOST_WINDOW_LOST),
        (bytes(second[0]), HOST_LOST),
        (bytes(first[0]), HOST_GAINED),
        (bytes(first[0]), HOST_WINDOW_GAINED),
    }
    engine.get(first[:1])
    assert [kind for _, kind in watch(engine)[0]] == [HOST_GAINED, HOST_WINDOW_GAINED]


def test_only_the_last_state_of_a_chunk_is_told() -> None:
    """Changes of one chunk add up while nobody fetches them."""
    driver = Driver(limits(host_slots=1))
    engine = driver.engine()
    watch(engine)
    first, second = engine.chain(1, 1), engine.chain(1, 2)
    for keys in (first, second, first, second):
        engine.put(keys)
    told, void = watch(engine)
    assert (told, void) == (all_of(first, HOST_LOST) + all_of(second, HOST_GAINED), False)


def test_who_falls_behind_starts_over_and_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit nothing more is kept for a session; what came after is told behind the
    resync, in answers of a limited size."""
    monkeypatch.setattr(watching, "PENDING_MAX", 4)
    monkeypatch.setattr(watching, "ANSWER_MAX", 2)
    driver = Driver(limits(host_slots=16))
    engine = driver.engine()
    watch(engine)
    engine.put(engine.chain(5, 1))
    later = engine.chain(3, 2)
    engine.put(later)
    assert watch(engine) == (all_of(later[:2], HOST_GAINED), True)
    assert watch(engine) == (all_of(later[2:], HOST_GAINED), False)
    assert driver.stats().changes_dropped == 5
    assert driver.stats().watchers == 1


def test_another_namespace_or_epoch_or_none_is_a_resync() -> None:
    """A clear, new weights, and the loss of a worker: nothing that was told counts any more."""
    driver = Driver(limits(host_slots=8))
    engine = driver.engine()
    watch(engine)
    engine.put(engine.chain(2))
    driver.clear()
    assert watch(engine) == ([], True)
    engine.put(engine.chain(2))
    driver.send(engine.workers[0], SetRevision("r2"))
    assert watch(engine) == ([], True)
    number = driver.send(engine.scheduler, Watch())
    driver.close(engine.workers[0])
    driver.tick(1.0)
    assert driver.answer(engine.scheduler, number) == Changes(b"", b"", True)


def test_a_second_question_is_refused_and_another_tenants_chunks_are_not_told() -> None:
    driver = Driver(limits(host_slots=8))
    mine, theirs = driver.engine("e1", "t1"), driver.engine("e2", "t2")
    watch(mine)
    number = driver.send(mine.scheduler, Watch())
    assert isinstance(driver.ask(mine.scheduler, Watch()), Refused)
    theirs.put(theirs.chain(2))
    driver.tick(1.0)
    assert driver.is_open(mine.scheduler, number)


def test_nothing_is_noted_where_nobody_watches() -> None:
    """Neither before the first watcher nor after the last one has gone."""
    driver = Driver(limits(host_slots=4))
    engine = driver.engine()
    host = driver.service._state.directory.host
    noted: list[object] = []
    host.changed = noted  # type: ignore[assignment]
    engine.put(engine.chain(4, 1))
    watch(engine)
    driver.close(engine.scheduler)
    engine.put(engine.chain(4, 2))
    assert driver.count(MoveKind.STORE) == 8
    assert noted == []
    assert not host.watched
    assert driver.stats().watchers == 0


def test_what_goes_from_the_middle_is_told_with_what_hangs_below() -> None:
    """A read finds bad bytes: the chunk leaves NVMe at once, those behind it with the sweeps."""
    driver = Driver(limits(host_slots=4, nvme_slots=16))
    driver.scanned()
    engine = driver.engine()
    keys = engine.chain(3)
    engine.put(keys)
    for seed in range(4):
        engine.put(engine.chain(1, 100 + seed))
    watch(engine)
    engine.retrieve(keys)
    read = driver.waiting(MoveKind.READ)[1]
    driver.end(read, MoveStatus.CORRUPT)
    driver.run()
    driver.tick()
    told = watch(engine)[0]
    assert [t for t in told if t[1] is NVME_LOST] == all_of(keys[1:], NVME_LOST)
