"""The admin service: statistics, clear, health and reflection, on a Unix socket or a loopback
port."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.admin import SERVICE, AdminService
from kvstore.admin_snapshot import InOut, ProcessFacts, Rates, Snapshot
from kvstore.cli import main
from kvstore.cli_admin import AdminClient, NoDaemonError
from kvstore.core.errors import KVStoreError, TierUnavailableError
from kvstore.core.messages import Cleared
from kvstore.core.stats import CoreStats, LatencySummary, SpaceStats, TierStats
from kvstore.report import render
from tests.conftest import RunningDaemon, StartDaemon
from tests.small_engine import SmallEngine, tokens

IDLE = LatencySummary(0, 0.0, 0.0, 0.0, 0.0)
NOTHING = CoreStats((), (), (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, IDLE, IDLE)


class ScriptedSource:
    """A daemon that answers what the test says, and records what it was asked."""

    def __init__(self) -> None:
        self.problem = ""
        self.refusal = ""
        self.core = NOTHING
        self.namespaces = 1
        self.figures: Mapping[str, InOut] = {}
        self.free = threading.Event()
        self.free.set()
        self.deadlines_s: list[float] = []
        self.cleared: list[tuple[str | None, str | None]] = []

    def snapshot(self, deadline_s: float) -> Snapshot:
        self.deadlines_s.append(deadline_s)
        self.free.wait(60)
        if self.refusal:
            raise KVStoreError(self.refusal)
        process = ProcessFacts("0", 1, 2.0, 3, 4, 5, "unix:/e", "unix:/a", self.state())
        return Snapshot(process, self.core, self.io(), IDLE, 0)

    def clear(self, model: str | None, tenant: str | None, deadline_s: float) -> Cleared:
        if self.refusal:
            raise KVStoreError(self.refusal)
        self.cleared.append((model, tenant))
        return Cleared(namespaces=self.namespaces, chunks=7)

    def io(self) -> Mapping[str, InOut]:
        return self.figures

    def state(self) -> str:
        return self.problem or "ok"


@pytest.fixture
def source() -> ScriptedSource:
    """What stands behind the service."""
    return ScriptedSource()


@pytest.fixture
def service(private_folder: Path, source: ScriptedSource) -> Iterator[AdminService]:
    """A service on a Unix socket of its own."""
    service = AdminService(f"unix:{private_folder}/admin.sock", source)
    service.open()
    yield service
    service.close()


def health_of(address: str, name: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status)


def services_of(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        [reply] = list(stub.ServerReflectionInfo(iter([request]), timeout=10))
        return {service.name for service in reply.list_services_response.service}


def test_health_follows_the_daemons_state(service: AdminService, source: ScriptedSource) -> None:
    """A degraded daemon isn't serving, and is again once it has recovered."""
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health_of(service.address) == health_of(service.address, SERVICE) == serving
    source.problem = "1 of 2 copy threads have ended"
    service.sample(1.0)
    assert health_of(service.address) == health_pb2.HealthCheckResponse.NOT_SERVING
    source.problem = ""
    service.sample(2.0)
    assert health_of(service.address) == serving


