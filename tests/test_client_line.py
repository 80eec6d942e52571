"""A session's way back to the daemon: losses are noticed at once, and it joins again by itself."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import Client, HitStatus, SchedulerSession, Shard, create_host_memory
from kvstore.client_line import watchers
from kvstore.core.messages import (
    Attach,
    Completed,
    Detach,
    EngineState,
    Refused,
    Register,
    Reply,
    SessionID,
    SetRevision,
)
from tests.client_rig import BLOCKS, BareDaemon, Engine, bare_daemon, keys_of
from tests.link_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    DIGEST,
    MEMORY_BYTES,
    SPACE,
    Rig,
    eventually,
    folder,
    layout,
    open_descriptors,
    running_rig,
)

ROOT = Path(__file__).resolve().parent.parent
SERVE = (
    "import sys, time\n"
    "from tests.link_rig import Rig\n"
    "Rig(sys.argv[1]).start(); print('up', flush=True); time.sleep(300)\n"
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


@pytest.fixture
def bare() -> Iterator[BareDaemon]:
    """A bare daemon."""
    with bare_daemon() as daemon:
        yield daemon


class DaemonProcess:
    """A scripted server in a process of its own."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, path], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_a_killed_daemon_fails_everything_at_once_and_its_successor_is_joined() -> None:
    """Kill -9 the daemon under traffic and start it again, three times: tickets end, lookups are
    misses at once, stores are no-ops, nothing raises, and both sessions join again by themselves
    (field case 53)."""
    with folder() as path, Engine(place := str(path / "s.sock")) as engine:
        daemon = DaemonProcess(place)
        worker, scheduler = engine.worker, engine.scheduler
        for _ in range(3):
            assert worker.wait_ready(DEADLINE_S)
            assert scheduler.wait_ready(DEADLINE_S)
            assert scheduler.lookup("r", keys_of(2)).chunks == 2
            tickets = [worker.store("r", keys_of(1), BLOCKS) for _ in range(3)]
            tickets.append(worker.retrieve("r", keys_of(1), BLOCKS))
            assert not any(ticket.done() for ticket in tickets)
            daemon.kill()
            for ticket in tickets:
                outcome = ticket.wait(DEADLINE_S)
                assert outcome is not None
                assert outcome.failed_blocks == {"full": (0, 1, 2, 3)}
                assert outcome.reason.startswith("the session was lost")
            for _ in range(100):
                assert scheduler.lookup("r", keys_of(2)).status is HitStatus.MISS
            after = worker.store("r", keys_of(1), BLOCKS)
            assert after.settled
            assert len(scheduler.keys(list(range(CHUNK_TOKENS)))) == 0
            daemon = DaemonProcess(place)
        assert worker.wait_ready(DEADLINE_S)
        assert scheduler.wait_ready(DEADLINE_S)
        assert scheduler.lookup("r", keys_of(2)).chunks == 2
        assert worker.state().counts.losses == 3
        daemon.kill()


def test_a_loss_is_noticed_while_nobody_reads(rig: Rig) -> None:
    """An engine that only looks at its tickets' state, without any call that reads, still sees them
    end: the client's thread watches for the hang-up."""
    with Engine(rig.path) as engine:
        ticket = engine.worker.store("r", keys_of(1), BLOCKS)
        rig.emit(Detach(SessionID(1)))
        eventually(lambda: ticket.settled)
        assert ticket.outcome() is not None


def test_completions_are_left_for_their_askers(rig: Rig) -> None:
    """The watching thread wakes up for hang-ups only: a completion waits in the socket until
    somebody asks."""
    with Engine(rig.path) as engine:
        worker = engine.worker
        ticket = worker.store("r", keys_of(1), BLOCKS)
        eventually(lambda: bool(rig.core.transfers))
        before = rig.server.stats().sessions[0].sent_bytes
        rig.complete([1])
        eventually(lambda: rig.server.stats().sessions[0].sent_bytes > before)
        assert not ticket.settled
        assert ticket.done()


def test_a_daemon_that_comes_later_is_joined_in_the_background() -> None:
    """The engine starts first: register returns, everything is a miss, and when the daemon is there
    the session is too."""
    with folder() as path:
        place = str(path / "s.sock")
        with Client(place, connect_timeout_s=0.01) as client:
            session = client.attach("e1")
            state = session.state()
            assert not state.connected
            assert "No such file or directory" in state.reason
            assert session.lookup("r", keys_of(1)).status is HitStatus.MISS
            with Rig(place):
                assert session.wait_ready(DEADLINE_S)
                assert session.lookup("r", keys_of(1)).status is HitStatus.HIT
                assert session.state().reason == ""


