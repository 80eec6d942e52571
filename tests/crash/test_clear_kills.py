"""kill -9 of the daemon at random moments around a clear: what was cleared stays so."""

from __future__ import annotations

import random
import threading
import time

from kvstore.cli_admin import AdminClient
from kvstore.core.errors import KVStoreError
from tests.conftest import StartDaemon
from tests.crash.conftest import POINTS, check_hits
from tests.crash.watch import Watch
from tests.small_engine import WAIT_S, SmallEngine, tokens

CHUNKS = 12
CLEARED, KEPT = "org/cleared", "org/kept"


class Clearing:
    """A clear that a thread asks for; ``answered`` tells whether the daemon has said that it is
    durable, once it has ``ended``."""

    def __init__(self, admin: AdminClient) -> None:
        self.answered = False
        self.ended = threading.Event()
        self._admin = admin
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Wait for the answer, or for the daemon's end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.answered = self._admin.clear(CLEARED, "").namespaces == 1
        except KVStoreError:
            self.answered = False
        self.ended.set()


def clear_s(watch: Watch) -> float:
    """How long a clear takes."""
    with watch.admin() as admin:
        admin.stats()
        start_s = time.monotonic()
        assert admin.clear(CLEARED, "").namespaces == 1
        return time.monotonic() - start_s


def store(engine: SmallEngine, seeds: list[int]) -> None:
    """Store prompts and wait for it."""
    for seed in seeds:
        keys = engine.keys(tokens(CHUNKS, seed))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == CHUNKS


def test_what_was_cleared_stays_cleared_over_a_kill_at_any_moment(
    start_daemon: StartDaemon,
) -> None:
    """Two models on NVMe, one is cleared while one more of its prompts is being stored, and the
    daemon is killed at a random moment around it, or with its answer. Once the clear was
    answered nothing that was asked for before it is ever hit again, over all kills to come;
    unanswered, what is hit is right. The other model keeps all it had."""
    seed = random.randrange(1 << 32)
    randomness = random.Random(seed)
    daemon = start_daemon()
    watch = Watch(daemon)
    gone: list[int] = []
    answers = 0
    with (
        SmallEngine(daemon.socket, 2 * CHUNKS, CLEARED, name="cleared") as cleared,
        SmallEngine(daemon.socket, CHUNKS, KEPT, name="kept") as kept,
    ):
        store(kept, [0])
        store(cleared, [0])
        watch.written()
        whole_s = clear_s(watch)
        for point in range(POINTS // 2):
            fresh = [3 * point + 1, 3 * point + 2]
            store(cleared, fresh)
            if point % 4 < 2:
                watch.written()
            late = cleared.keys(tokens(CHUNKS, 3 * point + 3))
            cleared.fill(late, CHUNKS)
            delay_s = randomness.random() * 2 * whole_s if point % 2 else WAIT_S
            with watch.admin() as admin:
                admin.stats()
                ticket = cleared.begin_store(late, CHUNKS)
                cleared.hits(late)  # its answer comes behind the store: the core has begun it
                clearing = Clearing(admin)
                clearing.ended.wait(delay_s)
                daemon.kill()
                clearing.join()
            what = f"seed {seed} point {point} {delay_s:.6f} s answered {clearing.answered}"
            assert ticket.wait(WAIT_S) is not None, what
            daemon.launch()
            cleared.rejoin(daemon.pid)
            kept.rejoin(daemon.pid)
            daemon.await_ready()
            watch.written()
            if clearing.answered:
                answers += 1
                gone += [*fresh, 3 * point + 3]
            else:
                check_hits(cleared, [*fresh, 3 * point + 3], what, CHUNKS)
            for prompt in gone:
                assert cleared.hits(cleared.keys(tokens(CHUNKS, prompt))) == 0, f"{what} {prompt}"
            assert check_hits(kept, [0], what, CHUNKS) == CHUNKS, what
    assert answers > 0, f"seed {seed}"
