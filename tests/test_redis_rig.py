"""The servers and the proxy that other tests rely on do what they say."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_cluster import Sentinels
from tests.redis_proxy import Fault, Proxy
from tests.redis_rig import (
    PASSWORD,
    USER,
    Certificates,
    guarded,
    guarded_url,
    standalone,
    tls_server,
    unix_url,
)  # fmt: skip


def test_a_server_starts_again_on_its_port(private_folder: Path) -> None:
    with standalone(private_folder / "v", maxmemory="64mb") as server:
        assert server.run("SET", "a", "1")
        assert server.names() == [b"a"]
        assert server.run("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"67108864"]
        with redis.Redis.from_url(unix_url(server)) as client:
            assert client.get("a") == b"1"
        server.kill()
        server.start()
        assert server.names() == []


def test_a_guarded_server_takes_the_right_password_only(private_folder: Path) -> None:
    with guarded(private_folder / "v") as server:
        with redis.Redis.from_url(guarded_url(server)) as client:
            assert client.ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(guarded_url(server, password="wrong")).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(server.url).ping()
        assert (USER, PASSWORD) == ("kv", "p@ss:w/rd%#?")


def test_tls_wants_the_clients_certificate(private_folder: Path) -> None:
    files = Certificates.create(private_folder / "pem")
    with tls_server(private_folder / "t", files) as server:
        ours = {"ssl": True, "ssl_ca_certs": str(files.ca)}
        named = ours | {"ssl_certfile": str(files.client), "ssl_keyfile": str(files.client)}
        stranger = ours | {
            "ssl_certfile": str(files.other_client), "ssl_keyfile": str(files.other_client)
        }  # fmt: skip
        assert server.connection(**named).ping()
        for wrong in (ours, stranger, named | {"ssl_ca_certs": str(files.other_ca)}):
            with pytest.raises(redis.ConnectionError):
                server.connection(**wrong).ping()


def test_a_sentinel_promotes_the_replica(private_folder: Path) -> None:
    with Sentinels(private_folder) as sentinels:
        assert sentinels.first.run("SET", "a", "1")
        assert sentinels.fail_over().run("SET", "b", "1")


VALUE = bytes(range(256)) * 64
OTHER = VALUE[::-1]


def test_each_fault_shows_and_ends(private_folder: Path) -> None:
    """What a plain client sees of each, and that it works again afterwards."""
    seen: dict[Fault, Any] = {}
    faults = [fault for fault in Fault if fault is not Fault.DRIP]
    with standalone(private_folder / "v") as server, Proxy(server.port) as proxy:
        for fault in faults:
            proxy.set(Fault.NONE)
            assert ask(proxy, "SET", "a", VALUE) == "OK"
            assert ask(proxy, "SET", "b", OTHER) == "OK"
            with asking(proxy) as client:
                assert client.get("a") == VALUE
                proxy.set(fault)
                proxy.delay_s = 30.0
                seen[fault] = outcome(client)
            if fault not in (Fault.NONE, Fault.REFUSE):
                assert proxy.hit.wait(60.0), fault
        proxy.set(Fault.NONE)
        assert ask(proxy, "GET", "a") == VALUE
        assert proxy.commands["SET"] == 2 * len(faults)
    flipped = VALUE[: len(VALUE) // 2]
    assert seen.pop(Fault.FLIP)[: len(flipped) - 16] == flipped[:-16]
    assert seen == {
        Fault.NONE: VALUE, Fault.SHORT: VALUE[: len(VALUE) // 2], Fault.SWAP: OTHER,
        Fault.OTHER_TYPE: 7, Fault.LATE: 7,
        Fault.ERROR: "ResponseError", Fault.GARBAGE: "InvalidResponse",
        Fault.REFUSE: "ConnectionError", Fault.RESET: "ConnectionError",
        Fault.CUT: "ConnectionError", Fault.BLACK_HOLE: "TimeoutError",
        Fault.DELAY: "TimeoutError",
    }  # fmt: skip


def asking(proxy: Proxy, limit_s: float = 60.0) -> redis.Redis:
    return redis.Redis(
        host="127.0.0.1",
        port=proxy.port,
        protocol=2,
        socket_timeout=limit_s,
        retry=Retry(NoBackoff(), 0),
    )


def ask(proxy: Proxy, *words: str | bytes) -> object:
    with asking(proxy) as client:
        client.response_callbacks.clear()
        reply = client.execute_command(*words)
        return "OK" if reply == b"OK" else reply


def outcome(client: redis.Redis) -> object:
    """The value, or the name of the error."""
    try:
        connection = client.connection_pool.get_connection()
    except redis.RedisError as error:
        return type(error).__name__
    try:
        connection.update_current_socket_timeout(0.3)
        connection.send_command("GET", "a")
        return connection.read_response()
    except redis.RedisError as error:
        return type(error).__name__
    finally:
        client.connection_pool.release(connection)


def test_a_black_hole_takes_no_connection(private_folder: Path) -> None:
    with standalone(private_folder / "v") as server, Proxy(server.port) as proxy:
        proxy.set(Fault.BLACK_HOLE)
        with socket.socket() as client:
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.connect(("127.0.0.1", proxy.port))
        proxy.set(Fault.NONE)
        assert ask(proxy, "PING") == b"PONG"


def test_a_drip_goes_on_as_long_as_it_is_read(private_folder: Path) -> None:
    """Each byte comes in time, the value never does."""
    with standalone(private_folder / "v") as server, Proxy(server.port) as proxy:
        assert ask(proxy, "SET", "a", VALUE) == "OK"
        proxy.set(Fault.DRIP)
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.settimeout(60.0)
            client.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n")
            assert [client.recv(1000) for _ in range(3)] == [b"$", b"1", b"6"]
