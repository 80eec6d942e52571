"""Forked children of an engine: never their parent's connection, always their own, and no hang.

The forks happen in processes of their own, so that the tests' threads aren't copied.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.core.messages import Attach, Lookup, SessionID
from tests.link_rig import DEADLINE_S, Rig, eventually, running_rig

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
import os, sys, threading, traceback
from kvstore import Client, HitStatus
from tests.client_rig import BLOCKS, Engine, keys_of
from tests.link_rig import DEADLINE_S, open_descriptors

class Never:
    def query(self):
        return False

def finish(child):
    assert os.waitpid(child, 0)[1] == 0, "the child failed"

def in_child(work):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A running server."""
    with running_rig() as running:
        yield running


def run(rig: Rig, script: str) -> None:
    """Run a script that forks; it must end well, and in time. Nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script, rig.path],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=3 * DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == 0, errors


def test_a_child_uses_a_connection_of_its_own(rig: Rig) -> None:
    """A child asks through the session that it inherited: its request comes over a new connection
    of its own process, and the parent's stays untouched and usable."""
    run(
        rig,
        """
client = Client(sys.argv[1])
session = client.attach("e1")
assert session.lookup("parent", keys_of(2)).chunks == 2
def work():
    assert session.lookup("child", keys_of(2)).status is HitStatus.MISS
    assert session.wait_ready(DEADLINE_S)
    assert session.lookup("child", keys_of(2)).chunks == 2
    assert session.state().counts.losses == 0
    client.close()
finish(in_child(work))
assert session.lookup("parent", keys_of(2)).chunks == 2
assert session.state().counts.links == 1
client.close()
""",
    )
    assert len(rig.core.requests(Attach)) == 2
    asked = [
        (event.session, event.message.request)
        for event in rig.core.requests(Lookup)
        if isinstance(event.message, Lookup)
    ]
    assert asked == [(1, "parent"), (2, "child"), (1, "parent")]
    eventually(lambda: sorted(rig.core.closed()) == [SessionID(1), SessionID(2)])


def test_a_child_that_never_asks_never_connects(rig: Rig) -> None:
    """A worker of a data loader inherits the client and ends: the daemon never hears of it, and the
    parent's session lives."""
    run(
        rig,
        """
client = Client(sys.argv[1])
session = client.attach("e1")
for _ in range(5):
    finish(in_child(lambda: None))
    finish(in_child(client.close))
assert session.lookup("parent", keys_of(2)).chunks == 2
client.close()
""",
    )
    assert rig.server.stats().connections_total == 1


def test_a_fork_while_threads_hold_the_clients_locks_does_not_hang_the_child(rig: Rig) -> None:
    """Threads look up without a pause while the process forks again and again: in each child the
    locks are new, whoever held them."""
    run(
        rig,
        """
client = Client(sys.argv[1])
session = client.attach("e1")
stop = threading.Event()
def ask():
    while not stop.is_set():
        session.lookup("parent", keys_of(64))
threads = [threading.Thread(target=ask) for _ in range(3)]
for thread in threads:
    thread.start()
def work():
    session.lookup("child", keys_of(2))
    session.release("child")
    assert session.wait_ready(DEADLINE_S)
    assert session.lookup("child", keys_of(2)).chunks == 2
    client.close()
for _ in range(30):
    finish(in_child(work))
with client._watcher._lock, session._line.link().channel.condition:
    finish(in_child(work))
stop.set()
for thread in threads:
    thread.join()
assert session.lookup("parent", keys_of(2)).chunks == 2
client.close()
""",
    )
    assert rig.server.stats().protocol_errors == 0


def test_a_childs_copies_of_tickets_stay_open_and_the_parents_go_on(rig: Rig) -> None:
    """A transfer belongs to the process that asked for it, and the daemon still writes into memory
    that both share: in the child its ticket never says that the blocks are free, whatever is done
    with it; in the parent it completes."""
    rig.core.answers.clear()
    run(
        rig,
        """
with Engine(sys.argv[1]) as engine:
    worker = engine.worker
    ticket = worker.store("r", keys_of(1), BLOCKS)
    late = worker.store("r", keys_of(1), BLOCKS, Never())
    def work():
        for mine in (ticket, late):
            for _ in range(2):
                assert not mine.done()
                assert mine.wait(DEADLINE_S) is None
                mine.cancel()
        assert worker.wait_ready(DEADLINE_S)
        assert not ticket.done()
        worker.close()
        assert ticket.outcome() is None
    finish(in_child(work))
    late.cancel()
    assert late.wait(DEADLINE_S).cancelled
    assert not ticket.done()
    ticket.cancel()
    assert ticket.wait(DEADLINE_S).cancelled
""",
    )


def test_a_child_made_without_pythons_hooks_leaves_everything_alone(rig: Rig) -> None:
    """A C library forks: no hook runs in the child, and Python can't start threads there safely.
    The first use of anything sees another process: what is asked there is a miss at once, and the
    parent's connection is untouched, also by the end of the session."""
    run(
        rig,
        """
import ctypes
def in_c_child(work):
    child = ctypes.PyDLL(None).fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
def use():
    assert ticket.wait(DEADLINE_S) is None
    assert scheduler.lookup("child", keys_of(2)).status is HitStatus.MISS
    assert worker.store("child", keys_of(1), BLOCKS).settled
    assert "forked" in scheduler.state().reason
    assert not scheduler.wait_ready(0.0)
with Engine(sys.argv[1]) as engine:
    worker, scheduler = engine.worker, engine.scheduler
    ticket = worker.store("r", keys_of(1), BLOCKS)
    with worker._line.link().channel.condition, engine.client._watcher._lock:
        works = (use, ticket.cancel, worker.close, engine.client.close)
        children = [in_c_child(work) for work in works]
    for child in children:
        finish(child)
    assert not ticket.done()
    assert worker.lookup("parent", keys_of(2)).chunks == 2
    ticket.cancel()
    assert ticket.wait(DEADLINE_S).cancelled
    assert worker.state().counts.losses == 0
""",
    )
    assert len(rig.core.requests(Attach)) == 1


def test_a_child_keeps_no_copy_of_its_parents_descriptors(rig: Rig) -> None:
    """The child closes its copies at the fork, unread, so the end of the parent's stream is seen
    though a child lives on."""
    run(
        rig,
        """
with Engine(sys.argv[1]) as engine:
    worker = engine.worker
    before = open_descriptors()
    assert any("socket" in name for name in before)
    def work():
        mine = open_descriptors()
        assert not any("socket" in name or "eventfd" in name for name in mine), mine
    finish(in_child(work))
    assert open_descriptors() == before
""",
    )
