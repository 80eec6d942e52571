from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientMessage(_message.Message):
    __slots__ = ("kind", "id", "request", "keys", "first", "parent", "blocks", "transfer", "revision", "hello", "register", "engine", "credential")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[ClientMessage.Kind]
        HELLO: _ClassVar[ClientMessage.Kind]
        REGISTER: _ClassVar[ClientMessage.Kind]
        ATTACH: _ClassVar[ClientMessage.Kind]
        SET_REVISION: _ClassVar[ClientMessage.Kind]
        LOOKUP: _ClassVar[ClientMessage.Kind]
        RELEASE: _ClassVar[ClientMessage.Kind]
        STORE: _ClassVar[ClientMessage.Kind]
        RETRIEVE: _ClassVar[ClientMessage.Kind]
        CANCEL: _ClassVar[ClientMessage.Kind]
        WATCH: _ClassVar[ClientMessage.Kind]
    UNSPECIFIED: ClientMessage.Kind
    HELLO: ClientMessage.Kind
    REGISTER: ClientMessage.Kind
    ATTACH: ClientMessage.Kind
    SET_REVISION: ClientMessage.Kind
    LOOKUP: ClientMessage.Kind
    RELEASE: ClientMessage.Kind
    STORE: ClientMessage.Kind
    RETRIEVE: ClientMessage.Kind
    CANCEL: ClientMessage.Kind
    WATCH: ClientMessage.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    kind: ClientMessage.Kind
    id: int
    request: str
    keys: bytes
    first: int
    parent: bytes
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    transfer: int
    revision: str
    hello: Hello
    register: Register
    engine: str
    credential: str
    def __init__(self, kind: _Optional[_Union[ClientMessage.Kind, str]] = ..., id: _Optional[int] = ..., request: _Optional[str] = ..., keys: _Optional[bytes] = ..., first: _Optional[int] = ..., parent: _Optional[bytes] = ..., blocks: _Optional[_Iterable[bytes]] = ..., transfer: _Optional[int] = ..., revision: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., engine: _Optional[str] = ..., credential: _Optional[str] = ...) -> None: ...

class DaemonMessage(_message.Message):
    __slots__ = ("kind", "id", "reason", "status", "chunks", "done", "cancelled", "hello", "engine", "keys", "kinds", "resync", "cause")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[DaemonMessage.Kind]
        HELLO: _ClassVar[DaemonMessage.Kind]
        REFUSED: _ClassVar[DaemonMessage.Kind]
        DONE: _ClassVar[DaemonMessage.Kind]
        ENGINE: _ClassVar[DaemonMessage.Kind]
        LOOKUP: _ClassVar[DaemonMessage.Kind]
        COMPLETED: _ClassVar[DaemonMessage.Kind]
        CHANGES: _ClassVar[DaemonMessage.Kind]
    UNSPECIFIED: DaemonMessage.Kind
    HELLO: DaemonMessage.Kind
    REFUSED: DaemonMessage.Kind
    DONE: DaemonMessage.Kind
    ENGINE: DaemonMessage.Kind
    LOOKUP: DaemonMessage.Kind
    COMPLETED: DaemonMessage.Kind
    CHANGES: DaemonMessage.Kind
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OTHER: _ClassVar[DaemonMessage.Cause]
        LAYOUT: _ClassVar[DaemonMessage.Cause]
        LIMIT: _ClassVar[DaemonMessage.Cause]
        PROTOCOL: _ClassVar[DaemonMessage.Cause]
        SETTING: _ClassVar[DaemonMessage.Cause]
    OTHER: DaemonMessage.Cause
    LAYOUT: DaemonMessage.Cause
    LIMIT: DaemonMessage.Cause
    PROTOCOL: DaemonMessage.Cause
    SETTING: DaemonMessage.Cause
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    kind: DaemonMessage.Kind
    id: int
    reason: str
    status: int
    chunks: int
    done: bytes
    cancelled: bool
    hello: Hello
    engine: Engine
    keys: bytes
    kinds: bytes
    resync: bool
    cause: DaemonMessage.Cause
    def __init__(self, kind: _Optional[_Union[DaemonMessage.Kind, str]] = ..., id: _Optional[int] = ..., reason: _Optional[str] = ..., status: _Optional[int] = ..., chunks: _Optional[int] = ..., done: _Optional[bytes] = ..., cancelled: bool = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ..., keys: _Optional[bytes] = ..., kinds: _Optional[bytes] = ..., resync: bool = ..., cause: _Optional[_Union[DaemonMessage.Cause, str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "package", "hash_algorithm", "golden_probe", "process")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_PROBE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    package: str
    hash_algorithm: str
    golden_probe: bytes
    process: int
    def __init__(self, protocol: _Optional[int] = ..., package: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., golden_probe: _Optional[bytes] = ..., process: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("engine", "namespace", "layout", "memory", "shard")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    engine: str
    namespace: Namespace
    layout: Layout
    memory: Memory
    shard: Shard
    def __init__(self, engine: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "revision", "format", "config", "alias")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    format: str
    config: str
    alias: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., format: _Optional[str] = ..., config: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("dtype", "tokens_per_chunk", "groups", "uncached")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    tokens_per_chunk: int
    groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    uncached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dtype: _Optional[str] = ..., tokens_per_chunk: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., uncached: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("name", "tokens_per_block", "window", "tensors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens_per_block: int
    window: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpan]
    def __init__(self, name: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., window: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpan, _Mapping]]] = ...) -> None: ...

class TensorSpan(_message.Message):
    __slots__ = ("offset_bytes", "block_stride_bytes", "block_bytes", "num_blocks", "rows")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    num_blocks: int
    rows: TokenRows
    def __init__(self, offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., rows: _Optional[_Union[TokenRows, _Mapping]] = ...) -> None: ...

class TokenRows(_message.Message):
    __slots__ = ("content", "heads", "head_dim", "token_stride_bytes", "pairing")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIRING_FIELD_NUMBER: _ClassVar[int]
    content: str
    heads: int
    head_dim: int
    token_stride_bytes: int
    pairing: str
    def __init__(self, content: _Optional[str] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., token_stride_bytes: _Optional[int] = ..., pairing: _Optional[str] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("kind", "nbytes", "device_uuid", "ipc_handle", "ipc_offset")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Memory.Kind]
        HOST: _ClassVar[Memory.Kind]
        CUDA: _ClassVar[Memory.Kind]
    UNSPECIFIED: Memory.Kind
    HOST: Memory.Kind
    CUDA: Memory.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    IPC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    kind: Memory.Kind
    nbytes: int
    device_uuid: str
    ipc_handle: bytes
    ipc_offset: int
    def __init__(self, kind: _Optional[_Union[Memory.Kind, str]] = ..., nbytes: _Optional[int] = ..., device_uuid: _Optional[str] = ..., ipc_handle: _Optional[bytes] = ..., ipc_offset: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("tp_rank", "tp_size", "pp_rank", "pp_size", "replicas", "nodes")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    replicas: int
    nodes: int
    def __init__(self, tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., replicas: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "ready", "namespace", "tokens_per_chunk")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    engine: str
    ready: bool
    namespace: bytes
    tokens_per_chunk: int
    def __init__(self, engine: _Optional[str] = ..., ready: bool = ..., namespace: _Optional[bytes] = ..., tokens_per_chunk: _Optional[int] = ...) -> None: ...
