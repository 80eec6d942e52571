"""Fleet: daemons with folders of their own that share Redis servers, and an engine at each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore import ChunkKeys
from kvstore.cli_admin import AdminClient
from tests.conftest import SETTINGS, RunningDaemon, private_environment
from tests.redis_rig import PAUSE_S, START_DEADLINE_S
from tests.small_engine import SmallEngine, tokens

PATIENT = {
    "KVSTORE_REDIS_TIMEOUT": "20s",
    "KVSTORE_REDIS_CONNECT_TIMEOUT": "20s",
    "KVSTORE_REDIS_PROBE_TIMEOUT": "200ms",
}
"""Tests that aren't about deadlines must not meet one on a slow machine."""
ENGINE_CHUNKS = 128


class Member:
    """A daemon and an engine that it serves."""

    def __init__(self, daemon: RunningDaemon, engine: SmallEngine, admin: AdminClient) -> None:
        self.daemon = daemon
        self.engine = engine
        self._admin = admin

    def stats(self) -> dict[str, Any]:
        """What ``kvstore stats --json`` shows."""
        document: dict[str, Any] = self._admin.stats()
        return document

    def redis(self) -> dict[str, Any]:
        """What the daemon says of its Redis tier."""
        document: dict[str, Any] = self.stats()["redis"]
        return document

    def wait(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Until what it says of its Redis tier meets a condition."""
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not condition(document := self.redis()):
            assert time.monotonic() < deadline_s, document
            time.sleep(PAUSE_S)
        return document

    def wait_up(self) -> None:
        """Until the tier is up."""
        self.wait(lambda redis: redis["state"] == "up")

    def prompt(self, seed: int, chunks: int = 4) -> ChunkKeys:
        """A prompt of this seed."""
        return self.engine.keys(tokens(chunks, seed))

    def store(self, seed: int, chunks: int = 4) -> None:
        """Store a prompt, all of it."""
        keys = self.prompt(seed, chunks)
        self.engine.fill(keys)
        assert self.engine.store(keys).leading_chunks == chunks

    def share(self, *seeds: int, chunks: int = 4) -> None:
        """Store prompts and wait until they are in Redis."""
        before = self.redis()
        for seed in seeds:
            self.store(seed, chunks)
        written = before["chunks_written"] + before["chunks_present"] + len(seeds) * chunks
        self.wait(lambda redis: redis["chunks_written"] + redis["chunks_present"] >= written)

    def load(self, seed: int, chunks: int = 4) -> int:
        """Look a prompt up and retrieve it into wiped memory: how many leading chunks are there.
        Fails where any chunk's bytes aren't its own, or blocks were touched beyond the hit."""
        keys = self.prompt(seed, chunks)
        self.engine.wipe()
        done = self.engine.load(keys)
        assert self.engine.right_chunks(keys) == done, "wrong bytes"
        return done

    def load_all(self, seed: int, chunks: int = 4) -> None:
        """Load a prompt again and again until all of it is there."""
        deadline_s = time.monotonic() + START_DEADLINE_S
        while (done := self.load(seed, chunks)) < chunks:
            assert time.monotonic() < deadline_s, f"{done} of {chunks}; {self.redis()}"
            time.sleep(PAUSE_S)


class Fleet:
    """Starts members; they end with it. ``folder`` needs a short path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """End all members."""
        self._stack.close()

    def member(self, name: str, url: str, **settings: str) -> Member:
        """A daemon of this name with this Redis, and its engine."""
        folder = self._folder / name
        folder.mkdir(mode=0o700, parents=True)
        admin = f"unix:{folder / 'a'}"
        given = {"KVSTORE_REDIS_URL": url, "KVSTORE_ADMIN_ADDRESS": admin}
        given = SETTINGS | PATIENT | given | settings
        daemon = RunningDaemon(folder, private_environment(folder, given), ())
        daemon.start()
        self._stack.callback(self._end, daemon)
        return Member(
            daemon,
            self._stack.enter_context(SmallEngine(daemon.socket, ENGINE_CHUNKS)),
            self._stack.enter_context(AdminClient(admin)),
        )

    def pair(self, url: str, **settings: str) -> tuple[Member, Member]:
        """Two members whose tier is up."""
        both = self.member("a", url, **settings), self.member("b", url, **settings)
        for member in both:
            member.wait_up()
        return both

    @staticmethod
    def _end(daemon: RunningDaemon) -> None:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """A fleet, ended afterwards."""
    made = Fleet(folder)
    try:
        yield made
    finally:
        made.close()
