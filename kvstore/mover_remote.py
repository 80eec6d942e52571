"""RemoteAsks: what the core asks of the remote tier beside Moves: probes, entries and clears.

Probes have threads of their own, as lookups wait for them; entries and clears share another one,
in order. Each Probe and each RemoteClear is answered exactly once, whatever happens: with an error
where the tier isn't open, refuses, or fails in a way that nobody expected.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvstore.core.errors import KVStoreError
from kvstore.core.guard import guarded
from kvstore.core.remote_messages import (
    Probe,
    Probed,
    RemoteClear,
    RemoteCleared,
    RemoteEffect,
)
from kvstore.tiers.priority import lower_priority
from kvstore.tiers.remote import RemoteTier
from kvstore.tiers.threads import start_thread

_log = logging.getLogger(__name__)

Answer = Callable[[Probed | RemoteCleared], None]
"""Told, in the threads of RemoteAsks or of who asked, of what became of a Probe or RemoteClear."""
NOT_OPEN = "the tier isn't open"

_Queue = queue.SimpleQueue[RemoteEffect | None]


@dataclass(frozen=True, slots=True)
class AskStats:
    """A snapshot: threads that were started and that live, and errors that nobody expected."""

    threads: int
    threads_alive: int
    unexpected_errors: int


class RemoteAsks:
    """Carries out Probes in ``probe_threads`` threads and everything else in one."""

    def __init__(self, answer: Answer, probe_threads: int) -> None:
        self._answer = answer
        self._count = probe_threads
        self._tier: RemoteTier | None = None
        self._probes: _Queue = queue.SimpleQueue()
        self._errands: _Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._unexpected = 0

    def open(self, tier: RemoteTier) -> None:
        """Begin to ask this tier. Raises TierUnavailableError where the system refuses a thread,
        and ``close`` ends the others."""
        for number in range(self._count):
            self._start(f"redis-probe-{number}", self._probes)
        self._start("redis-errand", self._errands)
        with self._lock:
            self._tier = tier

    def close(self) -> None:
        """Answer what was asked, then end the threads. Idempotent."""
        with self._lock:
            self._tier = None
        for _ in range(self._count):
            self._probes.put(None)
        self._errands.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, effect: RemoteEffect) -> None:
        """Carry out an effect soon; returns at once."""
        with self._lock:
            if self._tier is not None:
                (self._probes if isinstance(effect, Probe) else self._errands).put(effect)
                return
        self._tell(_refusal(effect, NOT_OPEN))

    def stats(self) -> AskStats:
        """A snapshot."""
        alive = sum(thread.is_alive() for thread in self._threads)
        return AskStats(len(self._threads), alive, self._unexpected)

    def _start(self, name: str, waiting: _Queue) -> None:
        self._threads.append(start_thread(name, lambda: self._serve(waiting)))

    def _serve(self, waiting: _Queue) -> None:
        lower_priority()
        while (effect := waiting.get()) is not None:
            self._carry_out(effect)

    def _carry_out(self, effect: RemoteEffect) -> None:
        """The outer boundary of everything below: the thread lives on and the core has its
        answer."""
        tier = self._tier
        if tier is None:
            self._tell(_refusal(effect, NOT_OPEN))
            return
        self._tell(guarded(partial(_asked, tier, effect), partial(self._failed, effect)))

    def _failed(self, effect: RemoteEffect, error: Exception) -> Probed | RemoteCleared | None:
        """An error is told by its text where it is one of ours, else only by its kind."""
        if isinstance(error, KVStoreError):
            return _refusal(effect, str(error) or type(error).__name__)
        self._unexpected += 1
        _log.error("redis: %s failed", type(effect).__name__, exc_info=error)
        return _refusal(effect, f"an unexpected {type(error).__name__}")

    def _tell(self, answer: Probed | RemoteCleared | None) -> None:
        if answer is not None:
            self._answer(answer)


def _refusal(effect: RemoteEffect, reason: str) -> Probed | RemoteCleared | None:
    if isinstance(effect, Probe):
        return Probed(effect.id, 0, (), reason)
    if isinstance(effect, RemoteClear):
        return RemoteCleared(effect.number, 0, reason)
    _log.info("redis: a namespace isn't entered, so a clear by model misses it: %s", reason)
    return None


def _asked(tier: RemoteTier, effect: RemoteEffect) -> Probed | RemoteCleared | None:
    if isinstance(effect, Probe):
        return tier.probe(effect)
    if isinstance(effect, RemoteClear):
        return tier.clear(effect)
    tier.enter(effect)
    return None
