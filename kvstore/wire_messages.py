"""Protobuf messages of the engine link to the core's dataclasses and back.

Here a message's *shape* is checked: what it must have for the core to take it at all. Whether
groups, block counts and block IDs fit the registered layout is the core's to say. All reading
functions raise ProtocolError, in one line for the peer, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.changes import Changes, Watch
from kvstore.core.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatchError,
    ProtocolError,
)
from kvstore.core.keys import KEY_BYTES, NO_PARENT, ChunkKey, Namespace
from kvstore.core.layout import (
    GROUPS_MAX,
    LayerGroup,
    Layout,
    Shard,
    TensorSpan,
    TokenRows,
)
from kvstore.core.messages import (
    Body,
    Cancel,
    Cause,
    Completed,
    Done,
    EngineState,
    LookupReply,
    Message,
    Refused,
    Release,
    Retrieve,
    SetRevision,
    Store,
)
from kvstore.core.messages import Lookup as LookupMessage
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import KEYS_MAX, TEXT_CHARACTERS_MAX

_ERRORS: dict[int, type[KVStoreError]] = {
    Cause.LAYOUT: LayoutMismatchError,
    Cause.LIMIT: CapacityError,
    Cause.PROTOCOL: ProtocolError,
    Cause.SETTING: ConfigError,
}
"""What a refusal's cause is to the client; any other is a KVStoreError."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a REGISTER brings beside its descriptor."""

    engine: str
    namespace: Namespace
    layout: Layout
    shard: Shard
    nbytes: int

    def validate(self) -> None:
        """Raise LayoutMismatchError unless shard and layout are sound; takes time with many
        tensors."""
        self.shard.validate()
        self.layout.validate(self.nbytes)


def write_registration(registration: Registration) -> pb.Register:
    """A worker's REGISTER, but for the kind of its memory."""
    message = pb.Register(engine=registration.engine)
    space = registration.namespace
    message.namespace.model = space.model
    message.namespace.revision = space.revision
    message.namespace.format = space.format
    message.namespace.config = space.config
    message.namespace.alias = space.alias
    _write_layout(message.layout, registration.layout)
    shard = registration.shard
    message.shard.tp_rank, message.shard.tp_size = shard.tp_rank, shard.tp_size
    message.shard.pp_rank, message.shard.pp_size = shard.pp_rank, shard.pp_size
    message.shard.replicas, message.shard.nodes = shard.replicas, shard.nodes
    message.memory.nbytes = registration.nbytes
    return message


def check_memory(message: pb.Register) -> None:
    """Raise LayoutMismatchError for a kind of memory that this daemon can't map."""
    if message.memory.kind != pb.Memory.HOST:
        raise LayoutMismatchError(
            "memory: this daemon maps host memory (a memfd) only; "
            f"the engine offers {_memory_kind(message.memory.kind)}"
        )


def read_registration(message: pb.Register) -> Registration:
    """Read a REGISTER; takes time with many tensors."""
    if len(message.layout.groups) > GROUPS_MAX:
        raise LayoutMismatchError(
            f"layout: {len(message.layout.groups)} groups; valid are 1..{GROUPS_MAX}"
        )
    shard, space = message.shard, message.namespace
    return Registration(
        engine=_label("engine", _text("engine", message.engine)),
        namespace=Namespace(
            _label("model", space.model),
            _label("revision", space.revision),
            _label("format", space.format),
            _label("config", space.config),
            _label("alias", space.alias),
        ),
        layout=_read_layout(message.layout),
        shard=Shard(
            shard.tp_rank,
            shard.tp_size,
            shard.pp_rank,
            shard.pp_size,
            shard.replicas,
            shard.nodes,
        ),
        nbytes=message.memory.nbytes,
    )


def read_engine(message: pb.ClientMessage) -> str:
    """The engine that an ATTACH names."""
    return _label("engine", _text("engine", message.engine))


