"""One connection of a client under trouble: late answers, full sockets, garbage, late events."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import Client, HitStatus, ProtocolError
from kvstore.core.messages import (
    Cause,
    Completed,
    EngineState,
    Lookup,
    LookupReply,
    Refused,
    Release,
    Reply,
    SessionID,
    SetRevision,
    Store,
)
from kvstore.core.messages import (
    HitStatus as Status,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire import hello
from kvstore.wire_messages import write_hello, write_reply
from tests.client_rig import BLOCKS, BareDaemon, Engine, bare_daemon, keys_of
from tests.link_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    DIGEST,
    Rig,
    eventually,
    folder,
    frame,
    running_rig,
)

ROOT = Path(__file__).resolve().parent.parent
SHORT_S = 0.05


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


class Event:
    """A CUDA event that the test completes."""

    def __init__(self) -> None:
        self.completed = False
        self.error: RuntimeError | None = None
        self.queries = 0

    def query(self) -> bool:
        """Whether the stream has come so far."""
        self.queries += 1
        if self.error is not None:
            raise self.error
        return self.completed


# ---------------------------------------------------------------- answers that don't come


def test_a_late_answer_is_a_miss_and_belongs_to_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon answers after the deadline: the lookup is a miss; while the answer is owed nothing
    more is asked but that its lease end; the late answer is thrown away by its number and asking
    goes on."""
    monkeypatch.setattr("kvstore.client_link.OVERDUE_RETRY_S", float("inf"))
    rig.core.answers[Lookup] = lambda event: []
    with Engine(rig.path, lookup_timeout_s=SHORT_S) as engine:
        session = engine.scheduler
        for _ in range(20):
            assert session.lookup("r", keys_of(2)).status is HitStatus.MISS
        counts = session.state().counts
        assert (counts.lookups_overdue, counts.lookups_skipped) == (1, 19)
        (asked,) = rig.core.requests(Lookup)
        eventually(lambda: rig.core.requests(Release) != [])
        assert [r.message for r in rig.core.requests(Release)] == [Release("r")]
        del rig.core.answers[Lookup]
        rig.emit(Reply(asked.session, asked.id, LookupReply(Status.HIT, 1)))
        eventually(lambda: session.lookup("r", keys_of(2)).chunks == 2)


