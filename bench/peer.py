"""Peers: other caches that do the same work as ours, interleaved with it.

A peer is installed from its registry into an environment of its own, together with what kvstore
needs, so that one process there drives both sides with the same interpreter and the same memory.
Without ``--build`` nothing is downloaded; where the environment isn't there, can't be built or
doesn't load, the command says why, skips and exits with 0.

A row is the peer's time by ours, so more than 1 says that the peer takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvstore_vllm.config import environment_folder
from kvstore_vllm.pip_environment import EnvironmentFault, PipEnvironment

from bench.facts import Watch, describe, facts
from bench.harness import MILLI, Bench, Row, Size, heading, number, p50

ROOT = Path(__file__).resolve().parent.parent
_LOAD_S = 120.0
_END_S = 60.0


class PeerServer(ABC):
    """A peer's server process. ``healthy_s`` is how long it took from its start to its first
    answer, which has come when ``__enter__`` returns. A context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.healthy_s = 0.0

    def __enter__(self) -> Self:
        started_s = time.perf_counter()
        self._process = self._start()
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self.healthy_s = time.perf_counter() - started_s
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The one that was started."""
        assert self._process is not None
        return self._process

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def _start(self) -> subprocess.Popen[bytes]:
        """Start the command; where its output goes is the peer's."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait for the first answer; raises with what the process said where none comes."""


class Skip(Exception):
    """The peer can't be measured here; one line says why and what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another cache: its name, the requirement that pip installs, the module that must load,
    what the environment weighs, how it is filled, which libraries a failed load may lack, what
    differs from ours (a line each, printed with the table), and the measurement."""

    name: str
    title: str
    requirement: str
    module: str
    weight: str
    fill: Callable[[PipEnvironment], None]
    libraries: str
    variables: Mapping[str, str]
    differences: tuple[str, ...]
    measure: Callable[[Bench], None]


def main(peer: Peer, argv: Sequence[str] | None = None) -> int:
    """The command of a peer's module; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(peer, arguments)
    folder = (options.environment or environment_folder(peer.name)).absolute()
    try:
        python = prepare(peer, folder, options.build)
    except Skip as skip:
        return _skipped(peer, str(skip), options.json)
    if Path(sys.prefix).resolve() == folder.resolve():
        return _measure(peer, options)
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "connectors")))}
    return subprocess.run(
        [str(python), "-m", f"bench.peer_{peer.name}", *arguments],
        cwd=ROOT, env=os.environ | paths | peer.variables, check=False,
    ).returncode  # fmt: skip


def prepare(peer: Peer, folder: Path, build: bool) -> Path:
    """The Python of the peer's environment, which holds it and loads it.

    Builds the environment where ``build`` says so. Raises Skip where there is none that works.
    """
    wanted = " ".join((peer.requirement, *requirements_of_ours()))
    environment = PipEnvironment(folder, f"kvstore-{peer.name}.stamp", wanted, _report)
    if not environment.is_whole():
        if not build:
            raise Skip(
                f"{folder} holds no environment with {peer.requirement} and this kvstore's "
                f"requirements; --build makes it ({peer.weight})"
            )
        try:
            environment.create()
            peer.fill(environment)
        except (EnvironmentFault, OSError, subprocess.CalledProcessError) as error:
            raise Skip(f"{peer.requirement} can't be installed into {folder}: {error}") from error
        environment.finish()
    _must_load(peer, environment.python)
    return environment.python


def requirements_of_ours() -> list[str]:
    """What kvstore needs, and what its benchmarks need beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["dev"]
    return [*project["dependencies"], *(line for line in extra if line.startswith("pytest"))]


def versus(bench: Bench, peer: Peer, name: str, runs: Sequence[dict[str, list[float]]]) -> Row:
    """A row of a work that both sides did: the peer's time by ours. ``runs`` hold the seconds of
    each call under "ours" and "peer"."""
    ratios = [p50(run["peer"]) / p50(run["ours"]) for run in runs]
    ours, theirs = (p50([p50(run[side]) for run in runs]) * MILLI for side in ("ours", "peer"))
    beside = f"kvstore {number(ours)} ms, {peer.title} {number(theirs)} ms (medians)"
    return bench.row(name, "x", ratios, beside=beside)


def _parse(peer: Peer, arguments: Sequence[str]) -> argparse.Namespace:
    cache = environment_folder(peer.name).parent
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.peer_{peer.name}",
        description=f"Drives the same work through {peer.requirement} and through kvstore.",
    )
    parser.add_argument("--build", action="store_true",
                        help=f"make the environment if it isn't there: {peer.weight}")  # fmt: skip
    parser.add_argument("--environment", type=Path, default=None, metavar="FOLDER",
                        help=f"where it is (default: {environment_folder(peer.name)})")  # fmt: skip
    parser.add_argument("--json", action="store_true",
                        help="one JSON line on stdout, the table on stderr")  # fmt: skip
    parser.add_argument("--size", choices=[size.value for size in Size], default="full",
                        help="small proves that it works; no figure counts")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=cache, help="where scratch files go")
    return parser.parse_args(arguments)


def _must_load(peer: Peer, python: Path) -> None:
    """Raises Skip unless the peer's module can be imported."""
    try:
        tried = subprocess.run(
            [str(python), "-W", "ignore", "-c", f"import {peer.module}"],
            capture_output=True, text=True, timeout=_LOAD_S, check=False, cwd=python.parent,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skip(f"{python} doesn't run: {error}") from error
    if tried.returncode:
        lines = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
        raise Skip(f"{peer.module} doesn't load: {lines[-1]}{peer.libraries}")


def _measure(peer: Peer, options: argparse.Namespace) -> int:
    out = sys.stderr if options.json else sys.stdout
    watch = Watch.begin()
    started_s = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="peer-", dir=options.folder))
    bench = Bench(Size(options.size), folder, out, question=peer.name)
    try:
        print(f"{describe(watch, folder)}; {peer.requirement}", file=out)
        print(f"a figure is {peer.title}'s by kvstore's: 2 x is twice as long or as much", file=out)
        heading(out)
        peer.measure(bench)
        document = facts(watch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in peer.differences:
        print(f"differs: {line}", file=out)
    for warning in watch.warnings():
        print(f"warning: {warning}", file=out)
    print(f"{time.monotonic() - started_s:.0f} s", file=out)
    if options.json:
        rows = [row.document() for row in bench.rows]
        document |= {"size": options.size, "warnings": watch.warnings(), "rows": rows}
        print(json.dumps(_document(peer) | document))
    return 0


def _skipped(peer: Peer, reason: str, as_json: bool) -> int:
    print(f"peer_{peer.name}: skipped: {reason}", file=sys.stderr)
    if as_json:
        print(json.dumps(_document(peer) | {"skipped": reason}))
    return 0


def _document(peer: Peer) -> dict[str, object]:
    return {
        "bench": f"peer_{peer.name}", "peer": peer.requirement, "differences": peer.differences
    }  # fmt: skip


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
