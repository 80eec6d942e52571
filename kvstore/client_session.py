"""The sessions of a client: what a worker and a scheduler of an engine ask of the daemon.

Nothing here raises into an engine's loop but errors of use (KVStoreError at the call). Whatever
happens at the daemon or on the way to it is a miss, or a ticket whose outcome says so.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from kvstore.client_counts import LinkCounts
from kvstore.client_line import Hold, Line
from kvstore.client_link import Link, Ready
from kvstore.client_pushes import PUSHES_MAX, Push
from kvstore.client_tickets import GroupBlocks, Ticket, TransferOutcome
from kvstore.client_watching import ChunkChanges, Watch
from kvstore.core.errors import CapacityError, LayoutMismatchError, ProtocolError
from kvstore.core.keys import (
    NO_PARENT,
    Adapter,
    ChunkKeys,
    ContentItem,
    KeyContext,
    PrefixHasher,
)
from kvstore.core.layout import NULL_BLOCK, Layout
from kvstore.core.messages import HitStatus
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import BLOCKS_BYTES_MAX, KEYS_MAX, TEXT_CHARACTERS_MAX

__all__ = ["Blocks", "LookupResult", "SchedulerSession", "SessionState", "Ticket",
           "TransferOutcome", "WorkerSession"]  # fmt: skip

PENDING_MAX_S = 0.25
"""A push that is owed longer isn't waited for: the lookup is sent again."""

Blocks = Mapping[str, Sequence[int | None]]
"""Group name -> block IDs in token order; None is a null block."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The leading chunks of a lookup's keys that can be retrieved, and the ``tokens`` that they
    save: never the whole prompt, since the model needs its last token."""

    status: HitStatus
    chunks: int
    tokens: int


