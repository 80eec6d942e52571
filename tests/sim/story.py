"""Story: the last events and effects of a world, in lines for a person."""

from __future__ import annotations

import dataclasses
from collections import deque
from enum import Enum

from kvstore.core.keys import KEY_BYTES
from kvstore.core.messages import (
    AllMoved,
    Completed,
    Detach,
    Effect,
    Event,
    LookupReply,
    Move,
    Moved,
    Persist,
    Persisted,
    Place,
    Reply,
    Request,
    Retrieve,
    ScanDone,
    Scanned,
    SessionClosed,
    Store,
    Tick,
)

LINES_MAX = 160


class Story:
    """Remembers objects; makes words of them only when asked."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, object]] = deque(maxlen=LINES_MAX)
        self._tick: float | None = None

    def event(self, now: float, event: Event) -> None:
        """Note what the core is told; a Tick only if something comes of it."""
        self._tick = now if isinstance(event, Tick) else None
        if self._tick is None:
            self._lines.append((now, ">", event))

    def effect(self, now: float, effect: Effect) -> None:
        """Note what the core wants."""
        if self._tick is not None:
            self._lines.append((now, ">", Tick()))
            self._tick = None
        self._lines.append((now, "  <", effect))

    def note(self, now: float, text: str) -> None:
        """Note what happens outside."""
        self._lines.append((now, "--", text))

    def text(self) -> str:
        """All that is remembered."""
        return "\n".join(f"{now:10.4f} {mark} {words(what)}" for now, mark, what in self._lines)


def words(what: object) -> str:
    """One line for an event, an effect or a note."""
    match what:
        case Move():
            return _move(what)
        case Reply(session, number, body):
            return f"reply s{session} #{number} {_body(body)}"
        case Request(session, number, message):
            return f"request s{session} #{number} {_message(message)}"
        case Moved() | AllMoved():
            return _moved(what)
        case SessionClosed(session) | Detach(session):
            return f"{type(what).__name__} s{session}"
        case Persist(number, spaces):
            epochs = ", ".join(f"{s.tenant}/{s.model}={s.epoch}" for s in spaces)
            return f"persist {number} ({epochs})"
        case Persisted(number, error):
            return f"persisted {number} {error}"
        case Scanned(slots):
            found = [f"{_place(s.place)}:{_key(s.header.key) if s.header else '-'}" for s in slots]
            return f"scanned {' '.join(found[:12])}{' ...' if len(found) > 12 else ''}"
        case ScanDone(tier):
            return f"scan of {tier.value} done"
    return str(what)


def _moved(what: Moved | AllMoved) -> str:
    moved = what.moved if isinstance(what, AllMoved) else (what,)
    return "; ".join(f"moved {one.move} {one.status.value}" for one in moved)


def _move(move: Move) -> str:
    head = move.header
    blocks = " ".join(f"g{g}:{_blocks(b)}" for g, b in move.blocks)
    session = "" if move.session is None else f" s{move.session}"
    return (
        f"move {move.id} {move.kind.value}{session} {_key(head.key)} depth {head.depth} "
        f"shard {head.shard} {head.part.name} epoch {head.epoch} "
        f"{_place(move.source)} -> {_place(move.target)} {blocks}"
    )


def _place(place: Place | None) -> str:
    if place is None:
        return "engine"
    return f"{place.tier.value}[{place.slab}.{place.index}x{place.slot_bytes}]"


def _body(body: object) -> str:
    match body:
        case Completed(done, cancelled, reason):
            mask = "".join(map(str, done))
            return f"completed {mask}{' cancelled' if cancelled else ''} {reason}"
        case LookupReply(status, chunks):
            return f"{status.name} {chunks}"
    return str(body)


def _message(message: object) -> str:
    name = type(message).__name__
    if isinstance(message, (Store, Retrieve)):
        blocks = " ".join(_blocks(one) for one in message.blocks)
        first = message.first if isinstance(message, Store) else ""
        return f"{name} {message.request} {first} {_keys(message.keys)} {blocks}"
    keys = getattr(message, "keys", None)
    if isinstance(keys, bytes):
        return f"{name} {getattr(message, 'request', '')} {_keys(keys)}"
    fields: dict[str, object] = {}
    if dataclasses.is_dataclass(message):
        fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    fields.pop("layout", None)
    shown = (f"{n}={v.value if isinstance(v, Enum) else v}" for n, v in fields.items())
    return f"{name} {' '.join(shown)}"


def _blocks(packed: bytes) -> str:
    ids = memoryview(packed).cast("I") if len(packed) % 4 == 0 else []
    return "[" + ",".join("-" if i == 0xFFFFFFFF else str(i) for i in ids) + "]"


def _keys(keys: bytes) -> str:
    return ".".join(_key(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES))


def _key(key: bytes) -> str:
    return key.hex()[:6]