def read_request(message: pb.ClientMessage) -> Message:
    """Read what a registered or attached session asks."""
    reader = _READERS.get(message.kind)
    if reader is None:
        raise ProtocolError(f"message kind {message.kind} isn't one that this session can send")
    return reader(message)


def write_reply(number: int, body: Body) -> bytes:
    """Serialise the answer to message ``number``; 0 is a push."""
    message: pb.DaemonMessage
    if isinstance(body, LookupReply):
        message = pb.DaemonMessage(
            kind=pb.DaemonMessage.LOOKUP, id=number, status=int(body.status), chunks=body.chunks
        )
    elif isinstance(body, Completed):
        message = pb.DaemonMessage(
            kind=pb.DaemonMessage.COMPLETED,
            id=number,
            done=body.done,
            cancelled=body.cancelled,
            reason=body.reason,
        )
    elif isinstance(body, Refused):
        message = pb.DaemonMessage(
            kind=pb.DaemonMessage.REFUSED, id=number, reason=body.reason, cause=body.cause.name
        )
    elif isinstance(body, EngineState):
        message = pb.DaemonMessage(kind=pb.DaemonMessage.ENGINE, id=number)
        message.engine.engine = body.engine
        message.engine.ready = body.ready
        message.engine.namespace = body.namespace
        message.engine.tokens_per_chunk = body.tokens_per_chunk
    elif isinstance(body, Changes):
        message = pb.DaemonMessage(
            kind=pb.DaemonMessage.CHANGES,
            id=number,
            keys=body.keys,
            kinds=body.kinds,
            resync=body.resync,
        )
    elif isinstance(body, Done):
        message = pb.DaemonMessage(kind=pb.DaemonMessage.DONE, id=number)
    else:
        raise ProtocolError(f"no message for an answer of type {type(body).__name__}")
    return message.SerializeToString()


def refused_as(error: BaseException) -> Refused:
    """The answer to a request that failed with this error, in one line."""
    causes = [cause for cause, kind in _ERRORS.items() if isinstance(error, kind)]
    return Refused(" ".join(str(error).split()), Cause(causes[0]) if causes else Cause.OTHER)


def read_refusal(message: pb.DaemonMessage) -> KVStoreError:
    """The error that a REFUSED is to the client."""
    return _ERRORS.get(message.cause, KVStoreError)(message.reason)


def write_hello(number: int, ours: pb.Hello) -> bytes:
    """Serialise this daemon's HELLO, the answer to the client's."""
    message = pb.DaemonMessage(kind=pb.DaemonMessage.HELLO, id=number, hello=ours)
    return message.SerializeToString()


def _read_lookup(message: pb.ClientMessage) -> Message:
    return LookupMessage(_request(message), _keys(message))


def _read_release(message: pb.ClientMessage) -> Message:
    return Release(_request(message))


def _read_store(message: pb.ClientMessage) -> Message:
    parent = message.parent
    if len(parent) not in (0, KEY_BYTES):
        raise ProtocolError(f"parent of {len(parent)} bytes; valid are 0 and {KEY_BYTES}")
    if (message.first == 0) != (not parent or parent == NO_PARENT):
        raise ProtocolError(f"first={message.first} with a parent of {len(parent)} bytes")
    return Store(
        _request(message),
        _keys(message),
        message.first,
        ChunkKey(parent) if parent else NO_PARENT,
        _blocks(message),
    )


def _read_retrieve(message: pb.ClientMessage) -> Message:
    return Retrieve(_request(message), _keys(message), _blocks(message))


def _read_cancel(message: pb.ClientMessage) -> Message:
    return Cancel(message.transfer)


def _read_revision(message: pb.ClientMessage) -> Message:
    return SetRevision(_label("revision", _text("revision", message.revision)))


def _read_watch(message: pb.ClientMessage) -> Message:
    return Watch()


