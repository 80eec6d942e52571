"""RedisEpochs: the fleet's epoch of each namespace, and the registry of namespaces.

The epoch is part of every chunk's name, so raising it makes all chunks of a namespace absent at
once, for every node. It must never fall back to an earlier number, or cleared chunks would return.
A server may lose its keys (eviction, a restart without persistence); an epoch that is missing is
therefore made anew from the clock in microseconds, above any that was there before.

In a Cluster an epoch has COPIES copies in different thirds of the slots, so on different nodes.
Each copy only rises. A clear is done when *every* copy has reached a number above all that any copy
had; a reader takes the highest copy that answers. So every copy alone is high enough to hide what
was cleared, and a lost node doesn't take the namespaces whose epoch it holds with it. Rejected: one
key (a third of the namespaces would go with each node of three), and a quorum (a copy that missed a
clear would have to be told apart).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

from kvstore.core.errors import CapacityError, KVStoreError, TierUnavailableError
from kvstore.tiers.redis_batch import Answer, Question, ask_all
from kvstore.tiers.redis_driver import REDIS_CLUSTER_HASH_SLOTS, key_slot
from kvstore.tiers.redis_lane import pack
from kvstore.tiers.redis_names import RedisNames
from kvstore.tiers.redis_servers import RedisServers
from kvstore.tiers.redis_settings import RedisMode

Space: TypeAlias = tuple[str, bytes]
"""Tenant and namespace."""

COPIES = 3
KNOWN_MAX = 4096
"""Epochs and namespaces remembered; a probe of a forgotten one costs one more round trip."""
_ROUNDS_MAX = 3
_EPOCH_MAX = (1 << 63) - 1
_EPOCH_DIGITS = 19


class RedisEpochs:
    """Epochs and registry. Thread-safe. Raises TierUnavailableError; where a namespace can't be
    entered because the server's memory is full, CapacityError."""

    def __init__(self, servers: RedisServers, names: RedisNames) -> None:
        self._servers = servers
        self._names = names
        self._lock = threading.Lock()
        self._known: dict[Space, int] = {}
        self._entered: dict[Space, bytes] = {}
        self._registered: set[Space] = set()

    def known(self, space: Space) -> int | None:
        """The epoch that was seen last."""
        return self._known.get(space)

    def questions(self, space: Space) -> list[Question]:
        """What to ask along with a probe; ``take`` understands the answers."""
        return [(name, pack((b"GET", name))) for name in self._copies(space)]

    def take(self, space: Space, answers: Sequence[Answer]) -> int | None:
        """The epoch that these answers mean, which is ``known`` from now on; None: there is none
        yet."""
        found = [n for n in map(_number, answers) if n is not None]
        if not found:
            error = next((a for a in answers if isinstance(a, KVStoreError)), None)
            if error is not None and None not in answers:
                raise TierUnavailableError(str(error)) from error
            return None
        epoch = max(found)
        with self._lock:
            if len(self._known) >= KNOWN_MAX and space not in self._known:
                del self._known[next(iter(self._known))]
            self._known[space] = epoch
        return epoch

    def read(self, space: Space) -> int:
        """The epoch, made where there is none."""
        for _ in range(_ROUNDS_MAX):
            epoch = self.take(space, ask_all(self._servers, self.questions(space)))
            if epoch is not None:
                return epoch
            fresh = time.time_ns() // 1000
            asked = [(name, pack((b"SET", name, fresh, b"NX"))) for name in self._copies(space)]
            ask_all(self._servers, asked)
        raise TierUnavailableError("redis: the server keeps no epoch; is its memory full?")

    def raise_above(self, space: Space) -> None:
        """Clear: no chunk that is there now is found afterwards, by anyone."""
        names = self._copies(space)
        found = [_checked(a) for a in ask_all(self._servers, self.questions(space))]
        target = max(*found, time.time_ns() // 1000 if not any(found) else 0) + 1
        steps = [
            (name, pack((b"INCRBY", name, target - own)))
            for name, own in zip(names, found, strict=True)
        ]
        raised = [_checked(a) for a in ask_all(self._servers, steps)]
        if min(raised) < target:
            raise TierUnavailableError("redis: an epoch was lost meanwhile; clear again")
        self.take(space, raised)

    def enter(self, space: Space, model: str, alias: str) -> None:
        """Make a namespace known to the fleet; kept, so that ``enter_again`` does it again."""
        self._enter(space, _packed(space, model, alias))

    def ensure_entered(self, space: Space) -> None:
        """Before a write: a clear by any node must find the namespace. One that nobody has entered
        yet is entered without a model, which every clear of its tenant matches; what is known of a
        model stays."""
        if space not in self._registered:
            self._enter(space, None)

    @property
    def entered(self) -> int:
        """Namespaces that this node entered."""
        return len(self._entered)

    def registered(self) -> int:
        """Namespaces in the registry. The question counts as use, so that a server that evicts by
        use keeps it."""
        name = self._names.spaces
        reply = ask_all(self._servers, [(name, pack((b"HLEN", name)))])[0]
        if isinstance(reply, KVStoreError):
            raise TierUnavailableError(str(reply)) from reply
        return reply if isinstance(reply, int) else 0

    def enter_again(self) -> None:
        """Bring the registry up to date where the server lost it."""
        with self._lock:
            entered = dict(self._entered)
        if entered:
            self._put(entered)

    def _enter(self, space: Space, value: bytes | None) -> None:
        """Enter with this record, or (None) with the one that there is."""
        with self._lock:
            value = value or self._entered.get(space) or _packed(space, "", "")
            if len(self._entered) >= KNOWN_MAX and space not in self._entered:
                oldest = next(iter(self._entered))
                del self._entered[oldest]
                self._registered.discard(oldest)
            self._entered[space] = value
        self._put({space: value})
        with self._lock:
            if space in self._entered:
                self._registered.add(space)

    def matching(self, tenant: str | None, model: str | None) -> list[Space]:
        """The namespaces of a tenant (None: any) with this model or alias (None: any)."""
        name = self._names.spaces
        reply = ask_all(self._servers, [(name, pack((b"HGETALL", name)))])[0]
        if isinstance(reply, KVStoreError):
            raise TierUnavailableError(str(reply)) from reply
        with self._lock:
            values: list[object] = [*self._entered.values()]
        values += reply[1::2] if isinstance(reply, list) else []
        found: dict[Space, list[str]] = {}
        for value in values:
            record = _record(value)
            if record is not None:
                space = record[0], bytes.fromhex(record[1])
                known = found.setdefault(space, record)
                known += [name for name in record[2:] if name not in known[2:]]
        return [space for space, record in found.items() if _matches(record, tenant, model)]

    def _put(self, records: dict[Space, bytes]) -> None:
        """Write records; one without a model never replaces another."""
        name = self._names.spaces
        asked, named = [], []
        for space, value in records.items():
            field = b"%s:%s" % (space[0].encode("utf-8", "surrogatepass"), space[1])
            if value == _packed(space, "", ""):
                asked.append((name, pack((b"HSETNX", name, field, value))))
            else:
                named += [field, value]
        if named:
            asked.append((name, pack((b"HSET", name, *named))))
        for reply in ask_all(self._servers, asked):
            if isinstance(reply, CapacityError):
                raise CapacityError(str(reply)) from reply
            if isinstance(reply, KVStoreError):
                raise TierUnavailableError(str(reply)) from reply

    def _copies(self, space: Space) -> list[bytes]:
        name = self._names.epoch(space)
        if self._servers.mode is not RedisMode.CLUSTER:
            return [name]
        return [_copy_in(name, third) for third in range(COPIES)]


def _packed(space: Space, model: str, alias: str) -> bytes:
    return json.dumps([space[0], space[1].hex(), model, alias]).encode()


def _copy_in(name: bytes, third: int) -> bytes:
    """The first numbered name that lies in this third of the slots."""
    number = 0
    while True:
        copy = b"%s:%d" % (name, number)
        if key_slot(copy) * COPIES // REDIS_CLUSTER_HASH_SLOTS == third:
            return copy
        number += 1


def _number(answer: Answer) -> int | None:
    if isinstance(answer, bytes) and answer.isdigit() and len(answer) <= _EPOCH_DIGITS:
        answer = int(answer)
    return answer if isinstance(answer, int) and 0 <= answer <= _EPOCH_MAX else None


def _checked(answer: Answer) -> int:
    """A copy's number, 0 where it isn't there. A clear needs all of them."""
    if isinstance(answer, KVStoreError):
        raise TierUnavailableError(str(answer)) from answer
    number = 0 if answer is None else _number(answer)
    if number is None:
        raise TierUnavailableError("redis: something else lies where an epoch should")
    return number


def _record(value: object) -> list[str] | None:
    """An entry of the registry, which anybody with access to the server may have written."""
    try:
        record = json.loads(value) if isinstance(value, bytes) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, list) or len(record) != 4:
        return None
    if not all(isinstance(word, str) for word in record):
        return None
    try:
        return record if len(bytes.fromhex(record[1])) == 32 else None
    except ValueError:
        return None


def _matches(record: list[str], tenant: str | None, model: str | None) -> bool:
    names = [name for name in record[2:] if name]
    return tenant in (None, record[0]) and (model is None or not names or model in names)