def test_an_engine_that_is_out_of_descriptors_joins_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon is lost while the engine's process can open nothing: that is a miss, never an
    error into the engine, and once there are descriptors again the session comes back by itself."""
    tries: list[int] = []

    def no_descriptor(*_: object) -> socket.socket:
        tries.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    broken = SimpleNamespace(
        socket=no_descriptor, AF_UNIX=socket.AF_UNIX, SOCK_STREAM=socket.SOCK_STREAM
    )
    with folder() as path, Client(str(path / "s.sock")) as client:
        with Rig(str(path / "s.sock")):
            session = client.attach("e1")
            assert session.wait_ready(DEADLINE_S)
            monkeypatch.setattr("kvstore.client_line.socket", broken)
        eventually(lambda: len(tries) >= 3)
        assert session.lookup("r", keys_of(1)).status is HitStatus.MISS
        monkeypatch.undo()
        with Rig(str(path / "s.sock")):
            assert session.wait_ready(DEADLINE_S)


def test_a_refusal_after_a_loss_is_logged_once_and_tried_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The shard is still held by the former session: that isn't an error to the engine, is said
    once, and the worker gets in when it is free."""
    with Engine(rig.path) as engine, caplog.at_level(logging.INFO, logger="kvstore.client_line"):
        worker = engine.worker
        rig.core.answers[Register] = lambda event: [
            Reply(event.session, event.id, Refused("held by another session"))
        ]
        rig.emit(Detach(SessionID(1)))
        eventually(lambda: len(rig.core.requests(Register)) >= 4)
        assert worker.lookup("r", keys_of(1)).status is HitStatus.MISS
        del rig.core.answers[Register]
        assert worker.wait_ready(DEADLINE_S)
        lines = [r.name for r in caplog.records if "held by another" in r.getMessage()]
        assert sorted(lines) == ["kvstore.client_line", "kvstore.server_refusals"]
        joined = [r for r in caplog.records if "connected to the daemon" in r.getMessage()]
        assert len(joined) == 2


def test_a_worker_joins_again_with_its_memory_though_its_descriptor_was_closed(rig: Rig) -> None:
    """The client keeps a descriptor of its own: the engine may close the one it gave."""
    with Engine(rig.path) as engine:
        worker = engine.worker
        engine.memory.close()
        rig.emit(Detach(SessionID(1)))
        eventually(lambda: len(rig.core.requests(Register)) == 2)
        assert worker.wait_ready(DEADLINE_S)
        assert len(rig.pages) == 2


def test_a_worker_joins_again_under_its_new_revision(rig: Rig) -> None:
    """The weights were updated, then the daemon restarted: the registration has the revision of
    now."""
    with Engine(rig.path) as engine:
        assert engine.worker.set_revision("r2", DEADLINE_S)
        rig.emit(Detach(SessionID(1)))
        eventually(lambda: len(rig.core.requests(Register)) == 2)
        message = rig.core.requests(Register)[1].message
        assert isinstance(message, Register)
        assert message.namespace.revision == "r2"
        assert engine.worker.wait_ready(DEADLINE_S)


def test_a_scheduler_that_set_a_revision_is_not_ready_before_it_is_in_force_again(
    rig: Rig,
) -> None:
    """After a restart the engine is back under the old revision for a moment: the scheduler hides
    that, and asks for its own."""
    with Engine(rig.path) as engine:
        session = engine.scheduler
        assert session.set_revision("r2", DEADLINE_S)
        rig.core.answers[SetRevision] = lambda event: []
        rig.emit(Detach(SessionID(1)))
        eventually(lambda: len(rig.core.requests(Attach)) == 2)
        eventually(lambda: len(rig.core.requests(SetRevision)) == 2)
        assert len(session.keys(list(range(CHUNK_TOKENS)))) == 0
        state = EngineState("e1", True, DIGEST, CHUNK_TOKENS)
        asked = rig.core.requests(SetRevision)[1]
        rig.emit(Reply(asked.session, asked.id, state))
        assert session.wait_ready(DEADLINE_S)


def test_a_hasher_starts_over_where_the_namespace_has_changed(rig: Rig) -> None:
    """Keys of a request that goes on under new weights are those of the new namespace, from the
    first chunk on."""
    with Engine(rig.path) as engine:
        session = engine.scheduler
        tokens = list(range(2 * CHUNK_TOKENS))
        hasher = session.hasher()
        before = hasher.keys(tokens[:CHUNK_TOKENS])
        assert session.set_revision("r2", DEADLINE_S)
        after = hasher.keys(tokens)
        assert after == session.keys(tokens)
        assert after[:1] != before


