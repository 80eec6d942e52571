"""The daemon's listening socket: one daemon a path, and a private one."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import (
    ConfigError,
    TierUnavailableError,
)
from kvstore.core.messages import (
    Attach,
)
from tests.link_rig import (
    Peer,
    Rig,
    folder,
    running_rig,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


def test_the_socket_is_private(rig: Rig) -> None:
    """Only the daemon's user can connect, or list the folder that the daemon made."""
    path = Path(rig.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_second_daemon_is_refused_and_the_first_goes_on(rig: Rig) -> None:
    """Two daemons are started on one path: the second says who listens there."""
    second = Rig(rig.path)
    second.start()
    second.join()
    assert isinstance(second.failure, TierUnavailableError)
    assert f"another daemon listens there (process {os.getpid()})" in str(second.failure)
    with Peer(rig.path) as peer:
        peer.attach()


def test_a_live_socket_without_our_lock_is_refused() -> None:
    """Somebody deleted the lock file, or another program listens there: never taken over."""
    with folder() as path, socket.socket(socket.AF_UNIX) as other:
        place = str(path / "s.sock")
        other.bind(place)
        other.listen()
        second = Rig(place)
        second.start()
        second.join()
        assert isinstance(second.failure, TierUnavailableError)
        assert "another daemon listens there" in str(second.failure)
        assert Path(place).is_socket()


def test_a_stale_socket_is_replaced() -> None:
    """The former daemon was killed: its socket file is there and nobody listens."""
    with folder() as path:
        place = str(path / "s.sock")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(place)
        with Rig(place) as rig, Peer(place) as peer:
            peer.attach()
            assert len(rig.core.requests(Attach)) == 1
        assert not Path(place).exists()


def test_a_file_in_the_sockets_place_is_left_alone() -> None:
    """A typo in the path must not delete somebody's file."""
    with folder() as path:
        place = path / "s.sock"
        place.write_text("mine")
        rig = Rig(str(place))
        rig.start()
        rig.join()
        assert isinstance(rig.failure, ConfigError)
        assert "isn't a socket" in str(rig.failure)
        assert place.read_text() == "mine"
