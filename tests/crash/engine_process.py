"""An engine in a process of its own, which a test may kill or stop at any moment of its life."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from tests.small_engine import WAIT_S, SmallEngine, tokens

STORE, RETRIEVE = "store", "retrieve"


@dataclass(frozen=True, slots=True)
class Life:
    """What an engine does: registers, stores or retrieves the prompts of ``seeds`` of ``chunks``
    chunks each, one after the other, and ends."""

    address: str
    work: str
    seeds: tuple[int, ...]
    chunks: int
    name: str = "mortal"

    def steps(self) -> int:
        """Events that a whole life reports: begun, registered, one a prompt, ended."""
        return 3 + len(self.seeds)


@dataclass(frozen=True, slots=True)
class Event:
    """One step is done: so many chunks of a prompt were stored or retrieved, and ``wrong`` of those
    that were reported as retrieved weren't what they should be."""

    step: str
    chunks: int = 0
    wrong: int = 0


Live = Callable[[Life, Connection], None]
"""What the process does: it sends Events, the last of them "ended"."""


class EngineProcess:
    """A process that lives a Life, by ``live``. A context manager, at whose end it is gone."""

    def __init__(self, life: Life, live: Live | None = None) -> None:
        self.life = life
        self._ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._process = context.Process(target=live or _live, args=(life, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def next_event(self, timeout_s: float = WAIT_S) -> Event | None:
        """The next event; None where none comes in time, or the process is gone."""
        if not self.is_due(timeout_s):
            return None
        try:
            event = self._ours.recv()
        except EOFError:
            return None
        assert isinstance(event, Event)
        return event

    def is_due(self, timeout_s: float) -> bool:
        """Whether the next event has come, or the end; waits at most so long for it."""
        return bool(select.select([self._ours], [], [], timeout_s)[0])

    def rest(self) -> list[Event]:
        """All events up to the end of its life, which must come."""
        events = []
        while not events or events[-1].step != "ended":
            event = self.next_event()
            assert event is not None, f"no event after {events}"
            events.append(event)
        return events

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self._process.pid is not None
        return self._process.pid

    def finish(self) -> list[Event]:
        """Tell a life that has no end of its own to come to one; its last events."""
        self._ours.send("finish")
        return self.rest()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.join()
        self._ours.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a life: so many events have been seen, and so much time has passed since, or the
    next event has come. Nothing depends on how long that really is."""

    events: int
    delay_s: float

    def wait(self, engine: EngineProcess) -> None:
        """Return when the engine has come so far."""
        for _ in range(self.events):
            assert engine.next_event() is not None
        engine.is_due(self.delay_s)


def moments(life: Life, randomness: random.Random) -> Iterator[Moment]:
    """Moments without end all over such a life, in turn over its steps and evenly within each; the
    life is lived once, undisturbed, to know how long its steps take."""
    times_s = [time.monotonic()]
    with EngineProcess(life) as engine:
        for _ in range(life.steps()):
            event = engine.next_event()
            assert event is not None
            assert not event.wrong
            times_s.append(time.monotonic())

    def endless() -> Iterator[Moment]:
        while True:
            for events in range(life.steps()):
                step_s = times_s[events + 1] - times_s[events]
                yield Moment(events, randomness.random() * step_s)

    return endless()


def _live(life: Life, pipe: Connection) -> None:
    pipe.send(Event("begun"))
    with SmallEngine(life.address, life.chunks, name=life.name) as engine:
        pipe.send(Event("registered"))
        for number, seed in enumerate(life.seeds):
            pipe.send(_work(engine, life, number, seed))
    end(pipe)


def end(pipe: Connection) -> None:
    """Tell that life has ended, and stay until the test has taken notice: who is signalled is
    there."""
    pipe.send(Event("ended"))
    with suppress(EOFError):
        pipe.recv()


def _work(engine: SmallEngine, life: Life, number: int, seed: int) -> Event:
    keys = engine.keys(tokens(life.chunks, seed))
    if life.work == STORE:
        engine.fill(keys)
        return Event(STORE, engine.store(keys).leading_chunks)
    # Leases stay until the engine has ended: that, too, must leave nothing behind.
    found = engine.worker.lookup(f"r{number}", keys)
    done = engine.retrieve(keys[: found.chunks]).done
    wrong = [ok and not engine.is_right(keys, chunk) for chunk, ok in enumerate(done)]
    return Event(RETRIEVE, sum(done), sum(wrong))
