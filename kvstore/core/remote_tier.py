"""RemoteTier: whether the tier that nodes share can be used, and who is told."""

from __future__ import annotations

from kvstore.core.errors import InvariantError
from kvstore.core.probing import Probing
from kvstore.core.reads import Reads
from kvstore.core.remote_messages import Probed, RemoteState
from kvstore.core.sharing import Sharing
from kvstore.core.state import State
from kvstore.core.stats import RemoteStats


class RemoteTier:
    """The remote tier's part of the core: probes, writes and reads. While it is down nobody makes
    any, and what waits is answered without it or dropped."""

    def __init__(self, state: State, probing: Probing, sharing: Sharing, reads: Reads) -> None:
        self._state = state
        self._probing = probing
        self._sharing = sharing
        self._reads = reads

    def told(self, event: RemoteState) -> None:
        """It came up or went down; told anew, nothing changes."""
        state = self._state
        if state.limits.remote is None:
            raise InvariantError("there is no remote tier")
        was_up, state.remote_up = state.remote_up, event.up
        state.remote_ups += event.up and not was_up
        if was_up and not event.up:
            self._probing.down()
            self._sharing.down()
            self._reads.step()

    def probed(self, event: Probed) -> None:
        """A probe has ended, of a lookup or for writes."""
        if not self._probing.probed(event):
            self._sharing.probed(event)

    def busy(self) -> bool:
        """Whether lookups wait for it, or writes while it is up."""
        return self._probing.waiting() > 0 or (self._state.remote_up and len(self._sharing) > 0)

    def check(self) -> None:
        """Raise InvariantError unless its parts fit together."""
        self._probing.check()
        self._reads.check()
        limits = self._state.limits.remote
        if len(self._sharing) > (0 if limits is None else limits.backlog_max):
            raise InvariantError("more waits for the remote tier than may")

    def stats(self) -> RemoteStats:
        """A snapshot."""
        probing, sharing = self._probing, self._sharing
        return RemoteStats(
            up=self._state.remote_up,
            hits=probing.hits,
            misses=probing.misses,
            probes=probing.probes,
            probes_failed=probing.failed,
            waiting=probing.waiting(),
            timed_out=probing.timed_out,
            late=probing.late,
            remembered=probing.remembered,
            backlog=len(sharing),
            present=sharing.present,
            written=sharing.written,
        )
