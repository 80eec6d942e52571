"""Mutated calls of the admin service against a real daemon: each ends with an answer or a status,
what nobody asked to clear stays, and an engine never notices."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvstore.admin import SERVICE, AdminService
from kvstore.core.errors import TierUnavailableError
from kvstore.proto_gen import admin_pb2
from tests.conftest import SETTINGS, RunningDaemon, private_environment
from tests.crash.watch import Watch
from tests.fuzz.mutate import EXAMPLES, TEXTS, fuzz, is_line, mangle, scramble
from tests.nvme_bench import KINDS, make_odd
from tests.small_engine import SmallEngine, tokens
from tests.test_admin import ScriptedSource

CHUNKS = 8
MODEL, OTHER = "org/small", "org/other"
TENANT = f"uid:{os.getuid()}"
WAIT_S = 60.0
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
METHODS = (
    f"/{SERVICE}/Stats", f"/{SERVICE}/Clear", f"/{SERVICE}/Clear", f"/{SERVICE}/Clear",
    f"/{HEALTH}/Check", f"/{HEALTH}/Watch", f"/{REFLECTION}/ServerReflectionInfo",
    f"/{SERVICE}/Evaluate", "/a/b", "/" + "x" * 4000,
)  # fmt: skip
LATE_CALLS = 50
THREADS_MAX, GROWTH_BYTES_MAX = 100, 64 << 20


class Target:
    """A daemon with two models stored by an engine each, and a channel to its administration."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        settings = SETTINGS | {"KVSTORE_HOST_SIZE": "32MiB", "KVSTORE_NVME_SIZE": "0"}
        self.daemon = RunningDaemon(folder, private_environment(folder, settings), ())
        self.daemon.start()
        stack.callback(self.daemon.stop)
        self.watch = Watch(self.daemon)
        self.engines = {
            model: stack.enter_context(SmallEngine(self.daemon.socket, CHUNKS, model, name=model))
            for model in (MODEL, OTHER)
        }
        for engine in self.engines.values():
            store(engine)
        address = self.watch.admin().address
        self.channel = stack.enter_context(grpc.insecure_channel(address))
        self.outcomes: Counter[str] = Counter()
        self._late: dict[str, int] = {}

    def may_go(self, named: set[str], code: grpc.StatusCode) -> set[str]:
        """The models whose chunks may be gone after a call that named some. One whose deadline
        passed may still be carried out, beside those that come soon after it."""
        total = self.outcomes.total()
        self.outcomes[code.name] += 1
        late = {model for model, call in self._late.items() if total - call < LATE_CALLS}
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._late |= dict.fromkeys(named, total)
        return named | late

    def size(self) -> int:
        """Its resident bytes."""
        pages = int(Path(f"/proc/{self.daemon.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def store(engine: SmallEngine) -> None:
    """Store the engine's prompt."""
    keys = engine.keys(tokens(CHUNKS))
    engine.fill(keys)
    assert engine.store(keys).leading_chunks == CHUNKS


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """Still well at the end, and no larger than it was."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        target = Target(stack, folder)
        before = target.size()
        yield target
        figures = target.watch.stats()
        assert figures["process"]["state"] == "ok"
        assert figures["process"]["threads"] < THREADS_MAX
        assert figures["link"]["counters"]["internal_errors"] == 0
        assert target.size() - before < GROWTH_BYTES_MAX
        if sum(target.outcomes.values()) > 100:
            assert target.outcomes.keys() >= {"OK", "UNIMPLEMENTED", "INTERNAL"}, target.outcomes


def request(rng: random.Random, method: str) -> bytes:
    """A request of this method or of another, sound or not."""
    names = (MODEL, OTHER, "other", *TEXTS, "z" * rng.choice((1, 5 << 20)))
    made: Any = admin_pb2.ClearRequest(model=rng.choice(names), tenant=rng.choice((TENANT, *TEXTS)))
    if REFLECTION in method:
        made = reflection_pb2.ServerReflectionRequest(file_containing_symbol=rng.choice(names))
    elif HEALTH in method:
        made = health_pb2.HealthCheckRequest(service=rng.choice((SERVICE, *TEXTS)))
    if rng.random() < 0.5:
        scramble(rng, made)
    raw: bytes = made.SerializeToString()
    return mangle(rng, raw) if rng.random() < 0.3 else raw


def clears(method: str, raw: bytes) -> set[str]:
    """The models whose chunks a call asks to forget."""
    if not method.endswith("Clear"):
        return set()
    try:
        asked = admin_pb2.ClearRequest.FromString(raw)
    except DecodeError:
        return set()
    fits = asked.tenant in ("", TENANT)
    return {model for model in (MODEL, OTHER) if fits and asked.model in ("", model)}


@fuzz(EXAMPLES // 10)
def test_a_mutated_call_has_an_answer_and_clears_no_more_than_it_names(
    target: Target, seed: int
) -> None:
    """Any bytes to any method, with any deadline, as one message or several."""
    rng = random.Random(seed)
    method = rng.choice(METHODS)
    messages = [request(rng, method) for _ in range(rng.choice((1, 1, 1, 0, 3)))]
    deadline_s = rng.choice((WAIT_S, WAIT_S, WAIT_S, 0.0, 1e-4))
    if method.endswith("Watch"):
        deadline_s = 0.05
    call = target.channel.stream_stream(method)
    answers = call(iter(messages), timeout=deadline_s)
    with suppress(grpc.RpcError):
        for _ in answers:
            pass
    assert is_line(answers.details() or ""), answers.details()
    named = set().union(*(clears(method, raw) for raw in messages))
    may_go = target.may_go(named, answers.code())
    for model, engine in target.engines.items():
        found = engine.hits(engine.keys(tokens(CHUNKS)))
        assert found in ((0, CHUNKS) if model in may_go else (CHUNKS,))
        if not found:
            store(engine)


@pytest.mark.parametrize("kind", [*KINDS, "file", "listener", "busy listener", "dead socket"])
def test_an_address_that_is_taken_is_refused_at_once(private_folder: Path, kind: str) -> None:
    """Whatever lies there: only a socket that nobody listens on is replaced. A daemon that is
    stopped, and whose queue of connections is full, is one that listens."""
    path = private_folder / "a.sock"
    service = AdminService(f"unix:{path}", ScriptedSource())
    with ExitStack() as stack:
        if kind in KINDS:
            make_odd(path, kind, private_folder / "target")
        elif kind == "file":
            path.write_bytes(b"mine")
        else:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            if kind == "dead socket":
                listener.close()
            else:
                listener.listen(0)
            if kind == "busy listener":
                with suppress(BlockingIOError):
                    while True:
                        peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                        peer.setblocking(False)
                        peer.connect(str(path))
        before = os.lstat(path)
        if kind == "dead socket":
            service.open()
            service.close()
            return
        with pytest.raises(TierUnavailableError) as refused:
            service.open()
        assert is_line(str(refused.value))
        assert (os.lstat(path).st_ino, stat.S_IFMT(os.lstat(path).st_mode)) == (
            before.st_ino, stat.S_IFMT(before.st_mode),
        )  # fmt: skip