_READERS: dict[int, Callable[[pb.ClientMessage], Message]] = {
    pb.ClientMessage.LOOKUP: _read_lookup,
    pb.ClientMessage.RELEASE: _read_release,
    pb.ClientMessage.STORE: _read_store,
    pb.ClientMessage.RETRIEVE: _read_retrieve,
    pb.ClientMessage.CANCEL: _read_cancel,
    pb.ClientMessage.SET_REVISION: _read_revision,
    pb.ClientMessage.WATCH: _read_watch,
}


def _request(message: pb.ClientMessage) -> str:
    return _text("request", message.request)


def _text(name: str, value: str) -> str:
    if not value or len(value) > TEXT_CHARACTERS_MAX:
        raise ProtocolError(
            f"{name} of {len(value)} characters; valid are 1..{TEXT_CHARACTERS_MAX}"
        )
    return value


def _label(name: str, value: str) -> str:
    """What is shown to people and logged: nothing in it may drive a terminal or forge a line."""
    if len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
        raise ProtocolError(
            f"{name}={value[:64]!r}; valid are up to {TEXT_CHARACTERS_MAX} characters that print"
        )
    return value


def _keys(message: pb.ClientMessage) -> bytes:
    keys = message.keys
    if not keys or len(keys) % KEY_BYTES or len(keys) > KEYS_MAX * KEY_BYTES:
        raise ProtocolError(
            f"keys of {len(keys)} bytes; valid are multiples of {KEY_BYTES} up to {KEYS_MAX} keys"
        )
    return keys


def _blocks(message: pb.ClientMessage) -> tuple[bytes, ...]:
    blocks = tuple(message.blocks)
    if len(blocks) > GROUPS_MAX:
        raise ProtocolError(f"blocks of {len(blocks)} groups; valid are 1..{GROUPS_MAX}")
    for number, packed in enumerate(blocks):
        if len(packed) % 4:
            raise ProtocolError(
                f"blocks of group {number}: {len(packed)} bytes; valid are multiples of 4"
            )
    return blocks


def _memory_kind(kind: int) -> str:
    return "CUDA memory" if kind == pb.Memory.CUDA else "neither"


def _write_layout(message: pb.Layout, layout: Layout) -> None:
    message.dtype = layout.dtype
    message.tokens_per_chunk = layout.tokens_per_chunk
    message.uncached.extend(layout.uncached)
    for group in layout.groups:
        written = message.groups.add(
            name=group.name, tokens_per_block=group.tokens_per_block, window=group.window or 0
        )
        for span in group.tensors:
            tensor = written.tensors.add(
                offset_bytes=span.offset_bytes,
                block_stride_bytes=span.block_stride_bytes,
                block_bytes=span.block_bytes,
                num_blocks=span.num_blocks,
            )
            if span.rows is not None:
                tensor.rows.content = span.rows.content
                tensor.rows.heads = span.rows.heads
                tensor.rows.head_dim = span.rows.head_dim
                tensor.rows.token_stride_bytes = span.rows.token_stride_bytes
                tensor.rows.pairing = span.rows.pairing


def _read_layout(message: pb.Layout) -> Layout:
    return Layout(
        dtype=message.dtype,
        tokens_per_chunk=message.tokens_per_chunk,
        groups=tuple(_read_group(group) for group in message.groups),
        uncached=tuple(_label("uncached", name) for name in message.uncached[:GROUPS_MAX]),
    )


def _read_group(message: pb.LayerGroup) -> LayerGroup:
    return LayerGroup(
        name=_label("group", message.name),
        tokens_per_block=message.tokens_per_block,
        window=message.window or None,
        tensors=tuple(_read_span(span) for span in message.tensors),
    )


def _read_span(message: pb.TensorSpan) -> TensorSpan:
    rows = None
    if message.HasField("rows"):
        rows = TokenRows(
            content=message.rows.content,
            heads=message.rows.heads,
            head_dim=message.rows.head_dim,
            token_stride_bytes=message.rows.token_stride_bytes,
            pairing=message.rows.pairing,
        )
    return TensorSpan(
        offset_bytes=message.offset_bytes,
        block_stride_bytes=message.block_stride_bytes,
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        rows=rows,
    )
