from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("process", "tiers", "traffic", "engines", "spaces", "drops", "link", "spaces_more", "redis", "tenants")
    class DropsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SPACES_MORE_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    traffic: Traffic
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    spaces: _containers.RepeatedCompositeFieldContainer[Space]
    drops: _containers.ScalarMap[str, int]
    link: Link
    spaces_more: int
    redis: Redis
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., spaces: _Optional[_Iterable[_Union[Space, _Mapping]]] = ..., drops: _Optional[_Mapping[str, int]] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., spaces_more: _Optional[int] = ..., redis: _Optional[_Union[Redis, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("version", "pid", "uptime_s", "resident_bytes", "open_files", "threads", "socket", "admin", "state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    ADMIN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    uptime_s: float
    resident_bytes: int
    open_files: int
    threads: int
    socket: str
    admin: str
    state: str
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., open_files: _Optional[int] = ..., threads: _Optional[int] = ..., socket: _Optional[str] = ..., admin: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("name", "slots_used", "slots_total", "bytes_used", "bytes_total", "chunks", "hits", "misses", "evictions", "pinned", "scanning", "full", "mode", "io")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SCANNING_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    name: str
    slots_used: int
    slots_total: int
    bytes_used: int
    bytes_total: int
    chunks: int
    hits: int
    misses: int
    evictions: int
    pinned: int
    scanning: bool
    full: bool
    mode: str
    io: InOut
    def __init__(self, name: _Optional[str] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., bytes_used: _Optional[int] = ..., bytes_total: _Optional[int] = ..., chunks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., pinned: _Optional[int] = ..., scanning: bool = ..., full: bool = ..., mode: _Optional[str] = ..., io: _Optional[_Union[InOut, _Mapping]] = ...) -> None: ...

class Redis(_message.Message):
    __slots__ = ("state", "server", "mode", "nodes", "codec", "raw_bytes", "stored_bytes", "codec_gain", "breaker_openings", "connection_waits", "connection_wait_s", "splits", "evicted", "probes", "probes_failed", "probes_late", "lookups_waiting", "lookups_timed_out", "lookups_remembered", "write_backlog", "chunks_written", "chunks_present")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_GAIN_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPENINGS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_WAITS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    PROBES_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROBES_LATE_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_WAITING_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    state: str
    server: str
    mode: str
    nodes: int
    codec: str
    raw_bytes: int
    stored_bytes: int
    codec_gain: float
    breaker_openings: int
    connection_waits: int
    connection_wait_s: float
    splits: int
    evicted: int
    probes: int
    probes_failed: int
    probes_late: int
    lookups_waiting: int
    lookups_timed_out: int
    lookups_remembered: int
    write_backlog: int
    chunks_written: int
    chunks_present: int
    def __init__(self, state: _Optional[str] = ..., server: _Optional[str] = ..., mode: _Optional[str] = ..., nodes: _Optional[int] = ..., codec: _Optional[str] = ..., raw_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., codec_gain: _Optional[float] = ..., breaker_openings: _Optional[int] = ..., connection_waits: _Optional[int] = ..., connection_wait_s: _Optional[float] = ..., splits: _Optional[int] = ..., evicted: _Optional[int] = ..., probes: _Optional[int] = ..., probes_failed: _Optional[int] = ..., probes_late: _Optional[int] = ..., lookups_waiting: _Optional[int] = ..., lookups_timed_out: _Optional[int] = ..., lookups_remembered: _Optional[int] = ..., write_backlog: _Optional[int] = ..., chunks_written: _Optional[int] = ..., chunks_present: _Optional[int] = ...) -> None: ...

class InOut(_message.Message):
    __slots__ = ("reads", "read_bytes", "read_bytes_s", "read_busy_s", "writes", "write_bytes", "write_bytes_s", "write_busy_s", "erases", "errors")
    READS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_S_FIELD_NUMBER: _ClassVar[int]
    READ_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ERASES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    reads: int
    read_bytes: int
    read_bytes_s: float
    read_busy_s: float
    writes: int
    write_bytes: int
    write_bytes_s: float
    write_busy_s: float
    erases: int
    errors: int
    def __init__(self, reads: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_bytes_s: _Optional[float] = ..., read_busy_s: _Optional[float] = ..., writes: _Optional[int] = ..., write_bytes: _Optional[int] = ..., write_bytes_s: _Optional[float] = ..., write_busy_s: _Optional[float] = ..., erases: _Optional[int] = ..., errors: _Optional[int] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("sessions", "leases", "moves_in_flight", "moves_queued", "write_backlog", "lookups", "lookup_tokens", "hit_tokens", "hit_rate", "stored_chunks", "retrieved_chunks", "lookup", "store", "retrieve", "watchers", "changes_dropped")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    MOVES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MOVES_QUEUED_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    STORED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RETRIEVE_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    leases: int
    moves_in_flight: int
    moves_queued: int
    write_backlog: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    hit_rate: float
    stored_chunks: int
    retrieved_chunks: int
    lookup: Latency
    store: Latency
    retrieve: Latency
    watchers: int
    changes_dropped: int
    def __init__(self, sessions: _Optional[int] = ..., leases: _Optional[int] = ..., moves_in_flight: _Optional[int] = ..., moves_queued: _Optional[int] = ..., write_backlog: _Optional[int] = ..., lookups: _Optional[int] = ..., lookup_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., hit_rate: _Optional[float] = ..., stored_chunks: _Optional[int] = ..., retrieved_chunks: _Optional[int] = ..., lookup: _Optional[_Union[Latency, _Mapping]] = ..., store: _Optional[_Union[Latency, _Mapping]] = ..., retrieve: _Optional[_Union[Latency, _Mapping]] = ..., watchers: _Optional[int] = ..., changes_dropped: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("count", "p50_s", "p90_s", "p99_s", "max_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P90_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    def __init__(self, count: _Optional[int] = ..., p50_s: _Optional[float] = ..., p90_s: _Optional[float] = ..., p99_s: _Optional[float] = ..., max_s: _Optional[float] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "tenant", "model", "alias", "ready", "ranks_registered", "ranks", "sessions", "namespace", "uncached")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RANKS_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tenant: str
    model: str
    alias: str
    ready: bool
    ranks_registered: int
    ranks: int
    sessions: int
    namespace: str
    uncached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., alias: _Optional[str] = ..., ready: bool = ..., ranks_registered: _Optional[int] = ..., ranks: _Optional[int] = ..., sessions: _Optional[int] = ..., namespace: _Optional[str] = ..., uncached: _Optional[_Iterable[str]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("tenant", "tier", "bytes_used", "bytes_quota", "has_quota")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    BYTES_QUOTA_FIELD_NUMBER: _ClassVar[int]
    HAS_QUOTA_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: str
    bytes_used: int
    bytes_quota: int
    has_quota: bool
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[str] = ..., bytes_used: _Optional[int] = ..., bytes_quota: _Optional[int] = ..., has_quota: bool = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("tenant", "model", "alias", "namespace", "epoch", "chunks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    alias: str
    namespace: str
    epoch: int
    chunks: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., alias: _Optional[str] = ..., namespace: _Optional[str] = ..., epoch: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("connections", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    connections: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, connections: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("model", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("namespaces", "chunks", "fleet")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    chunks: int
    fleet: Fleet
    def __init__(self, namespaces: _Optional[int] = ..., chunks: _Optional[int] = ..., fleet: _Optional[_Union[Fleet, _Mapping]] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("namespaces", "error")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    error: str
    def __init__(self, namespaces: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