def test_an_answer_that_never_comes_is_not_waited_for_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon owes an answer and has lost it: after a while it is asked again."""
    monkeypatch.setattr("kvstore.client_link.OVERDUE_RETRY_S", 0.0)
    rig.core.answers[Lookup] = lambda event: []
    with Engine(rig.path, lookup_timeout_s=SHORT_S) as engine:
        assert engine.scheduler.lookup("r", keys_of(2)).status is HitStatus.MISS
        del rig.core.answers[Lookup]
        assert engine.scheduler.lookup("r", keys_of(2)).chunks == 2


def test_a_stopped_daemon_costs_one_deadline(rig: Rig) -> None:
    """SIGSTOP the daemon: the first lookup is a miss at its deadline, all others at once, stores
    don't wait either, and nothing is lost when it goes on."""
    script = (
        "import sys, time\n"
        "from tests.link_rig import Rig\n"
        "Rig(sys.argv[1]).start(); print('up', flush=True); time.sleep(300)\n"
    )
    with folder() as path:
        place = str(path / "s.sock")
        daemon = subprocess.Popen(
            [sys.executable, "-c", script, place], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"up\n"
        try:
            with Engine(place, lookup_timeout_s=SHORT_S) as engine:
                worker = engine.worker
                assert worker.lookup("r", keys_of(2)).chunks == 2
                daemon.send_signal(signal.SIGSTOP)
                status = Path(f"/proc/{daemon.pid}/status")
                eventually(lambda: "State:\tT" in status.read_text())
                for _ in range(1000):
                    assert worker.lookup("r", keys_of(2)).status is HitStatus.MISS
                ticket = worker.store("r", keys_of(1), BLOCKS)
                assert not ticket.done()
                assert ticket.wait(SHORT_S) is None
                worker.release("r")
                assert worker.state().counts.lookups_overdue == 1
                daemon.send_signal(signal.SIGCONT)
                eventually(lambda: worker.lookup("r", keys_of(2)).chunks == 2)
                assert not ticket.done()
                ticket.cancel()
                outcome = ticket.wait(DEADLINE_S)
                assert outcome is not None
                assert outcome.cancelled
        finally:
            daemon.kill()
            daemon.wait()
            daemon.stdout.close()


def test_a_socket_that_nobody_reads_refuses_stores_at_once(bare: BareDaemon) -> None:
    """The daemon doesn't read: what the socket takes is asked, then stores end at once with the
    reason, and lookups are misses. When it reads again everything asked arrives whole."""
    with Engine(bare.path, lookup_timeout_s=SHORT_S) as engine:
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        worker = engine.worker
        welcome.join()
        many = {"full": [i % 32 for i in range(4 * 255)]}
        tickets = [worker.store("r", keys_of(255), many) for _ in range(200)]
        refused = [ticket for ticket in tickets if ticket.settled]
        assert 0 < len(refused) < 200
        outcome = refused[-1].outcome()
        assert outcome is not None
        assert outcome.reason == "the daemon isn't reading: the socket is full"
        assert not any(outcome.done)
        assert worker.lookup("r", keys_of(1)).status is HitStatus.MISS
        sent = len(tickets) - len(refused)
        for _ in range(sent):
            message = bare.receive()
            assert message.kind == pb.ClientMessage.STORE
            bare.send(write_reply(message.id, Completed(b"\1" * 255)))
        assert all(ticket.wait(DEADLINE_S) is not None for ticket in tickets)


def test_a_burst_that_the_socket_does_not_take_at_once_is_sent_all_the_same(rig: Rig) -> None:
    """Stores of some megabyte in one go, then a lookup of many keys: the daemon is only slower than
    the engine, so all arrive, in order, though nobody waits for the stores."""
    with Engine(rig.path) as engine:
        many = {"full": [i % 32 for i in range(4 * 255)]}
        tickets = [engine.worker.store("r", keys_of(255), many) for _ in range(60)]
        assert not any(ticket.settled for ticket in tickets)
        large = kvstore.ChunkKeys(b"k" * 32 * 20_000, CHUNK_TOKENS, CHUNK_TOKENS * 20_000)
        assert engine.worker.lookup("r", large).chunks == 20_000
        assert len(rig.core.requests(Store)) == 60
        for ticket in tickets:
            ticket.cancel()
        assert all(ticket.wait(DEADLINE_S) is not None for ticket in tickets)


# ---------------------------------------------------------------- the handshake, from this side


def test_a_daemon_that_differs_is_an_error_that_names_both_sides(bare: BareDaemon) -> None:
    """An engine's image was updated, the daemon wasn't (field cases 3 and 59)."""

    def greet() -> None:
        bare.accept()
        other = hello()
        other.package, other.hash_algorithm = "0.0.1", "md5"
        bare.send(write_hello(bare.receive().id, other))
        assert bare.peer.recv(1) == b""
        bare.hang_up()

    daemon = threading.Thread(target=greet)
    daemon.start()
    with Client(bare.path) as client:
        with pytest.raises(ProtocolError) as caught:
            client.attach("e1")
        daemon.join()
    line = str(caught.value)
    assert "\n" not in line
    assert "packages: client 0.1.0, daemon 0.0.1" in line
    assert "hash algorithm: client sha256/chain-v1, daemon md5" in line


def test_a_refusal_instead_of_hello_is_passed_on(bare: BareDaemon) -> None:
    """A daemon that doesn't understand us says so in its own words."""

    def refuse() -> None:
        bare.accept()
        bare.receive()
        bare.send(write_reply(0, Refused("protocol: client 1, daemon 7", Cause.PROTOCOL)))
        bare.hang_up()

    daemon = threading.Thread(target=refuse)
    daemon.start()
    with Engine(bare.path) as engine, pytest.raises(ProtocolError, match="client 1, daemon 7"):
        engine.client.attach("e1")
    daemon.join()


def test_garbage_from_the_daemon_leaves_tickets_open_until_the_end(bare: BareDaemon) -> None:
    """The daemon's bytes have lost their meaning: lookups are misses, but a transfer may still be
    running, so its blocks come back only with the end of the stream."""
    with Engine(bare.path, lookup_timeout_s=SHORT_S) as engine:
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        worker = engine.worker
        welcome.join()
        ticket = worker.store("r", keys_of(1), BLOCKS)
        bare.peer.sendall(frame(b"\xff\xff\xff"))
        eventually(lambda: worker.lookup("r", keys_of(1)).status is HitStatus.MISS)
        eventually(lambda: not worker.state().connected)
        assert worker.store("r", keys_of(1), BLOCKS).settled
        bare.send(write_reply(ticket.number, Completed(b"\1")))
        assert ticket.wait(SHORT_S) is None
        bare.hang_up()
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (False,)
        assert "broke the protocol" in outcome.reason


def test_completions_that_came_before_the_end_count(bare: BareDaemon) -> None:
    """The daemon completes one store and dies: that one is done, the other isn't."""
    with Engine(bare.path) as engine:
        welcome = threading.Thread(target=bare.welcome)
        welcome.start()
        worker = engine.worker
        welcome.join()
        first, second = (worker.store("r", keys_of(1), BLOCKS) for _ in range(2))
        bare.send(write_reply(first.number, Completed(b"\1")))
        bare.hang_up()
        for ticket, done in ((second, False), (first, True)):
            outcome = ticket.wait(DEADLINE_S)
            assert outcome is not None
            assert outcome.done == (done,)


# ---------------------------------------------------------------- events of the engine's stream


def test_a_transfer_is_sent_when_its_event_has_completed(rig: Rig) -> None:
    """The kernel that fills the blocks hasn't finished: the daemon hears of the store only after it
    has (field case 14, the client's part)."""
    with Engine(rig.path) as engine:
        event = Event()
        ticket = engine.worker.store("r", keys_of(1), BLOCKS, ready=event)
        eventually(lambda: event.queries > 5)
        assert engine.worker.lookup("r", keys_of(1)).chunks == 1
        assert rig.core.requests(Store) == []
        assert not ticket.done()
        event.completed = True
        rig.complete([1])
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.done == (True,)


def test_an_event_that_has_completed_already_costs_nothing(rig: Rig) -> None:
    """One query, and the store is sent by the caller itself."""
    with Engine(rig.path) as engine:
        event = Event()
        event.completed = True
        engine.worker.store("r", keys_of(1), BLOCKS, ready=event)
        eventually(lambda: len(rig.core.requests(Store)) == 1)
        assert event.queries == 1


def test_a_transfer_that_waits_for_its_event_can_be_cancelled(rig: Rig) -> None:
    """Nothing was sent, so the blocks are the engine's again at once."""
    with Engine(rig.path) as engine:
        event = Event()
        ticket = engine.worker.retrieve("r", keys_of(1), BLOCKS, ready=event)
        ticket.cancel()
        outcome = ticket.outcome()
        assert outcome is not None
        assert outcome.cancelled
        event.completed = True
        assert engine.worker.lookup("r", keys_of(1)).chunks == 1
        eventually(lambda: engine.worker.state().open_tickets == 0)
        assert rig.core.transfers == {}


def test_an_event_that_fails_ends_its_transfer_and_no_other(rig: Rig) -> None:
    """The stream is broken (a CUDA error): the ticket says so, and the client goes on."""
    with Engine(rig.path) as engine:
        event = Event()
        ticket = engine.worker.store("r", keys_of(1), BLOCKS, ready=event)
        event.error = OSError("illegal address")
        outcome = ticket.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.reason == "the ready event failed: illegal address"
        engine.worker.store("r", keys_of(1), BLOCKS)
        rig.complete([1])


# ---------------------------------------------------------------- revisions


def test_a_new_revision_hides_the_engine_until_the_daemon_says_yes(rig: Rig) -> None:
    """Weights were updated: from the call on nothing is looked up or stored under the old ones."""
    rig.core.answers[SetRevision] = lambda event: []
    with Engine(rig.path) as engine:
        worker = engine.worker
        tokens = list(range(CHUNK_TOKENS))
        old = worker.keys(tokens)
        assert not worker.set_revision("r2", timeout_s=SHORT_S)
        assert len(worker.keys(tokens)) == 0
        assert worker.lookup("r", old).status is HitStatus.MISS
        outcome = worker.store("r", old, BLOCKS).outcome()
        assert outcome is not None
        assert "isn't ready" in outcome.reason
        del rig.core.answers[SetRevision]
        assert worker.set_revision("r3", timeout_s=DEADLINE_S)
        assert worker.keys(tokens) != old
        assert len(worker.keys(tokens)) == 1


def test_a_refused_revision_is_asked_again_when_the_engine_is_ready(rig: Rig) -> None:
    """A scheduler sets the revision while no worker is there: the daemon can't yet, and is asked
    again as soon as it can."""
    with Engine(rig.path) as engine:
        session = engine.scheduler
        rig.core.answers[SetRevision] = lambda event: [
            Reply(event.session, event.id, Refused("no worker"))
        ]
        assert not session.set_revision("r2", timeout_s=SHORT_S)
        del rig.core.answers[SetRevision]
        state = EngineState("e1", True, DIGEST, CHUNK_TOKENS)
        rig.emit(Reply(SessionID(1), 0, state))
        assert session.wait_ready(DEADLINE_S)
        assert session.state().namespace == b"r2".ljust(32)


def test_register_waits_no_longer_than_it_was_told(bare: BareDaemon) -> None:
    """The daemon accepts but never answers: register returns, and the session joins later."""
    with Client(bare.path, connect_timeout_s=SHORT_S) as client:
        session = client.attach("e1")
        assert not session.state().connected
        assert session.lookup("r", keys_of(1)).status is HitStatus.MISS
        bare.welcome()
        assert session.wait_ready(DEADLINE_S)


def test_every_descriptor_of_a_client_is_closed_on_exec(rig: Rig) -> None:
    """A child program inherits nothing of the link."""
    with Engine(rig.path) as engine:
        engine.worker.lookup("r", keys_of(1))
        script = (
            "import os\n"
            "for name in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.readlink('/proc/self/fd/' + name))\n"
            "    except OSError: pass\n"
        )
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False)
        inherited = done.stdout.split()
        assert not [name for name in inherited if name.startswith(("socket:", "/memfd:"))]
        assert "anon_inode:[eventfd]" not in inherited
