"""Work of an event is bounded, however many chunks there are: it is counted here, never timed."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvstore.core import clearing, restoring
from kvstore.core.eviction import LeastRecentlyUsed
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey, Namespace
from kvstore.core.messages import (
    ADMIN,
    Cleared,
    MoveKind,
    MoveStatus,
    ScanDone,
    ScannedSlot,
    SpaceRecord,
)
from kvstore.core.service import SPACES_PAGE
from kvstore.core.slabs import SlabSpace
from kvstore.core.spaces import Space
from kvstore.core.tree_nodes import Copy, Index
from tests.core.disk import NVME, first_life, second_life
from tests.core.driver import Driver, limits
from tests.core.forest import Forest, key


class CountingCopies:
    """Counts how often copies are asked whether they are live: each is a step of a walk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        live = Copy.__dict__["live"]

        def get(copy: Copy) -> bool:
            self.steps += 1
            found: bool = live.__get__(copy)
            return found

        patch.setattr(Copy, "live", property(get, live.__set__))


def deep(depth: int) -> str:
    """The name of the deepest chunk of a chain, of which each prefix is a chunk."""
    return "".join(chr(97 + place % 26) for place in range(depth))


# ---------------------------------------------------------------- index


def test_an_index_that_grows_is_split_once_and_counts() -> None:
    """No dict of it holds more than some thousands of entries: each growth copies that many."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    index, keys = Index(), random.Random(1)
    copies = [Copy(space, ChunkKey(keys.randbytes(KEY_BYTES)), 0, None) for _ in range(20_000)]
    for count, copy in enumerate(copies, 1):
        index.put(copy)
        index.put(copy)
        assert len(index) == count
    assert max(map(len, index._maps)) < 5000
    assert all(index.get(copy.key) is copy for copy in copies)
    assert not index.remove(replace_key(copies[0]))
    for copy in copies[:10_000]:
        assert index.remove(copy)
        assert not index.remove(copy)
    assert set(index) == set(copies[10_000:])
    assert len(index) == 10_000
    popped = {index.pop_any() for _ in range(10_000)}
    assert popped == set(copies[10_000:])
    assert index.pop_any() is None


def replace_key(copy: Copy) -> Copy:
    """Another copy of the same key."""
    return Copy(copy.space, copy.key, copy.depth, None)


def test_a_namespace_without_chunks_takes_little() -> None:
    """There may be 65,536 of them."""
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    sizes = [sys.getsizeof(space), sys.getsizeof(space.index)]
    for index in space.index.values():
        sizes += [
            sys.getsizeof(index),
            sys.getsizeof(index._maps),
            *map(sys.getsizeof, index._maps),
        ]
    assert sum(sizes) < 1000


# ---------------------------------------------------------------- doomed chains


def test_below_a_doomed_head_lookups_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 6,000 chunks loses its head: until it is swept, a lookup of all of them, and of
    another chain, looks at some hundred copies, not at all."""
    forest = Forest(slots=6100)
    name = deep(6000)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(SlabSpace, "check", lambda self: None)  # each looks at every slot
        forest.put(*(name[: length + 1] for length in range(6000)), "X", "XY")
    forest.tree.slabs.check()
    path = b"".join(key(name[: length + 1]) for length in range(6000))
    forest.tree.doom(forest.copy(name[0]))
    forest.tree.sweep(10)
    counting = CountingCopies(monkeypatch)
    assert forest.tree.visible_run(forest.space, path) == 0
    assert forest.run("XY") == 2
    assert counting.steps < 400
    counting.steps = 0
    assert not forest.tree.rooted(forest.copy(name))
    assert forest.tree.rooted(forest.copy("XY"))
    assert counting.steps < 6000 // 64 + 64 + 10


