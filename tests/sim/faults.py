"""Faults that the core must survive, and how often a world has them.

Through all of what ``Fault`` lists, a retrieve gives the right bytes or says that it didn't; and
once it is over, everything asked is answered, nothing is held any more, and what is stored is
found. Each is counted where it is injected, and each occurs in the seeds that the tests fix.

What isn't injected: hands that report a Move's end early or touch memory afterwards, bits that
flip in host memory (DESIGN: host slots are trusted), and engines that reuse blocks before they are
theirs again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from enum import Enum


class Fault(Enum):
    """What goes wrong, and the loads that are hard to bear."""

    # one Move
    MOVE_SLOW = "a Move of any kind takes up to seconds"
    MOVE_STUCK = "a Move of any kind is stuck for minutes"
    MOVES_OUT_OF_ORDER = "a Move ends before one of its kind that began earlier"
    STORE_FAILS = "STORE fails in the middle: the slot is half written"
    LOAD_FAILS = "LOAD fails in the middle: the engine's blocks are half written"
    READ_FAILS = "READ fails: an I/O error"
    READ_CORRUPT = "READ finds bytes that fail their check"
    READ_FOREIGN = "READ finds another chunk's bytes, which are whole"
    WRITE_FAILS = "WRITE fails: an I/O error, before or after it overwrote something"
    WRITE_NO_SPACE = "WRITE fails: no space, now and then, before or after it overwrote something"
    ERASE_FAILS = "ERASE fails, and the header stays or not"
    # the device
    DISK_FULL = "the file system is full for a while: no slab file can be made"
    DISK_ROOM_AGAIN = "the full file system has room again"
    DEVICE_SLOW = "the NVMe device takes 20 to 100 times as long for a while"
    DEVICE_STALLS = "the NVMe device ends nothing at all for a while"
    MACHINE_SLOW = "copies take 20 to 100 times as long for a while"
    BIT_FLIP_PAYLOAD = "a bit flips at rest, in a payload"
    BIT_FLIP_HEADER = "a bit flips at rest, in a header"
    RECORD_MISPLACED = "two records lie at each other's place"
    # the daemon
    DAEMON_DIES = "the daemon dies: the host tier and all sessions are lost"
    WRITE_TORN = "it dies in a write: header written or not, payload half or whole"
    ERASE_CUT_SHORT = "it dies in an erase, which happened or not"
    MANIFEST_LOST = "it dies before the manifest is durable"
    MANIFEST_KEPT = "it dies after the manifest is durable, before it knows"
    TIER_RESIZED = "it comes back with another size of a tier"
    MANIFEST_FAILS = "the manifest can't be written"
    # the remote tier that daemons share
    REDIS_DOWN = "the remote tier can't be reached from one node, which notices sooner or later"
    REDIS_UP = "it can be reached, for the first time or again"
    REDIS_SLOW = "its answers take 5 to 200 times as long for a while"
    REDIS_FULL = "it refuses writes for a while: out of memory"
    REDIS_LOSES = "it loses values"
    REDIS_DAMAGED = "a bit flips in a value"
    REDIS_MISPLACED = "two values lie under each other's names"
    REDIS_READ_FAILS = "a READ from it fails: reset, timeout"
    REDIS_WRITE_FAILS = "a WRITE to it fails, before or after it was carried out"
    PROBE_FAILS = "a probe ends with an error"
    PROBE_LATE = "a probe's answer comes after the lookup's deadline"
    REDIS_CLEAR_FAILS = "a clear of the fleet fails, with the epochs raised or not"
    EPOCH_RAISED = "another node clears the fleet's chunks while this one is promised some"
    # engines
    PEER_LOST = "a connection breaks"
    PEER_LOST_IN_TRANSFER = "a connection breaks while its Moves run"
    ENGINE_CANCELS = "an engine cancels a transfer"
    ENGINE_FORGETS = "an engine never releases a request"
    ASKED_BLINDLY = "an engine retrieves what it never looked up"
    NEW_REVISION = "an engine's weights are updated in the middle of its requests"
    CLEARED_IN_TRANSFER = "a namespace is cleared while Moves run"
    NONSENSE = "an engine sends what makes no sense: blocks that aren't there, a second register"
    STRANGER = "a connection that never registered asks for something"
    TANGLED = "an engine stores with an impossible place in a chain"
    SHARD_LAGS = "one rank sends late, and its Moves are slow"
    SHARD_FAILS = "half of one rank's Moves fail"
    SHARD_ABSENT = "only some ranks of an engine store or retrieve"
    # loads
    BURST = "a store that is larger than the whole host tier"
    PROMPT_LARGER_THAN_HOST = "a retrieve of more chunks than the host tier holds"
    RETRIEVES_FILL_HOST = "two retrieves of one prompt at a time, together larger than the tier"
    SLAB_CHANGES_OWNER = "a slab goes from one chunk size to another"
    SESSION_LIMIT = "a session stores more at a time than it may"


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities: ``move_*`` a Move, ``*_rate`` an action of the world (one each few
    milliseconds), ``sick_rank`` a worker that joins."""

    move_fails: float = 0.02
    move_slow: float = 0.05
    move_stuck: float = 0.002
    disk_full: float = 0.01
    erase_fails: float = 0.1
    spell_rate: float = 0.02
    flip_rate: float = 0.02
    misplace_rate: float = 0.01
    close_rate: float = 0.01
    crash_rate: float = 0.004
    clear_rate: float = 0.01
    revision_rate: float = 0.002
    persist_fails: float = 0.05
    cancel: float = 0.1
    forget_release: float = 0.2
    nonsense: float = 0.02
    sick_rank: float = 0.1


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Probabilities of what befalls a remote tier: of an action of the world (``*_rate``), or of
    each Move, probe and clear."""

    down_rate: float = 0.01
    slow_rate: float = 0.01
    full_rate: float = 0.005
    lose_rate: float = 0.03
    damage_rate: float = 0.02
    misplace_rate: float = 0.01
    move_fails: float = 0.03
    probe_fails: float = 0.03
    clear_fails: float = 0.2


NONE_OF_FLEET = FleetFaults(**{field.name: 0.0 for field in fields(FleetFaults)})
NONE = Faults(**{field.name: 0.0 for field in fields(Faults)})
"""A world in which nothing goes wrong and nobody leaves."""


def draw(rng: random.Random) -> Faults:
    """Faults of one world: a third have all kinds, a third a few at a higher rate, a third are
    calm."""
    kind = rng.random()
    if kind < 0.34:
        return Faults()
    if kind < 0.67:
        chosen = rng.sample([field.name for field in fields(Faults)], 4)
        return replace(NONE, **{name: 4 * getattr(Faults(), name) for name in chosen})
    return replace(NONE, cancel=0.05, clear_rate=0.002, forget_release=0.1)
