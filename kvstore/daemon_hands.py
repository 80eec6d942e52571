"""The mover and engines' memory, joined to the engine link: what the composition root ties with."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CapacityError, InvariantError, KVStoreError, LayoutMismatchError
from kvstore.core.layout import Layout
from kvstore.core.limits import Limits
from kvstore.core.messages import Move, MoveKind, SessionID
from kvstore.core.remote_messages import RemoteEffect
from kvstore.device.base import Blocks
from kvstore.device.pages import HostPages
from kvstore.device.shm import HostMapping, map_memory
from kvstore.machine import memory_facts
from kvstore.mover import Mover
from kvstore.server_connections import EnginePages
from kvstore.units import format_size

_HOST_READS = (MoveKind.LOAD, MoveKind.WRITE)
_HOST_WRITES = (MoveKind.STORE, MoveKind.READ)


class MappedPages:
    """An engine's memory, mapped, and the pages in it. Owned by its session."""

    def __init__(self, mapping: HostMapping, layout: Layout) -> None:
        self._mapping = mapping
        self._pages = HostPages(mapping.array, layout)

    def gather(self, blocks: Blocks, out: NDArray[np.uint8]) -> None:
        """Copy blocks into ``out``."""
        self._pages.gather(blocks, out)

    def scatter(self, blocks: Blocks, source: NDArray[np.uint8]) -> None:
        """Copy ``source`` into blocks."""
        self._pages.scatter(blocks, source)

    def close(self) -> None:
        """Unmap the memory."""
        self._mapping.close()


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What was read from and written to the host arena so far."""

    reads: int
    read_bytes: int
    writes: int
    write_bytes: int


class Hands:
    """The mover, as the engine link sees it: sessions bring MappedPages."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def attach(self, session: SessionID, pages: EnginePages) -> None:
        """Moves of this session use these pages from now on."""
        if not isinstance(pages, MappedPages):
            raise InvariantError(f"daemon: session {session} brings {type(pages).__name__}")
        self._mover.attach(session, pages)

    def detach(self, session: SessionID) -> None:
        """No Move of this session comes any more."""
        self._mover.detach(session)

    def submit(self, *moves: Move) -> None:
        """Do these Moves, then report them as Moved."""
        self._mover.submit(*moves)

    def remote(self, effect: RemoteEffect) -> None:
        """Ask the remote tier, then report the answer."""
        self._mover.remote(effect)

    def traffic(self) -> HostTraffic:
        """What passed through the host arena; a snapshot."""
        kinds = [kind for lane in self._mover.stats().lanes for kind in lane.kinds.items()]
        reads = [stats for kind, stats in kinds if kind in _HOST_READS]
        writes = [stats for kind, stats in kinds if kind in _HOST_WRITES]
        return HostTraffic(
            reads=sum(stats.moves for stats in reads),
            read_bytes=sum(stats.nbytes for stats in reads),
            writes=sum(stats.moves for stats in writes),
            write_bytes=sum(stats.nbytes for stats in writes),
        )


def open_pages(limits: Limits, fd: int, nbytes: int, layout: Layout) -> MappedPages:
    """Map an engine's memory; runs in a thread of the link. Raises LayoutMismatchError, before
    anything is mapped where no slab could hold a chunk, and CapacityError."""
    reason = limits.too_large(layout)
    if reason:
        raise LayoutMismatchError(reason)
    _check_room(fd, nbytes)
    mapping = map_memory(fd, nbytes)
    try:
        return MappedPages(mapping, layout)
    except KVStoreError:
        mapping.close()
        raise


def _check_room(fd: int, nbytes: int) -> None:
    """Refuse memory whose pages don't exist yet and can't all come to exist: to fault them in would
    end with the kernel killing somebody, likely this process. Raises CapacityError."""
    missing = nbytes - 512 * os.fstat(fd).st_blocks
    available = memory_facts().available_bytes
    if missing > available:
        raise CapacityError(
            f"memory: {format_size(missing)} of {format_size(nbytes)} were never touched, and this "
            f"machine has {format_size(available)} left; register memory that is there"
        )
