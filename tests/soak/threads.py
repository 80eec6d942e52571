"""Engines whose threads share sessions, on two daemons that share a server:
``python -m tests.soak.threads --seconds 240``.

Six threads of each engine look up, store, retrieve, cancel, fork, change the revision and attach,
without regard for one another, while daemons and server are killed, stopped, restarted and cleared.
Every chunk that is retrieved is compared, no call may raise, every ticket must settle, and nothing
may be left of any of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore import ChunkKeys, SchedulerSession, Ticket
from tests.conftest import SETTINGS, RunningDaemon, private_environment
from tests.crash.watch import Watch
from tests.redis_rig import Server
from tests.small_engine import SmallEngine, tokens

THREADS, CHUNKS, PROMPTS = 6, 6, 200
LOOKUP_S = 0.3
SETTLE_S = 60.0
"""How long a ticket may be open, and a thread go on, before that counts as hanging."""
PAUSES_S = (0.05, 0.3, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One store or retrieve that is under way, of chunks that lie from ``first`` on."""

    kind: str
    ticket: Ticket
    keys: ChunkKeys
    begun_s: float


class Thread(threading.Thread):
    """One thread of an engine, with chunks of the engine's memory that are its own."""

    def __init__(self, load: Load, side: Side, number: int) -> None:
        super().__init__(daemon=True)
        self.transfer: Transfer | None = None
        self.error = ""
        self._load = load
        self._side = side
        self._number = number
        self._first = number * CHUNKS
        self._randomness = random.Random(load.randomness.random())

    def run(self) -> None:
        """Work until it is told to stop, or something is wrong."""
        try:
            while not self._load.over.is_set():
                if self.transfer is None:
                    self._begin()
                else:
                    self._go_on(self.transfer)
        except Exception:  # noqa: BLE001 (told by the main thread)
            self.error = traceback.format_exc()
            self._load.over.set()

    def _begin(self) -> None:
        """Something new."""
        engine, session = self._side.engine, self._session()
        keys = engine.keys(tokens(CHUNKS, self._randomness.randrange(PROMPTS)))
        chance = self._randomness.random()
        if not keys:
            self._note("not ready")
            time.sleep(0.005)
        elif chance < 0.35:
            engine.fill(keys, self._first)
            self._sent("store", engine.begin_store(keys, self._first), keys)
        elif chance < 0.8:
            found = session.lookup(f"retrieve-{self._first}", keys)
            self._note(f"lookup {found.status.name}")
            wanted = keys if self._randomness.random() < 0.1 else keys[: found.chunks]
            self._sent("retrieve", engine.begin_retrieve(wanted, self._first), wanted)
        elif chance < 0.9:
            session.release(f"retrieve-{self._first}")
        else:
            self._odd(session, keys)

    def _odd(self, session: SchedulerSession, keys: ChunkKeys) -> None:
        """What engines do now and then; one thread each."""
        chance = self._randomness.random()
        if self._number == 0:
            session.changes()
        elif self._number == 1 and chance < 0.1:
            self._side.engine.worker.set_revision(self._randomness.choice(("r1", "r2")), LOOKUP_S)
            self._note("revision")
        elif self._number == 2 and chance < 0.2:
            with self._side.engine.client.attach("e1") as other:
                other.lookup("other", keys)
            self._note("attach")
        elif self._number == 3 and chance < 0.1:
            self._fork(session, keys)
        else:
            session.state()

    def _fork(self, session: SchedulerSession, keys: ChunkKeys) -> None:
        """A child that uses what its parent had, and ends."""
        child = os.fork()
        if not child:
            signal.alarm(int(SETTLE_S))
            try:
                session.lookup("child", keys)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a forked child ended with {status}"
        self._note("fork")

    def _go_on(self, transfer: Transfer) -> None:
        """Wait for a transfer a little, or cancel it; judge what has become of it."""
        if self._randomness.random() < 0.1:
            transfer.ticket.cancel()
        outcome = transfer.ticket.wait(self._randomness.choice((0.0, 0.001, 0.01, 0.3)))
        if outcome is None:
            assert time.monotonic() - transfer.begun_s < SETTLE_S, f"{transfer.kind} hangs"
            return
        self.transfer = None
        for chunk, done in enumerate(outcome.done):
            right = done and self._side.engine.is_right(transfer.keys, chunk, self._first)
            if transfer.kind == "retrieve" and done:
                assert right, f"chunk {chunk} of {transfer.keys!r:.80} is wrong"
            self._note(f"{transfer.kind}d" if done else f"not {transfer.kind}d")

    def _sent(self, kind: str, ticket: Ticket, keys: ChunkKeys) -> None:
        self.transfer = Transfer(kind, ticket, keys, time.monotonic())

    def _session(self) -> SchedulerSession:
        return self._randomness.choice((self._side.engine.worker, self._side.scheduler))

    def _note(self, what: str) -> None:
        self._load.counts[what] += 1


