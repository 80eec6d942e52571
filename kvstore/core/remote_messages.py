"""What the core and the remote tier's hands say to each other beside Moves, all frozen.

The remote tier isn't a tree: the core keeps no index of it. It is *probed* (which keys are there),
read and written by Moves whose ``Place`` is in ``TierName.REDIS``: ``slab`` is then the fleet's
epoch of the namespace, as a Probed told it; ``index`` and ``slot_bytes`` are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.layout import Part

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Probe:
    """Effect: find out which of ``keys`` (n x 32 bytes) are there, by part, for all of ``shards``;
    then report Probed, whatever happens."""

    id: int
    tenant: str
    namespace: bytes
    keys: bytes
    shards: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class RemoteEnter:
    """Effect: make the namespace known in the remote tier, for clears; nothing is reported."""

    tenant: str
    namespace: bytes
    model: str
    alias: str


@dataclass(frozen=True, slots=True)
class RemoteClear:
    """Effect: raise the fleet's epoch of each namespace that matches (None: any), those that only
    other nodes know included; then report RemoteCleared, whatever happens."""

    number: int
    tenant: str | None
    model: str | None


RemoteEffect = Probe | RemoteEnter | RemoteClear

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Probed:
    """Event: the Probe of this ``id`` has ended. ``found[i]`` has one byte (0 or 1) a key for the
    Probe's ``parts[i]``, under the fleet's ``epoch``; with an error it is empty."""

    id: int
    epoch: int
    found: tuple[bytes, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class RemoteState:
    """Event: the remote tier can be used from now on, or can't; at first it can't."""

    up: bool


@dataclass(frozen=True, slots=True)
class RemoteCleared:
    """Event: the RemoteClear of this ``number`` has ended: ``namespaces`` are in their next
    epoch, unless there is an error."""

    number: int
    namespaces: int
    error: str = ""


RemoteEvent = Probed | RemoteState | RemoteCleared
