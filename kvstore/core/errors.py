"""The exception tree of kvstore.

::

    KVStoreError                 everything that kvstore raises on purpose
    ├── CapacityError            no place left, or a limit reached; try later or ask for less
    ├── ConfigError              a setting that is unknown, malformed or impossible here
    ├── LayoutMismatchError      memory, groups, shards or namespace don't fit together
    ├── ChunkCorruptError        bytes at rest that fail their check; the chunk is a miss now
    ├── TierUnavailableError     a tier that can't be reached, or refuses an operation
    ├── ProtocolError            a frame or message that isn't what the protocol says
    └── SessionLostError         the peer is gone; nothing asked of it will be answered

    InvariantError               a bug in kvstore itself; the daemon stops rather than go on

InvariantError stands apart, so that no handler of what is expected takes a bug for it.
Expected outcomes (a miss, a refused store) are values, not exceptions.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose; its text is one line for a person."""


class CapacityError(KVStoreError):
    """No place left, or a limit reached."""


class ConfigError(KVStoreError):
    """A setting that is unknown, malformed or impossible on this machine."""


class LayoutMismatchError(KVStoreError):
    """Memory, groups, shards or a namespace that don't fit together."""


class ChunkCorruptError(KVStoreError):
    """Bytes at rest that fail their check."""


class TierUnavailableError(KVStoreError):
    """A tier that can't be reached or refuses an operation."""


class ProtocolError(KVStoreError):
    """A frame or message that isn't what the protocol says."""


class SessionLostError(KVStoreError):
    """The peer is gone; nothing asked of it will be answered."""


class InvariantError(Exception):
    """A bug in kvstore itself; no KVStoreError."""
