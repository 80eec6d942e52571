"""What goes into the core and what comes out: events, effects, requests and replies. None changes
once made; those made for each chunk aren't declared frozen, which would cost a call a field.

The core is ``handle(event, now) -> effects``. Events report what happened outside; effects say
what the hands are to do. A Request carries one message of a session; the core answers each with
exactly one Reply (a completion of a store or retrieve may come much later). Blocks are given as
packed little-endian u32, one bytes object a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

from kvstore.core.changes import Changes, Watch
from kvstore.core.keys import ChunkKey, Namespace
from kvstore.core.layout import Layout, Part, Shard
from kvstore.core.remote_messages import RemoteCleared, RemoteEffect, RemoteEvent
from kvstore.core.words import Word

SessionID = NewType("SessionID", int)
MoveID = NewType("MoveID", int)
ADMIN = SessionID(0)
"""The session of the daemon's own administration; it never closes."""


class TierName(Word):
    """The tiers, fastest first."""

    HOST = "host"
    NVME = "nvme"
    REDIS = "redis"


LOCAL_TIERS = (TierName.HOST, TierName.NVME)
"""Those that the core keeps an index of; the remote one is probed."""


@dataclass(slots=True, unsafe_hash=True)
class Place:
    """Where a slot's bytes lie: slot ``index`` of slab ``slab``, whose slots are ``slot_bytes``
    apart.

    Host: the byte offset in the arena is slab * slab_bytes + index * slot_bytes. NVMe: file
    ``slab``, byte offset index * slot_bytes. Redis: ``slab`` is the fleet's epoch of the namespace,
    the header says the rest.
    """

    tier: TierName
    slab: int
    index: int
    slot_bytes: int


@dataclass(slots=True, unsafe_hash=True)
class ChunkHeader:
    """What a header at rest says, but lengths, codec and checksums, which the tier adds. Compared
    field by field on every read, ``sequence`` excepted: anything else there is a miss."""

    key: ChunkKey
    parent: ChunkKey
    depth: int
    tenant: str
    namespace: bytes
    epoch: int
    dtype: str
    tokens: int
    shard: int
    shards: int
    part: Part
    payload_bytes: int
    sequence: int


class MoveKind(Word):
    """STORE: engine blocks -> host slot. LOAD: host slot -> engine blocks. READ: lower tier ->
    host slot, verified. WRITE: host slot -> lower tier. ERASE: overwrite the header of a lower
    tier's slot."""

    STORE = "store"
    LOAD = "load"
    READ = "read"
    WRITE = "write"
    ERASE = "erase"


class MoveStatus(Word):
    """How a Move ended. Whatever the status, the hands touch none of its memory or slots
    afterwards.

    OK; CORRUPT: the bytes at rest failed their check; FOREIGN: they are whole, but another
    chunk's; FAILED: an I/O error; NO_SPACE: the device is full.
    """

    OK = "ok"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    FAILED = "failed"
    NO_SPACE = "no space"


@dataclass(slots=True, unsafe_hash=True)
class Move:
    """Effect: move one part of one chunk shard, then report Moved. ``session`` owns the engine
    memory, if any, and ``transfer`` is the number of its store or retrieve.

    ``blocks`` holds, for STORE and LOAD, (group index, packed u32 block IDs in token order) for
    each group of the part. A NULL_BLOCK is skipped by LOAD and never occurs in STORE.
    """

    id: MoveID
    kind: MoveKind
    header: ChunkHeader
    source: Place | None
    target: Place | None
    session: SessionID | None = None
    transfer: int | None = None
    blocks: tuple[tuple[int, bytes], ...] = ()


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Register:
    """A worker brings its shard of the engine's memory, which the server has mapped and validated
    already."""

    engine: str
    tenant: str
    namespace: Namespace
    layout: Layout
    shard: Shard


@dataclass(frozen=True, slots=True)
class Attach:
    """A scheduler without memory joins an engine, which need not exist yet."""

    engine: str
    tenant: str


@dataclass(frozen=True, slots=True)
class SetRevision:
    """The engine's weights were updated: its namespace goes on under another revision."""

    revision: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many leading chunks of ``keys`` are there? Takes or renews the request's lease."""

    request: str
    keys: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """The request needs its hit no longer."""

    request: str


