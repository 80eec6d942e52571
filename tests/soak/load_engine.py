"""LoadEngine: an engine that stores, looks up, retrieves, cancels and forgets at random until it is
told to stop, and compares every byte that it is given."""

from __future__ import annotations

import random
from collections import Counter
from multiprocessing.connection import Connection

from kvstore import ChunkKeys
from tests.crash.engine_process import Event, Life, end
from tests.small_engine import WAIT_S, LargeEngine, SmallEngine, tokens

READY_STEP_S = 0.5
LARGE_MODEL = "org/large"
"""The model whose chunks are larger."""


class LoadEngine:
    """One engine's random work on the prompts of its life. ``counts`` is what came of it; "wrong"
    must stay zero."""

    def __init__(self, engine: SmallEngine, life: Life) -> None:
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._life = life
        self._randomness = random.Random(life.name)
        self._number = 0

    def step(self) -> None:
        """One request."""
        if not self._engine.worker.wait_ready(READY_STEP_S):
            self.counts["not ready"] += 1
            return
        chunks = self._randomness.randint(1, self._life.chunks)
        keys = self._engine.keys(tokens(chunks, self._randomness.choice(self._life.seeds)))
        self._number += 1
        if not keys:
            return
        if self._randomness.random() < 0.4:
            self._store(keys)
        else:
            self._retrieve(keys)

    def _store(self, keys: ChunkKeys) -> None:
        self._engine.fill(keys)
        ticket = self._engine.begin_store(keys)
        if self._randomness.random() < 0.1:
            ticket.cancel()
            self.counts["cancelled"] += 1
        outcome = ticket.wait(WAIT_S)
        assert outcome is not None, "a store never ended"
        self.counts["stored"] += sum(outcome.done)
        self.counts["not stored"] += len(keys) - sum(outcome.done)

    def _retrieve(self, keys: ChunkKeys) -> None:
        request = f"r{self._number}"
        found = self._engine.worker.lookup(request, keys).chunks
        self.counts["hits"] += found
        self.counts["misses"] += len(keys) - found
        if self._randomness.random() < 0.1:
            self.counts["forgotten"] += 1
            return
        self._engine.wipe()
        ticket = self._engine.begin_retrieve(keys[:found])
        if self._randomness.random() < 0.1:
            ticket.cancel()
        outcome = ticket.wait(WAIT_S)
        assert outcome is not None, "a retrieve never ended"
        for chunk, done in enumerate(outcome.done):
            self.counts["retrieved" if done else "not retrieved"] += 1
            if done and not self._engine.is_right(keys, chunk):
                self.counts["wrong"] += 1
        if self._randomness.random() < 0.9:
            self._engine.worker.release(request)


def live(life: Life, pipe: Connection) -> None:
    """In the engine's process: work until the pipe says stop, then tell what came of it."""
    kind = LargeEngine if life.work == LARGE_MODEL else SmallEngine
    with kind(life.address, life.chunks, life.work, name=life.name) as engine:
        load = LoadEngine(engine, life)
        pipe.send(Event("registered"))
        while not pipe.poll(0):
            load.step()
        for name, count in load.counts.items():
            pipe.send(Event(name, count, count if name == "wrong" else 0))
    pipe.recv()
    end(pipe)