@pytest.mark.parametrize("seed", range(30))
def test_hits_are_exact_while_chunks_are_hidden(seed: int) -> None:
    """Random trees, chunks doomed anywhere, some stored again, some swept: a lookup's answer is
    that of a walk from the head, which checks each link."""
    draw = random.Random(seed)
    forest = Forest(slots=400)
    names = [""]
    for _ in range(150):
        name = draw.choice(names[-12:]) + draw.choice("abc")
        names.append(name)
        forest.put(*(name[: n + 1] for n in range(len(name)) if not present(forest, name[: n + 1])))
    for _ in range(12):
        doomed = draw.choice(sorted(n for n in names[1:] if forest.has(n)))
        forest.tree.doom(forest.copy(doomed))
        if draw.random() < 0.5:
            again = draw.choice(names[1:])
            stored = [again[: n + 1] for n in range(len(again))]
            forest.put(*(name for name in stored if not present(forest, name)))
        forest.tree.sweep(draw.randint(0, 5))
        for name in names[1:]:
            assert forest.run(name) == walked(forest, name)


def present(forest: Forest, name: str) -> bool:
    """Whether a store finds the chunk."""
    return forest.tree.current(forest.space, forest.header(name)) is not None


def walked(forest: Forest, name: str) -> int:
    """A lookup's answer, link by link."""
    before: Copy | None = None
    for length in range(len(name)):
        copy = forest.tree.find(forest.space, key(name[: length + 1]))
        if copy is None or not copy.visible() or copy.parent is not before:
            return length
        before = copy
    return len(name)


# ---------------------------------------------------------------- restart


def count_entered(driver: Driver) -> int:
    """Chunks of the NVMe tier that lookups can see."""
    return driver.tier(NVME).chunks


