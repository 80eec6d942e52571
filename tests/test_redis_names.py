"""Names of servers: the system's lookup has no deadline, so nobody but the tier's own thread waits
for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.errors import TierUnavailableError
from kvstore.testing import sample_header
from kvstore.testing.remote_tiers import probe_of
from kvstore.tiers.redis_connect import Login
from kvstore.tiers.redis_hosts import RedisHosts
from kvstore.tiers.redis_settings import RedisSettings
from tests.redis_rig import Certificates, Server, standalone, tls_server, wait_until
from tests.redis_tiers import opened, read, up, write, write_blindly

HEADER = sample_header(1, 5000)


class NameServer:
    """Answers lookups of localhost, and of other.test as the same; once ``hangs`` is set nothing,
    until ``over`` is."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.over = threading.Event()
        self.held = threading.Event()
        self.asked_by: list[str] = []
        self._look_up = socket.getaddrinfo

    def look_up(self, host: Any, *arguments: Any, **named: Any) -> Any:
        if host == "localhost":
            self.asked_by.append(threading.current_thread().name)
            if self.hangs.is_set():
                self.held.set()
                self.over.wait(120.0)
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._look_up("127.0.0.1" if host == "other.test" else host, *arguments, **named)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    yield made
    made.over.set()


@pytest.fixture
def server(private_folder: Path) -> Iterator[Server]:
    with standalone(private_folder / "r") as made:
        yield made


def named(server: Server) -> str:
    return f"redis://localhost:{server.port}"


def test_new_connections_need_no_lookup(server: Server, names: NameServer) -> None:
    """The name server hangs once the server is known: what reads and writes opens connections as
    before, and no thread but the tier's own ever asked."""
    with up(named(server)) as tier:
        names.hangs.set()
        server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        epoch = write(tier, HEADER)
        assert read(tier, HEADER, epoch) is not None
        assert tier.stats().nodes_up == 1
    assert set(names.asked_by) == {"kvstore-redis"}


def test_a_name_server_that_hangs_holds_nobody(server: Server, names: NameServer) -> None:
    """While the tier's own thread is held, operations are refused at once and a stop ends; the
    lookup still hangs then."""
    names.hangs.set()
    with opened(named(server)) as ours:
        assert names.held.wait(60.0)
        with pytest.raises(TierUnavailableError):
            write_blindly(ours.tier, HEADER)
        assert ours.tier.probe(probe_of(HEADER)).error
        assert ours.tier.stats().state == "connecting"
    assert not names.over.is_set()
    assert ours.tier.stats().state == "closed"
    assert set(names.asked_by) == {"kvstore-redis"}


def test_a_server_that_moved_is_found(
    server: Server, private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name leads elsewhere by now: the breaker opens, and the name is looked up anew."""
    look_up, at = socket.getaddrinfo, ["127.0.0.1"]

    def moved(host: Any, *arguments: Any, **settings: Any) -> Any:
        return look_up(at[0] if host == "kv.test" else host, *arguments, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", moved)
    with opened(f"redis://kv.test:{server.port}") as ours:
        ours.wait(True)
        server.kill()
        wait_until(lambda: not ours.is_up, "the tier is down")
        at[0] = "127.0.0.2"
        other = standalone(private_folder / "o", bind="127.0.0.2", port=str(server.port))
        with other:
            ours.wait(True)
            write(ours.tier, HEADER)


def test_what_fails_at_one_port_takes_nothing_from_another(server: Server) -> None:
    """A Sentinel beside a server, by the same name, stops: the server is reached as before."""
    hosts = RedisHosts(RedisSettings(named(server)))
    hosts.find("localhost", server.port, Login()).close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for _ in range(2):
            with pytest.raises(TierUnavailableError):
                hosts.reach("localhost", port, Login())
    assert not hosts.knows("localhost", port)
    hosts.connect("localhost", server.port, Login()).close()


def test_a_certificate_bears_the_name(private_folder: Path, names: NameServer) -> None:
    """It's checked against the name of the address, not against what that led to."""
    files = Certificates.create(private_folder / "pem")
    with tls_server(private_folder / "t", files, tls_auth_clients="no") as server:
        with up(f"rediss://localhost:{server.port}", ca=str(files.ca)) as tier:
            write(tier, HEADER)
        with opened(f"rediss://other.test:{server.port}", ca=str(files.ca)) as ours:
            wait_until(lambda: "certificate" in ours.tier.stats().state, "it is refused")
            assert True not in ours.told
