"""What a daemon holds: its descriptors and shared mappings as the system knows them, and its
sessions, leases and pins as it says itself. Compared before and after, anything left behind
shows."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.cli_admin import AdminClient
from kvstore.report import Document
from tests.conftest import RunningDaemon
from tests.small_engine import WAIT_S

_OTHERS = ("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything of a daemon that an engine could leave behind."""

    descriptors: dict[str, int]
    memories: tuple[str, ...]
    shared_memory: tuple[str, ...]
    sessions: int
    engines: tuple[str, ...]
    leases: int
    pinned: int
    moves: int


class Watch:
    """Looks at one daemon from outside."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon

    def admin(self) -> AdminClient:
        """A connection to its administration, as a context manager."""
        (line,) = [line for line in self.daemon.lines if line.startswith("admin ")]
        return AdminClient(line.split()[1])

    def stats(self) -> Document:
        """Its figures."""
        with self.admin() as client:
            return client.stats()

    def wait_for(self, condition: Callable[[Document], bool]) -> Document:
        """Its figures, once they meet a condition."""
        until_s = time.monotonic() + WAIT_S
        while True:
            figures = self.stats()
            if condition(figures):
                return figures
            assert time.monotonic() < until_s, figures

    def written(self) -> Document:
        """Its figures, once nothing is on its way to NVMe, nor anything else under way."""
        return self.wait_for(
            lambda s: (
                not (
                    s["traffic"]["write_backlog"]
                    or s["traffic"]["moves_in_flight"]
                    or s["traffic"]["moves_queued"]
                    or any(tier["scanning"] for tier in s["tiers"])
                )
            )
        )

    def holdings(self) -> Holdings:
        """What it holds now."""
        figures = self.stats()
        traffic = figures["traffic"]
        return Holdings(
            self._descriptors(),
            self._memories(),
            tuple(sorted(name for name in os.listdir("/dev/shm") if "kvstore" in name)),
            traffic["sessions"],
            tuple(engine["engine"] for engine in figures["engines"]),
            traffic["leases"],
            sum(tier["pinned"] for tier in figures["tiers"]),
            traffic["moves_in_flight"] + traffic["moves_queued"],
        )

    def idle_holdings(self) -> Holdings:
        """What it holds once nothing is under way: no lease, no pin, and no engine's memory but
        those of the sessions that are open."""
        self.written()
        self.wait_for(lambda s: not s["traffic"]["leases"])
        found = self.holdings()
        assert (found.leases, found.pinned, found.moves) == (0, 0, 0), found
        assert len(found.memories) <= found.sessions, found
        return found

    def wait_until_holds(self, before: Holdings, what: str) -> None:
        """Wait until it holds what it held before, and nothing else."""
        until_s = time.monotonic() + WAIT_S
        while (now := self.holdings()) != before:
            assert time.monotonic() < until_s, f"{what}:\nbefore {before}\nafter  {now}"

    def _descriptors(self) -> dict[str, int]:
        """By kind; without files on disk, which it opens when it likes, and without what gRPC has
        open for administration."""
        engines = self.daemon.socket.removeprefix("unix:")
        table = Path("/proc/net/unix").read_text().splitlines()
        ours = {f"socket:[{line.split()[6]}]" for line in table if line.endswith(f" {engines}")}
        folder = Path(f"/proc/{self.daemon.pid}/fd")
        kinds: Counter[str] = Counter()
        for name in os.listdir(folder):
            try:
                target = os.readlink(folder / name)
            except FileNotFoundError:
                continue
            if target in ours:
                kinds["engine socket"] += 1
            elif not target.startswith((*_OTHERS, str(self.daemon.nvme))):
                kinds[target] += 1
        return dict(kinds)

    def _memories(self) -> tuple[str, ...]:
        """Mappings of memory that it shares with others."""
        maps = Path(f"/proc/{self.daemon.pid}/maps").read_text().splitlines()
        names = [line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) > 5]
        return tuple(sorted(name for name in names if "memfd:" in name or "/dev/shm" in name))