def test_a_session_that_is_closed_while_transfers_run_keeps_their_blocks(bare: BareDaemon) -> None:
    """close() returns though the daemon doesn't let go: the ticket stays open and ends with the
    stream."""
    with Engine(bare.path) as engine:
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        worker = engine.worker
        welcome.join()
        ticket = worker.store("r", keys_of(1), BLOCKS)
        worker.close(timeout_s=0.01)
        assert ticket.wait(0.01) is None
        assert bare.receive().request == "r"
        assert bare.peer.recv(1) == b""
        bare.hang_up()
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (False,)


def test_a_completion_after_close_still_counts(rig: Rig) -> None:
    """The daemon finishes a store while the session is being closed: its outcome is the true
    one."""
    rig.core.busy.add(SessionID(1))
    with Engine(rig.path) as engine:
        worker = engine.worker
        ticket = worker.store("r", keys_of(1), BLOCKS)
        worker.close(timeout_s=0.01)
        eventually(lambda: rig.core.closed() == [SessionID(1)])
        rig.emit(Reply(SessionID(1), ticket.number, Completed(b"\1")), Detach(SessionID(1)))
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (True,)


def test_a_client_leaves_nothing_behind(rig: Rig) -> None:
    """A hundred sessions, some lost, some closed: threads and descriptors are those of the
    start."""
    with Engine(rig.path) as engine:
        assert engine.worker.state().connected
    eventually(lambda: rig.server.stats().sessions == ())
    before = open_descriptors()
    for number in range(10):
        with Engine(rig.path) as engine:
            for _ in range(9):
                engine.client.attach("e1").close()
            worker = engine.worker
            if number % 2:
                rig.emit(*(Detach(SessionID(s.session)) for s in rig.server.stats().sessions))
                _wait_for_a_loss(worker)
    eventually(lambda: rig.server.stats().sessions == ())
    eventually(lambda: open_descriptors() == before)
    names = [thread.name for thread in threading.enumerate()]
    assert "kvstore-client" not in names


def test_a_client_that_is_dropped_leaves_nothing_behind(rig: Rig) -> None:
    """An engine forgets to close: once neither the client nor a session of it is left, the thread
    ends what there is. As long as a session is there it works on, without its client."""
    with create_host_memory("engine", MEMORY_BYTES) as memory:
        before = open_descriptors()
        session = Client(rig.path).attach("e1")
        worker = Client(rig.path).register("e1", SPACE, layout(), memory.describe(), Shard())
        gc.collect()
        rig.emit(*(Detach(SessionID(s.session)) for s in rig.server.stats().sessions))
        for kept in (session, worker):
            _wait_for_a_loss(kept)
            assert kept.wait_ready(DEADLINE_S)
            assert kept.lookup("r", keys_of(2)).chunks == 2
        keeping = worker.store("r", keys_of(1), BLOCKS)
        del session, worker, kept
        gc.collect()
        eventually(lambda: rig.server.stats().sessions == ())
        outcome = keeping.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (False,)
        del keeping
        gc.collect()
        eventually(lambda: "kvstore-client" not in [t.name for t in threading.enumerate()])
        eventually(lambda: open_descriptors() == before)


def test_a_fork_after_a_client_was_dropped_finds_nothing_to_leave(rig: Rig) -> None:
    """Its watcher has ended by itself: the hook of a forked child closes nothing twice."""
    client = Client(rig.path)
    assert client.attach("e1").wait_ready(DEADLINE_S)
    watcher = client._watcher
    del client
    gc.collect()
    eventually(lambda: rig.server.stats().sessions == ())
    eventually(lambda: watcher._thread is None)
    assert watcher in watchers()
    watcher.abandon()


def test_clients_without_a_session_leave_nothing_behind(rig: Rig) -> None:
    """Also not what runs in each forked child."""
    before = open_descriptors()
    hooks: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
        for _ in range(20):
            Client(rig.path)
    gc.collect()
    assert len(hooks) <= 1
    assert open_descriptors() == before


def _wait_for_a_loss(session: SchedulerSession) -> None:
    eventually(lambda: session.state().counts.losses > 0)


def test_a_listener_that_says_nothing_is_named(bare: BareDaemon) -> None:
    """A stopped daemon, or something else's socket: the session says that nothing has answered, and
    no longer so once it has."""
    with Client(bare.path, connect_timeout_s=0.05) as client:
        session = client.attach("e1")
        assert session.state().reason == f"the daemon at {bare.path} hasn't answered yet"
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        assert session.wait_ready(DEADLINE_S)
        eventually(lambda: session.state().reason == "")
        welcome.join()
        bare.hang_up()
