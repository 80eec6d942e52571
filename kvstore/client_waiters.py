"""What a thread of a client can wait for: anything that becomes settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.proto_gen import engine_pb2 as pb


class Waiter(Protocol):
    """Anything that becomes settled."""

    @property
    def settled(self) -> bool:
        """Whether there is nothing to wait for any more."""


class Answer:
    """A place for one answer; None once settled: there will be none."""

    __slots__ = ("message", "settled")

    def __init__(self) -> None:
        self.settled = False
        self.message: pb.DaemonMessage | None = None

    def settle(self, message: pb.DaemonMessage | None) -> None:
        """The answer is here."""
        self.message = message
        self.settled = True


class Until:
    """Settled while a condition holds."""

    __slots__ = ("_holds",)

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    @property
    def settled(self) -> bool:
        """Whether the condition holds."""
        return self._holds()


class End:
    """Never settled: a wait for it lasts until the end of the stream, or the time is up."""

    settled = False