@pytest.mark.parametrize("wide", [False, True], ids=["a chain", "one root"])
def test_what_waited_for_its_root_follows_in_steps(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve chunks come before their root, as a chain or all right below it. When the root is
    found, they follow three an event, though the scan has ended meanwhile; then all hit."""
    monkeypatch.setattr(restoring, "STEP_COPIES", 3)
    disk, first = first_life(chunks=13)
    keys = first.chain(13)
    slots = sorted(disk.slots.items(), key=lambda slot: slot[1].depth)
    if wide:
        slots = [
            (place, replace(header, depth=min(header.depth, 1), parent=above(header.depth, keys)))
            for place, header in slots
        ]
    driver, engine = second_life(disk)
    found = [ScannedSlot(place, header) for place, header in slots]
    driver.scan_batch(found[1:])
    assert count_entered(driver) == 0
    driver.scan_batch(found[:1])
    driver.event(ScanDone(NVME))
    seen = [count_entered(driver)]
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        seen.append(count_entered(driver))
    assert seen[-1] == 13
    assert max(after - before for before, after in pairwise(seen)) <= 3
    assert not driver.tier(NVME).scanning
    assert driver.stats().drops == {}
    assert engine.peek(keys[:2] if wide else keys) == (2 if wide else 13)


def above(depth: int, keys: Any) -> ChunkKey:
    """The parent of a chunk where all but the root hang below the root."""
    return NO_PARENT if depth == 0 else ChunkKey(keys.data[:KEY_BYTES])


def test_what_is_read_and_found_bad_during_the_scan_takes_its_tail_along() -> None:
    """Chunk 1 of 4 turns out corrupt before its child was found: child and grandchild are orphans,
    the slots of all three are free, and what was never on the way stays."""
    disk, _ = first_life()
    driver, engine = second_life(disk)
    found = sorted(disk.found(), key=lambda slot: slot.header.depth if slot.header else 0)
    driver.scan_batch(found[:2])
    driver.scan_batch(found[3:])
    engine.retrieve(engine.chain(2))
    for move in driver.waiting(MoveKind.READ):
        bad = move.header.depth == 1
        driver.end(move, MoveStatus.CORRUPT if bad else MoveStatus.OK)
    driver.run()
    driver.scanned(found[2:3])
    driver.tick()
    assert engine.peek(engine.chain(4)) == 1
    assert driver.tier(NVME).chunks == 1
    assert driver.tier(NVME).slots_used == 1
    assert driver.drops("scan_orphan") == 2


# ---------------------------------------------------------------- namespaces


def test_a_clear_of_many_namespaces_goes_on_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five namespaces, two an event: the answer comes when the last one is in its next epoch and
    that is durable; a second clear waits for its turn, and a new namespace is untouched."""
    monkeypatch.setattr(clearing, "STEP_SPACES", 2)
    driver = Driver(limits(host_slots=16))
    names = [Namespace("org/model", f"r{number}", "test/rows") for number in range(5)]
    engines = [driver.engine(f"e{n}", namespace=name) for n, name in enumerate(names)]
    for engine in engines:
        engine.put(engine.chain(1))
    first, second = driver.clear(), driver.clear()
    seen = [sum(engine.peek(engine.chain(1)) for engine in engines)]
    late = driver.engine("late", namespace=Namespace("org/model", "late", "test/rows"))
    late.put(late.chain(1))
    while driver.service.next_tick_s(driver.now) == 0.0:
        driver.tick()
        seen.append(sum(engine.peek(engine.chain(1)) for engine in engines))
    assert seen[:3] == [3, 1, 0]
    assert driver.answer(ADMIN, first) == Cleared(5, 5)
    assert driver.answer(ADMIN, second) == Cleared(5, 0)
    assert late.peek(late.chain(1)) == 1


def test_statistics_name_some_namespaces_and_the_rest_in_pages() -> None:
    """With 2,500 of them a snapshot names the first 1,000; pages give each once."""
    count = 2500
    spaces = tuple(SpaceRecord("t", n.to_bytes(32, "big"), f"m{n}", "", 0) for n in range(count))
    service = Driver(limits(), spaces).service
    stats = service.stats(0.0)
    assert (len(stats.spaces), stats.spaces_total) == (SPACES_PAGE, count)
    listed = list(stats.spaces)
    while page := service.spaces(len(listed)):
        listed += page
    assert Counter(space.model for space in listed) == Counter(f"m{n}" for n in range(count))


def test_what_a_doom_takes_along_is_forgotten_by_the_policies() -> None:
    """A restart offers each chunk when it is the last of its chain. The head is doomed and all is
    swept: no policy keeps a chunk that is gone, or its memory would be kept too."""
    disk, first = first_life(chunks=13)
    driver, engine = second_life(disk)
    driver.scanned(sorted(disk.found(), key=lambda slot: slot.header.depth if slot.header else 0))
    nvme = driver.service._state.directory.nvme
    assert nvme is not None
    (policy,) = nvme.candidates._copies.values()
    assert isinstance(policy, LeastRecentlyUsed)
    assert len(policy) == 13
    engine.retrieve(first.chain(1))
    for move in driver.waiting(MoveKind.READ):
        driver.end(move, MoveStatus.CORRUPT)
    driver.run()
    driver.tick()
    assert driver.tier(NVME).chunks == 0
    assert len(policy) <= 2


def test_what_is_held_by_a_policy_is_noted_in_many_small_sets() -> None:
    """A set of a million entries that grows copies itself in one event."""
    policy = LeastRecentlyUsed()
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)
    copies = [Copy(space, ChunkKey(n.to_bytes(32, "big")), 0, None) for n in range(20_000)]
    for copy in copies:
        policy.offer(copy)
    assert max(map(len, policy._held)) < 1000
    assert all(policy.holds(copy) for copy in copies)
    assert len(policy) == 20_000


def test_a_swept_chain_leaves_nothing_to_unwind() -> None:
    """Each sweep of a long chain keeps the few copies that have children left, not all it went
    through, which the last sweep would have to go through again."""
    forest = Forest(slots=500)
    name = deep(400)
    forest.put(*(name[: length + 1] for length in range(400)))
    forest.tree.doom(forest.copy(name[0]))
    for _ in range(390):
        assert forest.tree.sweep(1) == 1
        assert len(forest.tree._hidden._copies) == 1
    forest.sweep_all()
    assert forest.used() == 0