class Side:
    """A daemon of the fleet and its engine."""

    def __init__(self, stack: ExitStack, folder: Path, server: Server) -> None:
        folder.mkdir()
        settings = SETTINGS | {
            "KVSTORE_HOST_SIZE": "16MiB",
            "KVSTORE_HOST_SLAB_SIZE": "2MiB",
            "KVSTORE_NVME_SIZE": "64MiB",
            "KVSTORE_REDIS_URL": f"redis://127.0.0.1:{server.port}",
            "KVSTORE_REDIS_TIMEOUT": "500ms",
        }
        self.daemon = RunningDaemon(folder, private_environment(folder, settings), ())
        self.daemon.start()
        stack.callback(self.daemon.kill)
        self.engine = stack.enter_context(
            SmallEngine(self.daemon.socket, THREADS * CHUNKS, lookup_timeout_s=LOOKUP_S)
        )
        self.scheduler = self.engine.client.attach("e1")

    def end(self) -> None:
        """The engine leaves; nothing of it is left in a daemon that is well, or on its disk."""
        self.engine.client.close()
        watch = Watch(self.daemon)
        watch.wait_for(lambda s: s["traffic"]["sessions"] == 0 and not s["traffic"]["leases"])
        watch.written()
        left = watch.holdings()
        assert (left.pinned, left.moves, left.memories) == (0, 0, ()), left
        figures = watch.stats()
        assert figures["process"]["state"] == "ok", figures["process"]
        assert not {"corrupt", "key_collision"} & figures["drops"].keys(), figures["drops"]
        assert self.daemon.stop() == 0
        assert self.daemon.kvstore("verify").returncode == 0


class Load:
    """One run."""

    def __init__(self, stack: ExitStack, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.over = threading.Event()
        self.randomness = random.Random(seed)
        self._server = stack.enter_context(Server(folder / "server"))
        self._sides = [Side(stack, folder / name, self._server) for name in ("a", "b")]

    def run(self, seconds: float) -> None:
        """Raises AssertionError for what is wrong."""
        threads = [Thread(self, side, n) for side in self._sides for n in range(THREADS)]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + seconds
        troubles: tuple[Callable[[], None], ...] = (
            self._kill, self._restart, self._stop, self._clear, self._kill_server,
            self._stop_server, self._pause, self._pause,
        )  # fmt: skip
        while time.monotonic() < until_s and not self.over.is_set():
            trouble = self.randomness.choice(troubles)
            trouble()
            self.counts[trouble.__name__.strip("_")] += 1
            self._pause()
        self.over.set()
        self._end(threads)

    def _end(self, threads: list[Thread]) -> None:
        for thread in threads:
            thread.join(SETTLE_S)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
            assert not thread.is_alive(), "a thread hangs"
            assert not thread.error, thread.error
            if thread.transfer is not None:
                assert thread.transfer.ticket.wait(SETTLE_S), f"{thread.transfer.kind} hangs"
        for side in self._sides:
            side.end()
        assert self.counts["retrieved"] > 0

    def _kill(self) -> None:
        daemon = self._side().daemon
        daemon.kill()
        self._pause()
        daemon.start()

    def _restart(self) -> None:
        daemon = self._side().daemon
        assert daemon.stop() == 0
        daemon.start()

    def _stop(self) -> None:
        self._stop_process(self._side().daemon.pid)

    def _clear(self) -> None:
        done = self._side().daemon.kvstore("clear", "--all", "--yes", "--json")
        self.counts[f"clear: exit {done.returncode}"] += 1

    def _kill_server(self) -> None:
        self._server.kill()
        self._pause()
        self._server.start()

    def _stop_server(self) -> None:
        assert self._server.process is not None
        self._stop_process(self._server.process.pid)

    def _stop_process(self, process: int) -> None:
        os.kill(process, signal.SIGSTOP)
        self._pause()
        os.kill(process, signal.SIGCONT)

    def _pause(self) -> None:
        self.over.wait(self.randomness.choice(PAUSES_S))

    def _side(self) -> Side:
        return self.randomness.choice(self._sides)


def main() -> int:
    """Run it; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.threads", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=None, help="of what is done to them")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        with ExitStack() as stack:
            load = Load(stack, folder, seed)
            load.run(options.seconds)
    except AssertionError:
        traceback.print_exc()
        for log in sorted(folder.glob("*/daemon.log")):
            print(f"---- {log}", *log.read_text().splitlines()[-30:], sep="\n")
        print(f"threads: FAILED, seed {seed}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"seed {seed}: " + ", ".join(f"{what} {n}" for what, n in sorted(load.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