MISS = LookupResult(HitStatus.MISS, 0, 0)
PENDING = LookupResult(HitStatus.PENDING, 0, 0)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A snapshot of a session: its connection and what it counted.

    ``namespace`` is empty while the engine isn't ready; ``reason`` says why the session isn't
    connected. ``lookups_overdue`` missed their deadline, ``lookups_skipped`` were misses at once
    because the daemon was away, not ready, or owed an answer.
    """

    engine_id: str
    connected: bool
    ready: bool
    namespace: bytes
    tokens_per_chunk: int
    daemon_process: int
    daemon_package: str
    open_tickets: int
    reason: str
    counts: LinkCounts


class RequestHasher:
    """Keys of one request, computed incrementally: feed it the tokens seen so far again and again.

    Empty keys while the engine isn't ready; starts over where its namespace has changed.
    """

    def __init__(self, link: Callable[[], Link | None], context: KeyContext) -> None:
        self._link = link
        self._context = context
        self._hasher: PrefixHasher | None = None

    def keys(self, token_ids: Sequence[int]) -> ChunkKeys:
        """Keys of all full chunks of ``token_ids``; raises ValueError for a token that isn't a
        u32."""
        link = self._link()
        digest = b"" if link is None else link.namespace  # once: it may go at any time
        size = 1 if link is None else max(1, link.tokens_per_chunk)
        if not digest:
            return ChunkKeys(b"", size, len(token_ids))
        hasher = self._hasher
        if hasher is None or hasher.digest != digest or hasher.tokens_per_chunk != size:
            hasher = self._hasher = PrefixHasher(digest, size, self._context)
        return hasher.keys(token_ids)


class SchedulerSession:
    """A session that looks up: of a scheduler, or (see WorkerSession) of a worker.

    Safe to use from several threads; a forked child that uses it gets a connection of its own. A
    context manager.
    """

    def __init__(self, engine_id: str, line: Line, lookup_timeout_s: float, hold: Hold) -> None:
        self.engine_id = engine_id
        self._hold = hold
        self._line = line
        self._lookup_timeout_s = lookup_timeout_s
        self._pending: dict[str, tuple[bytes, int, float]] = {}
        self._watch = Watch()

    def keys(
        self,
        token_ids: Sequence[int],
        salt: str = "",
        adapter: Adapter | None = None,
        items: Sequence[ContentItem] = (),
    ) -> ChunkKeys:
        """One key a full chunk of ``token_ids``; none while the engine isn't ready."""
        return self.hasher(salt, adapter, items).keys(token_ids)

    def hasher(
        self,
        salt: str = "",
        adapter: Adapter | None = None,
        items: Sequence[ContentItem] = (),
    ) -> RequestHasher:
        """Computes one request's keys as it grows."""
        return RequestHasher(self._fresh_link, KeyContext(salt, adapter, tuple(items)))

    def lookup(self, request: str, keys: ChunkKeys) -> LookupResult:
        """How many leading chunks of ``keys`` are there; the daemon keeps them for the request
        until it is released, or a minute after the last lookup.

        PENDING: ask again later, for instance at the next step.
        """
        check_text("request", request)
        if keys.first:
            raise ProtocolError(f"lookup: keys start at chunk {keys.first}; valid is 0")
        data = keys.data
        link = self._line.live()
        if link is None or not data:
            return MISS
        push = self._pushed(link, request, data) if self._pending else Push.OVER
        if push is not Push.OVER:
            return PENDING if push is Push.OWED else MISS
        message = link.lookup(request, data[: KEYS_MAX * 32], self._lookup_timeout_s)
        if message is None or message.status == HitStatus.MISS:
            return MISS
        if message.status == HitStatus.PENDING:
            if len(self._pending) >= PUSHES_MAX:
                self._pending.clear()
            self._pending[request] = (data, message.id, time.monotonic() + PENDING_MAX_S)
            return PENDING
        chunks = min(message.chunks, len(data) // 32)
        tokens = max(0, min(chunks * keys.tokens_per_chunk, keys.num_tokens - 1))
        return LookupResult(HitStatus.HIT, chunks, tokens)

    def release(self, request: str) -> None:
        """The request needs its hit no longer. Never waits."""
        check_text("request", request)
        self._pending.pop(request, None)
        link = self._line.live()
        if link is not None:
            link.release(request)

    def changes(self) -> ChunkChanges:
        """Which chunks the engine's namespace gained and lost since the last call, as far as the
        daemon has told; the first call begins it. Never waits; for one thread."""
        return self._watch.take(self._line.live())

    def set_revision(self, revision: str, timeout_s: float = 2.0) -> bool:
        """The engine's weights are now those of ``revision``: its KV is another namespace.

        Call it in every process of the engine. From the call on nothing is looked up or stored
        under the former revision; until the daemon has said yes, also after a reconnect, lookups
        are misses. Tells whether it has.
        """
        check_text("revision", revision)
        return self._line.set_revision(revision, time.monotonic() + timeout_s)

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the engine is ready (all its ranks registered), waiting at most ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        while True:
            link = self._line.live()
            if link is not None and link.wait_ready(until_s):
                return True
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return False
            time.sleep(min(0.005, remaining_s))

    def state(self) -> SessionState:
        """Where the session stands."""
        link = self._fresh_link()
        known = link if link is not None else self._line.link()
        daemon = None if known is None else known.daemon
        return SessionState(
            engine_id=self.engine_id,
            connected=link is not None,
            ready=link is not None and bool(link.namespace),
            namespace=b"" if link is None else link.namespace,
            tokens_per_chunk=0 if link is None else link.tokens_per_chunk,
            daemon_process=0 if daemon is None else daemon.process,
            daemon_package="" if daemon is None else daemon.package,
            open_tickets=0 if known is None else known.open_tickets(),
            reason=self._line.reason,
            counts=self._line.counts(),
        )

    def close(self, timeout_s: float = 1.0) -> None:
        """End the session and wait, ``timeout_s`` at most, for the daemon to let go of the
        engine's memory; tickets still open then stay so until it has. Idempotent."""
        self._line.close(time.monotonic() + timeout_s)

    def __enter__(self) -> SchedulerSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fresh_link(self) -> Link | None:
        """The live link, with what the daemon has told meanwhile taken in."""
        link = self._line.live()
        if link is None:
            return None
        link.poll()
        return link if link.live() else None

    def _pushed(self, link: Link, request: str, data: bytes) -> Push:
        """How this very lookup stands, if it is pending and not for too long; nothing is sent."""
        pending = self._pending.get(request)
        if pending is not None and pending[0] == data:
            link.poll()
            push = link.pushes.take(pending[1])
            if push is Push.OWED and time.monotonic() < pending[2]:
                return push
            if push is Push.MISS:
                del self._pending[request]
                return push
        self._pending.pop(request, None)
        return Push.OVER


class WorkerSession(SchedulerSession):
    """A session that has registered its shard of the engine's memory: it stores and retrieves as
    well.

    ``blocks`` maps every group's name to the block IDs that hold the chunks' tokens, in token
    order; None stands for a block that isn't there (in a store only in window groups). Until the
    ticket has an outcome the blocks are the daemon's: to read for a store, to write for a retrieve.
    ``ready`` is None or a CUDA event (``query() -> bool``) on the stream that fills or frees the
    blocks; the transfer is sent once it has completed.
    """

    def __init__(
        self, engine_id: str, line: Line, lookup_timeout_s: float, hold: Hold, layout: Layout
    ) -> None:
        super().__init__(engine_id, line, lookup_timeout_s, hold)
        self._layout = layout

    def __enter__(self) -> WorkerSession:
        return self

    def store(
        self, request: str, keys: ChunkKeys, blocks: Blocks, ready: Ready | None = None
    ) -> Ticket:
        """Have the chunks kept. Never waits; a chunk that is there already costs nothing."""
        message = self._message(pb.ClientMessage.STORE, request, keys)
        message.first = keys.first
        if keys.parent != NO_PARENT:
            message.parent = keys.parent
        windows = [group.window is not None for group in self._layout.groups]
        return self._start(message, len(keys), self._pack(keys, blocks, windows), ready)

    def retrieve(
        self, request: str, keys: ChunkKeys, blocks: Blocks, ready: Ready | None = None
    ) -> Ticket:
        """Have the chunks written into the blocks. Never waits; a chunk that isn't there any more,
        and what follows it, fails."""
        message = self._message(pb.ClientMessage.RETRIEVE, request, keys)
        everywhere = [True] * len(self._layout.groups)
        return self._start(message, len(keys), self._pack(keys, blocks, everywhere), ready)

    def _message(
        self, kind: pb.ClientMessage.Kind, request: str, keys: ChunkKeys
    ) -> pb.ClientMessage:
        check_text("request", request)
        if len(keys) > KEYS_MAX:
            raise CapacityError(f"keys: {len(keys)}; valid are up to {KEYS_MAX} a call")
        if keys and keys.tokens_per_chunk != self._layout.tokens_per_chunk:
            raise LayoutMismatchError(
                f"keys: tokens_per_chunk={keys.tokens_per_chunk}; "
                f"the session's is {self._layout.tokens_per_chunk}"
            )
        return pb.ClientMessage(kind=kind, request=request, keys=keys.data)

    def _start(
        self,
        message: pb.ClientMessage,
        chunks: int,
        blocks: tuple[GroupBlocks, ...],
        ready: Ready | None,
    ) -> Ticket:
        message.blocks.extend([group.packed for group in blocks])
        later = ready is not None and not ready.query()
        link = self._line.live()
        if link is None or not chunks:
            ticket = Ticket(chunks, blocks, _NO_CARRIER)
            ticket.settle(b"", False, self._line.reason if chunks else "")
            return ticket
        ticket = Ticket(chunks, blocks, link)
        if later and ready is not None:
            link.hold(ticket, message, ready)
            self._line.wake()
        else:
            link.start(ticket, message)
        return ticket

    def _pack(
        self, keys: ChunkKeys, blocks: Blocks, null_allowed: Sequence[bool]
    ) -> tuple[GroupBlocks, ...]:
        """The block IDs as u32, group by group; raises LayoutMismatchError, in one line, for what
        doesn't fit the layout."""
        layout, packed = self._layout, []
        names = [group.name for group in layout.groups]
        if len(blocks) != len(names) or any(name not in blocks for name in names):
            raise LayoutMismatchError(
                f"blocks: groups {sorted(blocks)}; the layout's are {sorted(names)}"
            )
        for number, name in enumerate(names):
            per_chunk = layout.blocks_per_chunk(number)
            data = _pack_ids(name, blocks[name], null_allowed[number])
            if len(data) != 4 * per_chunk * len(keys):
                raise LayoutMismatchError(
                    f"blocks: group {name!r} has {len(data) // 4} block IDs; {len(keys)} chunks "
                    f"of {per_chunk} blocks need {per_chunk * len(keys)}"
                )
            packed.append(GroupBlocks(name, data, per_chunk))
        if sum(len(group.packed) for group in packed) > BLOCKS_BYTES_MAX:
            raise CapacityError(
                f"blocks: more than {BLOCKS_BYTES_MAX // 4} block IDs in one call; use several"
            )
        return tuple(packed)


class _NoCarrier:
    """Carries tickets that were settled from the start."""

    def poll(self) -> None:
        """Nothing comes."""

    def wait(self, waiter: object, until_s: float) -> None:
        """Nothing to wait for."""

    def cancel(self, ticket: Ticket) -> None:
        """Nothing to stop."""


_NO_CARRIER = _NoCarrier()


def _pack_ids(name: str, ids: Sequence[int | None], null_allowed: bool) -> bytes:
    """u32 of the IDs; a list without null blocks is packed in one go."""
    if isinstance(ids, bytes | bytearray | memoryview | str):
        raise LayoutMismatchError(f"blocks: group {name!r} is {type(ids).__name__}; pass integers")
    try:
        return array("I", cast("Sequence[int]", ids)).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        if None not in ids:
            raise LayoutMismatchError(f"blocks: group {name!r}: {error}") from error
    if not null_allowed:
        raise LayoutMismatchError(
            f"blocks: group {name!r} has null blocks; a store takes them in window groups only"
        )
    return _pack_ids(name, [NULL_BLOCK if block is None else block for block in ids], null_allowed)


def check_text(name: str, value: str) -> None:
    """Raise ProtocolError for a name that the wire doesn't take."""
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_CHARACTERS_MAX:
        raise ProtocolError(f"{name}: {value!r:.80}; valid are 1..{TEXT_CHARACTERS_MAX} characters")