@dataclass(frozen=True, slots=True)
class Store:
    """Keep these chunks: ``keys`` are consecutive, the first at depth ``first`` below
    ``parent``."""

    request: str
    keys: bytes
    first: int
    parent: ChunkKey
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Retrieve:
    """Write these chunks into the engine's blocks."""

    request: str
    keys: bytes
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the transfer that this session asked for under ``transfer``; its Completed follows as
    the acknowledgement."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget all chunks of the namespaces of a tenant that match (None: any). Admin only. ``model``
    matches a namespace's model or its alias."""

    tenant: str | None
    model: str | None


Message = (
    Register | Attach | SetRevision | Lookup | Release | Store | Retrieve | Cancel | Clear | Watch
)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Request:
    """Event: a session sent a message. ``id`` is the session's own number for it; the Reply
    repeats it."""

    session: SessionID
    id: int
    message: Message


@dataclass(frozen=True, slots=True)
class Moved:
    """Event: a Move has ended and the hands hold nothing of it any more."""

    move: MoveID
    status: MoveStatus


@dataclass(frozen=True, slots=True)
class AllMoved:
    """Event: several Moves have ended; no more than were in the hands."""

    moved: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Event: the peer is gone or its connection broke. The core answers with Detach once no Move
    uses its memory."""

    session: SessionID


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. Deadlines and bounded background work (sweeps, demotions) go on."""


@dataclass(frozen=True, slots=True)
class ScannedSlot:
    """One slot found at start: ``header`` is None where it holds nothing valid, so it is free;
    ``damaged`` where it held something once that isn't whole."""

    place: Place
    header: ChunkHeader | None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Scanned:
    """Event: up to 1,000 slots that a tier found at start."""

    slots: tuple[ScannedSlot, ...]


@dataclass(frozen=True, slots=True)
class ScanDone:
    """Event: a tier's scan has ended: its slots that were not seen are free."""

    tier: TierName


@dataclass(frozen=True, slots=True)
class Persisted:
    """Event: the Persist effect of this number is durable (or failed, with the reason)."""

    number: int
    error: str = ""


Event = (
    Request | Moved | AllMoved | SessionClosed | Tick | Scanned | ScanDone | Persisted | RemoteEvent
)


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out and there is nothing to tell."""


class Cause(IntEnum):
    """Why a request was refused, for the error that the client raises; on the wire by value."""

    OTHER = 0
    LAYOUT = 1
    LIMIT = 2
    PROTOCOL = 3
    SETTING = 4


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was refused; ``reason`` is one line for a person."""

    reason: str
    cause: Cause = Cause.OTHER


@dataclass(frozen=True, slots=True)
class EngineState:
    """Reply to Register, Attach and SetRevision, and a push (reply ID 0) whenever it changes.
    ``namespace`` is the digest that keys start from; empty until all shards are registered."""

    engine: str
    ready: bool
    namespace: bytes
    tokens_per_chunk: int


class HitStatus(IntEnum):
    """What a lookup found. PENDING: a remote probe is out, its answer follows as a push."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(frozen=True, slots=True)
class LookupReply:
    """The leading chunks that are there now and, until the lease ends, stay."""

    status: HitStatus
    chunks: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A store or retrieve has ended and its blocks are the engine's again. ``done`` has one byte
    (0 or 1) a chunk.

    ``reason`` says in one line why chunks are not done, when that isn't a plain miss.
    """

    done: bytes
    cancelled: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cleared:
    """A clear is durable: ``chunks`` in ``namespaces`` namespaces are gone from every local
    tier. ``remote`` says what became of the fleet's chunks; None where there is no remote tier."""

    namespaces: int
    chunks: int
    remote: RemoteCleared | None = None


Body = Done | Refused | EngineState | LookupReply | Completed | Cleared | Changes


@dataclass(frozen=True, slots=True)
class Reply:
    """Effect: send this to a session. ``id`` 0 is a push."""

    session: SessionID
    id: int
    body: Body


@dataclass(frozen=True, slots=True)
class Detach:
    """Effect: no Move uses the session's memory any more; unmap it and close the socket."""

    session: SessionID


@dataclass(frozen=True, slots=True)
class SpaceRecord:
    """A namespace of a tenant as the manifest keeps it."""

    tenant: str
    namespace: bytes
    model: str
    alias: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Effect: make these records durable (all of them, they replace what was there), then report
    Persisted."""

    number: int
    spaces: tuple[SpaceRecord, ...]


Effect = Move | Reply | Detach | Persist | RemoteEffect
