"""Eviction: how much of a trace each policy hits, at several sizes of a tier.

``python bench/eviction.py [--trace FILE]`` puts each request's chain through a tier's tree of the
core: what it hits is used, the rest is stored. FILE has a JSON object a line with ``hash_ids``, one
for each chunk of the prompt, equal IDs meaning an equal prefix up to and including that chunk
(Mooncake's traces are such). Without one, conversations are made: they share one of a few system
prompts, and come back with all that was said before. Shares are of the chunks of the second half's
requests, when the tier is warm; sizes are of all different chunks. ``block lru`` is no policy of
ours but what is known elsewhere: least recently used, leaf or not, which leaves holes in prefixes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.core.eviction import POLICIES
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey
from kvstore.core.layout import Part
from kvstore.core.limits import TierLimits
from kvstore.core.messages import ChunkHeader, SpaceRecord, TierName
from kvstore.core.slots import Slot
from kvstore.core.spaces import Space
from kvstore.core.tree import Tree

SIZES = (0.01, 0.02, 0.05, 0.10, 0.20)
_SLOT_BYTES = 4096
_HEADER = ChunkHeader(
    ChunkKey(NO_PARENT), ChunkKey(NO_PARENT), 0, "t", b"n", 0, "float32", 16, 0, 1, Part.FULL,
    _SLOT_BYTES, 0,
)  # fmt: skip

Trace = Sequence[Sequence[int]]
Ask = Callable[[Sequence[int]], int]
"""Uses and stores a request's chunks; tells how many of them hit."""


def recorded(file: Path) -> Trace:
    """The requests of a trace."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def generated(requests: int, seed: int) -> Trace:
    """Conversations: a system prompt, then more at each turn; most end soon, some go on."""
    draw = random.Random(seed)
    fresh = iter(range(1 << 60))
    systems = [[next(fresh) for _ in range(draw.randint(2, 20))] for _ in range(8)]
    talks: list[list[int]] = []
    made = []
    for _ in range(requests):
        if talks and draw.random() < 0.6:
            place = len(talks) - 1 - min(len(talks) - 1, int(draw.expovariate(1 / 60)))
            talk = talks.pop(place)
        else:
            talk = list(systems[min(7, int(draw.expovariate(0.7)))])
        talk = talk + [next(fresh) for _ in range(1 + int(draw.expovariate(0.15)))]
        made.append(talk)
        if draw.random() < 0.7:
            talks.append(talk)
    return made


def in_tree(policy: str, slots: int) -> Ask:
    """A tier of the core with one of its policies."""
    tree = Tree(TierName.HOST, TierLimits(1, slots * _SLOT_BYTES), POLICIES[policy])
    space = Space(SpaceRecord("t", b"n", "m", "", 0), 1, persisted=True)

    def ask(request: Sequence[int]) -> int:
        keys = [ChunkKey(chunk.to_bytes(KEY_BYTES, "big")) for chunk in request]
        hit = tree.visible_run(space, b"".join(keys))
        for key in keys[:hit]:
            copy = tree.find(space, key)
            assert copy is not None
            tree.touch(copy)
        parent = keys[hit - 1] if hit else ChunkKey(NO_PARENT)
        for depth in range(hit, len(keys)):
            if not _store(
                tree, space, replace(_HEADER, key=keys[depth], parent=parent, depth=depth)
            ):
                break
            parent = keys[depth]
        return hit

    return ask


def _store(tree: Tree, space: Space, header: ChunkHeader) -> bool:
    """Store one chunk, over as many events as it takes; tells whether there was room."""
    slot = None
    while slot is None:
        tree.begin()
        slot = tree.reserve(space, header)
    if isinstance(slot, Slot):
        tree.landed(slot)
        tree.settled.clear()
        tree.committed.clear()
    return isinstance(slot, Slot)


def block_lru(slots: int) -> Ask:
    """Least recently used whatever hangs on it; a hit ends at the first hole."""
    kept: OrderedDict[int, None] = OrderedDict()

    def ask(request: Sequence[int]) -> int:
        hit = next((n for n, chunk in enumerate(request) if chunk not in kept), len(request))
        for chunk in request:
            kept[chunk] = None
            kept.move_to_end(chunk)
            if len(kept) > slots:
                kept.popitem(last=False)
        return hit

    return ask


def hit_share(trace: Trace, ask: Ask) -> float:
    """The share of the second half's chunks that hit."""
    hits = chunks = 0
    for number, request in enumerate(trace):
        hit = ask(request)
        if number >= len(trace) // 2:
            hits, chunks = hits + hit, chunks + len(request)
    return hits / chunks


def compare(trace: Trace) -> Iterator[dict[str, object]]:
    """A line a size: what each policy hits."""
    unique = len({chunk for request in trace for chunk in request})
    for size in SIZES:
        slots = int(size * unique)
        shares = {name: hit_share(trace, in_tree(name, slots)) for name in POLICIES}
        shares["block lru"] = hit_share(trace, block_lru(slots))
        yield {"size": f"{size:.0%}", "slots": slots} | {
            name: round(share, 3) for name, share in shares.items()
        }


def main() -> None:
    """Print a JSON line a size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trace", type=Path, help="a recorded trace, a JSON object a line")
    parser.add_argument("--requests", type=int, default=8000, help="of a generated one")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    trace = recorded(options.trace) if options.trace else generated(options.requests, options.seed)
    for line in compare(trace):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
