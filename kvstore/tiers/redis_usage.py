"""RedisUsage: a limit on what one namespace occupies, where the server itself has none.

Per namespace and epoch there is a sorted set of what was written, each with its bytes, and the sum.
Whoever writes adds; whoever sees the sum above the limit takes the lowest entry out of the set,
which only one node can do, and deletes its values. An entry's score is when it was written less
DEPTH_S for each chunk before it, so that of one prompt the tail leaves before the head: a prefix
without its head is worth nothing. Reads don't count as use, as that would be a write for each.

The sum may be a chunk off when a node dies between two commands; it starts again at zero when the
set is empty.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.tiers.redis_batch import Answer, ask_all
from kvstore.tiers.redis_epochs import Space
from kvstore.tiers.redis_lane import Command, pack
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_value import PIECES_MAX
from kvstore.tiers.redis_values import Written

DEPTH_S = 1.0
EVICTIONS_MAX = 64
"""A write; what is still too much leaves with the next one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was written: the name, and what it became."""

    name: bytes
    written: Written

    def pack(self) -> bytes:
        """As a member of the set."""
        return b"%d %d %s" % (self.written.value_bytes, self.written.pieces, self.name)

    @classmethod
    def unpack(cls, member: bytes) -> Entry | None:
        """What ``pack`` made; None for anything else."""
        words = member.split(b" ", 2)
        if len(words) != 3 or not all(w.isdigit() and len(w) < 13 for w in words[:2]):
            return None
        value_bytes, pieces = int(words[0]), int(words[1])
        return cls(words[2], Written(value_bytes, pieces)) if pieces <= PIECES_MAX else None


class RedisUsage:
    """The limit ``namespace_bytes``. Thread-safe. Raises TierUnavailableError."""

    def __init__(
        self, servers: RedisServers, names: RedisNames, namespace_bytes: int, expiry_ms: int
    ) -> None:
        self._servers = servers
        self._names = names
        self._limit_bytes = namespace_bytes
        self._expiry_ms = expiry_ms

    def added(self, space: Space, epoch: int, depth: int, entry: Entry) -> int:
        """Count a chunk that was written, and delete what is too much; how many chunks."""
        names, total = self._names.usage(space, epoch)
        score = int(time.time() - depth * DEPTH_S)
        size = entry.written.value_bytes
        commands: list[Command] = [
            (b"ZADD", names, b"NX", score, entry.pack()),
            (b"INCRBY", total, size),
        ]
        if self._expiry_ms:
            commands += [(b"PEXPIRE", one, self._expiry_ms) for one in (names, total)]
        replies = self._ask(commands)
        sum_bytes = _integer(replies[1])
        if replies[0] == 0:
            sum_bytes = _integer(self._ask([(b"DECRBY", total, size)])[0])
        evicted = 0
        while sum_bytes > self._limit_bytes and evicted < EVICTIONS_MAX:
            popped = self._ask([(b"ZPOPMIN", names)])[0]
            if not (isinstance(popped, list) and popped and isinstance(popped[0], bytes)):
                self._ask([(b"UNLINK", total)])
                break
            sum_bytes = self._delete(total, Entry.unpack(popped[0]), sum_bytes)
            evicted += 1
        return evicted

    def _delete(self, total: bytes, entry: Entry | None, sum_bytes: int) -> int:
        if entry is None:
            return sum_bytes
        pieces = range(entry.written.pieces)
        gone = [entry.name, *(RedisNames.piece(entry.name, number) for number in pieces)]
        commands: list[Command] = [(b"DECRBY", total, entry.written.value_bytes)]
        commands += [(b"UNLINK", name) for name in gone]
        return _integer(self._ask(commands)[0])

    def _ask(self, commands: list[Command]) -> list[Answer]:
        """Commands whose second word is the name."""
        questions = [(c[1] if isinstance(c[1], bytes) else b"", pack(c)) for c in commands]
        return ask_all(self._servers, questions)


def _integer(answer: Answer) -> int:
    if isinstance(answer, KVStoreError):
        raise TierUnavailableError(str(answer)) from answer
    if not isinstance(answer, int):
        raise TierUnavailableError("redis: a sum of bytes is no number")
    return answer
