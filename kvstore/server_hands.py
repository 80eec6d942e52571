"""What the engine link needs of the rest of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.core.layout import Layout
from kvstore.core.messages import Move, SessionID
from kvstore.core.remote_messages import RemoteEffect
from kvstore.server_connections import EnginePages

OpenPages = Callable[[int, int, Layout], EnginePages]
"""(descriptor, nbytes, layout) -> the mapped and validated memory; blocks, raises KVStoreError or
OSError, and leaves the descriptor to the caller."""
Tenants = Callable[[str, int], str]
"""(credential, user ID) -> the tenant; raises KVStoreError for a credential that names none."""


class Mover(Protocol):
    """The hands, as the engine link knows them."""

    def attach(self, session: SessionID, pages: EnginePages) -> None:
        """Moves of this session use these pages from now on."""

    def detach(self, session: SessionID) -> None:
        """No Move of this session comes any more."""

    def submit(self, *moves: Move) -> None:
        """Do these Moves, then report them as Moved."""

    def remote(self, effect: RemoteEffect) -> None:
        """Ask the remote tier, then report the answer."""
