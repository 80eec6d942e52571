"""Answers: what probes found in the remote tier, remembered briefly.

The remote tier isn't prefix-closed and changes without a word, so what is known of it is a byte a
key and part, good for a moment. An answer serves the next lookups of the same chain: one that came
too late for the request that it was made for isn't lost, and a chain that isn't there isn't asked
for again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.limits import RemoteLimits
from kvstore.core.messages import ChunkHeader
from kvstore.core.spaces import Space


@dataclass(frozen=True, slots=True)
class Found:
    """What the remote tier has of a chain, from depth ``first`` on: one byte (0 or 1) a chunk for
    the FULL parts of all shards, and for the WINDOW parts (none where the layout has none), under
    the fleet's ``epoch``."""

    first: int
    epoch: int
    full: bytes
    windows: bytes = b""

    def has(self, part: Part, depth: int) -> bool:
        """Whether a part of the chunk at this depth is there."""
        found = self.full if part is Part.FULL else self.windows
        place = depth - self.first
        return 0 <= place < len(found) and found[place] == 1

    def reach(
        self, local: int, most: int, window_chunks: int, window: Callable[[int], bool]
    ) -> int:
        """The longest hit, up to ``most`` chunks, where the FULL parts of [0, ``local``) are in
        local tiers, and so is the WINDOW part at a depth for which ``window`` says so; 0 where this
        adds nothing."""
        start = local - self.first
        if start < 0:
            return 0
        end = self.full.find(0, start)
        total = min(most, max(local, self.first + (len(self.full) if end < 0 else end)))
        if not window_chunks:
            return total
        size = max(0, total - self.first)
        have = bytearray(self.windows[:size].ljust(size, b"\0"))
        for depth in range(max(self.first, local - window_chunks), min(local, total)):
            have[depth - self.first] |= window(depth)
        whole = b"\1" * window_chunks
        if not self.first:  # a prompt shorter than the window needs those that it has
            return (whole + have).rfind(whole)
        place = have.rfind(whole)
        return self.first + place + window_chunks if place >= 0 else 0


@dataclass(frozen=True, slots=True)
class Remote:
    """A part in the remote tier under the fleet's ``epoch``. The answer that starts with the key
    ``start`` said so, ``place`` chunks behind it; ``chain`` are the chunk's key and, before it,
    those whose windows a hit up to it needs."""

    space: Space
    header: ChunkHeader
    epoch: int
    start: bytes
    place: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    """``found`` of ``keys``, to be believed until ``until_s``."""

    until_s: float
    keys: bytes
    found: Found


class Answers:
    """Answers by namespace and the chain's key at their ``first`` depth, the oldest first."""

    def __init__(self, limits: RemoteLimits) -> None:
        self._limits = limits
        self._answers: OrderedDict[tuple[Space, bytes], _Answer] = OrderedDict()
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, space: Space, keys: bytes, local: int, now: float) -> Found | None:
        """What is known of a chain whose ``keys`` start at an answer's ``first``, of which the
        first ``local`` are in local tiers; None unless that says how far it reaches."""
        answer = self._answers.get((space, keys[:KEY_BYTES]))
        if answer is None or now >= answer.until_s:
            return None
        same = _common(answer.keys, keys)
        known = answer.found.full[:same]
        if same * KEY_BYTES < len(keys) and known.find(0, local) < 0:
            return None
        found = answer.found
        return Found(found.first, found.epoch, known, found.windows[:same])

    def put(self, space: Space, keys: bytes, found: Found, local: int, now: float) -> None:
        """Remember what was found of ``keys``, as far as it reaches behind the first ``local``."""
        end = found.full.find(0, local) + 1 or len(found.full)
        found = Found(found.first, found.epoch, found.full[:end], found.windows[:end])
        self._keep(space, _Answer(now + self._limits.answer_s, keys[: end * KEY_BYTES], found))

    def deny(self, part: Remote, now: float) -> None:
        """A part couldn't be read: for a moment its chunk counts as not there, in the answer that
        promised it, and where all before it is in local tiers by now."""
        until_s = now + self._limits.answer_s
        answer, place = self._answers.get((part.space, part.start)), part.place
        if answer is not None and place < len(answer.found.full):
            found, end = answer.found, (place + 1) * KEY_BYTES
            full = found.full[:place] + b"\0"
            windows = found.windows[:place] + bytes(len(found.windows) > place)
            fewer = Found(found.first, found.epoch, full, windows)
            self._keep(part.space, _Answer(until_s, answer.keys[:end], fewer))
        count = len(part.chain) // KEY_BYTES
        if part.chain[:KEY_BYTES] != part.start:
            none = Found(part.header.depth + 1 - count, part.epoch, bytes(count), bytes(count))
            self._keep(part.space, _Answer(until_s, part.chain, none))

    def expire(self, now: float, most: int) -> None:
        """Forget up to ``most`` answers that aren't believed any more."""
        for _ in range(most):
            oldest = next(iter(self._answers.items()), None)
            if oldest is None or now < oldest[1].until_s:
                return
            self._forget(oldest[0])

    def _keep(self, space: Space, answer: _Answer) -> None:
        name = (space, answer.keys[:KEY_BYTES])
        self._forget(name)
        self._answers[name] = answer
        self._key_bytes += len(answer.keys)
        while (
            len(self._answers) > self._limits.answers_max
            or self._key_bytes > self._limits.answer_bytes_max
        ):
            self._forget(next(iter(self._answers)))

    def _forget(self, name: tuple[Space, bytes]) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None:
            self._key_bytes -= len(answer.keys)


def _common(one: bytes, other: bytes) -> int:
    """How many leading keys two chains share: where a key is the same, so are all before it."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    if one[: high * KEY_BYTES] == other[: high * KEY_BYTES]:
        return high
    while low < high:
        middle = (low + high) // 2
        place = middle * KEY_BYTES
        if one[place : place + KEY_BYTES] == other[place : place + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low