def test_only_the_known_services_are_there(service: AdminService) -> None:
    """field case 121: what can be called is listed by reflection, and nothing evaluates code."""
    assert services_of(service.address) == {
        SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip


def test_streams_that_say_nothing_hold_nobody(service: AdminService) -> None:
    """Six people stopped their grpcurl in the middle: figures are still to be had, those beyond
    the limit are told, and the service ends in order beside them."""
    over = threading.Event()
    ended: queue.Queue[grpc.StatusCode] = queue.Queue()

    def silence() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        over.wait(60)
        yield from ()

    with grpc.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for _ in range(6):
            stub.ServerReflectionInfo(silence()).add_done_callback(lambda s: ended.put(s.code()))
        for _ in range(2):
            assert ended.get(timeout=20) is grpc.StatusCode.RESOURCE_EXHAUSTED
        with AdminClient(service.address) as client:
            assert client.stats()["process"]["state"] == "ok"
        closing = threading.Thread(target=service.close)
        closing.start()
        closing.join(20)
        over.set()
        assert not closing.is_alive()


def test_callers_deadline_reaches_the_daemon(service: AdminService, source: ScriptedSource) -> None:
    """No call waits for the loop longer than its caller does."""
    with AdminClient(service.address) as client:
        client.stats()
    assert 0 < source.deadlines_s[0] <= 5.0


def test_refusal_of_the_daemon_is_one_line(service: AdminService, source: ScriptedSource) -> None:
    """The reason comes through, and it isn't taken for a missing daemon."""
    source.refusal = "the daemon's loop didn't answer within 5.0 s"
    with AdminClient(service.address) as client:
        with pytest.raises(KVStoreError, match="didn't answer within") as caught:
            client.stats()
        assert not isinstance(caught.value, NoDaemonError)
        with pytest.raises(KVStoreError, match="didn't answer within"):
            client.clear("m", "")


def test_clear_passes_names_and_empty_means_any(
    service: AdminService, source: ScriptedSource
) -> None:
    """Protobuf has no null: an empty name matches all."""
    with AdminClient(service.address) as client:
        assert client.clear("m", "").chunks == 7
        client.clear("", "t")
    assert source.cleared == [("m", None), (None, "t")]


def spaces_of(models: int, name: str) -> CoreStats:
    """A core that knows so many models, the later ones with more chunks."""
    found = (SpaceStats("uid:0", f"{n:05d}{name}", "", "ab" * 32, 0, n) for n in range(models))
    return replace(NOTHING, spaces=tuple(found))


def test_stats_of_very_many_models_with_long_names_arrive(
    service: AdminService, source: ScriptedSource
) -> None:
    """Engines came with thousands of namespaces, each with the longest name there may be: beyond
    what gRPC takes by default. The largest ones are listed and the rest is counted."""
    source.core = spaces_of(3000, "m" * 5000)
    with AdminClient(service.address) as client:
        figures = client.stats()
    assert [space["chunks"] for space in figures["spaces"]] == list(range(2999, 1999, -1))
    assert figures["spaces_more"] == 2000
    assert "and 2000 namespaces more" in render(figures)


def clear_command(service: AdminService, model: str) -> int:
    arguments = ["clear", "--yes", "--model", model, "--admin-address", service.address]
    return main([*arguments, "--socket", service.address.removeprefix("unix:")])


def test_clear_of_a_model_that_is_not_listed(
    service: AdminService, source: ScriptedSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond the listed ones the daemon itself says whether it knows a model; and a typing error is
    answered with some of the known names, not with megabytes of them."""
    source.core = spaces_of(3000, "")
    assert clear_command(service, "00001") == 0
    assert source.cleared == [("00001", None)]
    source.namespaces = 0
    assert clear_command(service, "nobody's") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "is not known here; known models: 02980, " in line
    assert line.endswith(", 02999 and 2980 more")


def test_clear_of_an_unknown_tenant_names_the_known_ones(
    service: AdminService, source: ScriptedSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error there mustn't look like an empty cache either."""
    source.core = spaces_of(2, "")
    arguments = ["clear", "--yes", "--admin-address", service.address, "--tenant"]
    assert main([*arguments, "nosuch"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "--tenant='nosuch' is not known here; known tenants: uid:0" in line
    assert main([*arguments, "uid:0"]) == 0
    assert source.cleared == [(None, "uid:0")]


def test_rates_count_from_the_start(service: AdminService, source: ScriptedSource) -> None:
    """The first sample is of the same clock as the others: a megabyte in the first second is a
    megabyte a second, also on a machine that has been up for days."""
    tier = TierStats("host", 0, 0, 0, 0, 0, 0, 0, 0, 0, False, False)
    source.core = replace(NOTHING, tiers=(tier,))
    service.close()
    service._rates = Rates()
    source.figures = {"host": InOut()}
    service.open()
    source.figures = {"host": InOut(read_bytes=1 << 20)}
    service.sample(time.monotonic() + 1.0)
    with AdminClient(service.address) as client:
        assert client.stats()["tiers"][0]["io"]["read_bytes_s"] > 1000


def test_daemon_that_does_not_answer_is_told_from_none(
    service: AdminService, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process: one line with what to do."""
    monkeypatch.setattr("kvstore.cli_admin.CALL_DEADLINE_S", 0.1)
    source.free = threading.Event()
    with AdminClient(service.address) as client:
        with pytest.raises(KVStoreError, match=r"doesn't answer within 0\.1 s; .*look at its log"):
            client.stats()
        source.free.set()


def test_folder_of_the_address_must_be_there(private_folder: Path, source: ScriptedSource) -> None:
    """Not "in use or not allowed"."""
    with pytest.raises(TierUnavailableError, match="its folder doesn't exist"):
        AdminService(f"unix:{private_folder}/none/admin.sock", source).open()


def test_closed_service_is_no_daemon(service: AdminService, private_folder: Path) -> None:
    """Its socket is gone with it, and a new service can take the address."""
    service.close()
    with pytest.raises(NoDaemonError), AdminClient(service.address) as client:
        client.stats()
    service.open()
    assert health_of(service.address)


def test_address_of_a_living_service_is_not_taken_over(
    service: AdminService, source: ScriptedSource
) -> None:
    """gRPC by itself would unlink the other's socket and bind."""
    with pytest.raises(TierUnavailableError, match="another daemon listens there"):
        AdminService(service.address, source).open()
    assert health_of(service.address)


def test_path_that_is_no_socket_is_left_alone(private_folder: Path, source: ScriptedSource) -> None:
    """A file of the user's is never replaced."""
    path = private_folder / "notes.txt"
    path.write_text("keep")
    with pytest.raises(TierUnavailableError, match="isn't a socket"):
        AdminService(f"unix:{path}", source).open()
    assert path.read_text() == "keep"


def test_port_in_use_is_refused(source: ScriptedSource) -> None:
    """One line that names the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TierUnavailableError, match="can't be had"):
            AdminService(address, source).open()


# ------------------------------------------------------------------ with a real daemon


def test_running_daemon_serves_health_and_reflection(daemon: RunningDaemon) -> None:
    """As soon as it says that it is ready."""
    address = daemon.stats()["process"]["admin"]
    assert health_of(address) == health_pb2.HealthCheckResponse.SERVING
    assert SERVICE in services_of(address)


def test_admin_on_a_loopback_port(start_daemon: StartDaemon) -> None:
    """For those who can't reach a Unix socket; the command line finds it by the same setting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    daemon = start_daemon(KVSTORE_ADMIN_ADDRESS=address)
    assert daemon.stats()["process"]["admin"] == address


def test_clear_by_alias_removes_every_local_tier_for_good(start_daemon: StartDaemon) -> None:
    """field case 12, the admin half, and field case 110: the model is registered by path and alias;
    ``clear --model ALIAS`` empties host memory and NVMe, says that it is node-local, leaves other
    models alone, and a restart brings nothing back."""
    daemon = start_daemon()
    with SmallEngine(daemon.socket, 8, "org/one", alias="one", name="e1") as engine:
        keys = engine.keys(tokens(8))
        engine.fill(keys)
        assert engine.store(keys).leading_chunks == 8
        with SmallEngine(daemon.socket, 8, "org/two", name="e2") as other:
            others = other.keys(tokens(8))
            other.fill(others)
            assert other.store(others).leading_chunks == 8
            daemon.wait_written(16)
            done = daemon.kvstore("clear", "--model", "one", "--yes")
            assert done.returncode == 0, done.stderr
            assert "cleared" in done.stdout
            assert "of this node; other nodes keep theirs" in done.stdout
            assert engine.hits(keys) == 0
            assert other.hits(others) == 8
            assert engine.retrieve(keys).leading_chunks == 0
    daemon.kill()
    daemon.start()
    after = daemon.wait_for_stats(lambda s: not s["tiers"][1]["scanning"])
    assert {space["model"]: space["chunks"] for space in after["spaces"]} in (
        {"org/one": 0, "org/two": 8}, {"org/two": 8},
    )  # fmt: skip
    with SmallEngine(daemon.socket, 8, "org/one", alias="one") as engine:
        assert engine.hits(engine.keys(tokens(8))) == 0


def test_clear_of_an_unknown_model_names_the_known_ones(daemon: RunningDaemon) -> None:
    """A typing error mustn't look like an empty cache. Path and alias are both accepted names."""
    with SmallEngine(daemon.socket, 4, "org/one", alias="one"):
        done = daemon.kvstore("clear", "--model", "noe", "--yes")
        assert done.returncode == 1
        assert "known models: one, org/one" in done.stderr
        assert daemon.kvstore("clear", "--model", "org/one", "--json").returncode == 0


def test_clear_asks_and_needs_a_terminal_for_it(daemon: RunningDaemon) -> None:
    """In a script, without --yes, nothing is cleared."""
    done = daemon.kvstore("clear", "--all", text="y\n")
    assert done.returncode == 2
    assert "add --yes" in done.stderr


def test_calls_that_are_refused_leave_nothing_behind(daemon: RunningDaemon) -> None:
    """Whatever is no message of its call is answered so, hundreds of times, and the daemon, which
    collects no cycles, isn't larger for it."""
    (line,) = [line for line in daemon.lines if line.startswith("admin ")]
    process = Path(f"/proc/{daemon.pid}/statm")

    def grown_kib(calls: int, before: int = 0) -> int:
        for call in (clear, stats) * (calls // 2):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"\xff\xff\xff", timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return int(process.read_text().split()[1]) * 4 - before

    with grpc.insecure_channel(line.split()[1]) as channel:
        clear, stats = (channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Clear", "Stats"))
        assert grown_kib(600, grown_kib(100)) < 4 << 10
