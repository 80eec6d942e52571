"""The commands that measure other caches, as far as they need no download: what they are asked, and
why they skip."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from kvstore_vllm.pip_environment import EnvironmentFault, PipEnvironment

from bench.harness import Bench, Size
from bench.peer import Peer, Skip, main, prepare, requirements_of_ours, versus
from bench.peer_lmcache import PEER as LMCACHE
from bench.peer_mooncake import PEER as MOONCAKE
from tests.conftest import ROOT

PEERS = pytest.mark.parametrize("peer", [LMCACHE, MOONCAKE], ids=lambda peer: peer.name)


def environment(folder: Path, peer: Peer) -> PipEnvironment:
    """One that says that it is whole; its Python is this test's."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    wanted = " ".join((peer.requirement, *requirements_of_ours()))
    found = PipEnvironment(folder, f"kvstore-{peer.name}.stamp", wanted, lambda line: None)
    found.finish()
    return found


def run(peer: Peer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", f"bench.peer_{peer.name}", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@PEERS
def test_without_an_environment_it_says_how_to_get_one(peer: Peer, tmp_path: Path) -> None:
    """Nothing is downloaded unless it is asked for; a skip is no failure."""
    folder = tmp_path / "env"
    done = run(peer, "--json", "--environment", str(folder))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["peer"] == peer.requirement
    assert str(folder) in document["skipped"]
    assert "--build" in document["skipped"]
    assert document["skipped"] in done.stderr
    assert not folder.exists()


@PEERS
def test_arguments_are_checked(peer: Peer) -> None:
    """A size that doesn't exist is wrong usage."""
    done = run(peer, "--size", "huge")
    assert done.returncode == 2
    assert "invalid choice: 'huge'" in done.stderr


def test_an_environment_of_another_version_does_not_count(tmp_path: Path) -> None:
    """Where the stamp names something else, what is there isn't used."""
    environment(tmp_path / "env", MOONCAKE)
    with pytest.raises(Skip, match="holds no environment with lmcache"):
        prepare(LMCACHE, tmp_path / "env", build=False)


def test_libraries_that_are_missing_are_named(tmp_path: Path) -> None:
    """Mooncake's wheel needs libraries of the system; this Python has no Mooncake at all."""
    folder = tmp_path / "env"
    environment(folder, MOONCAKE)
    with pytest.raises(Skip) as found:
        prepare(MOONCAKE, folder, build=False)
    assert "mooncake.store doesn't load: ModuleNotFoundError" in str(found.value)
    for library in ("libibverbs1", "libnuma1", "libcurl4"):
        assert library in str(found.value)


def test_an_installation_that_fails_is_a_skip(tmp_path: Path) -> None:
    """pip's reason is given, and nothing is taken for whole."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)

    def fill(_: PipEnvironment) -> None:
        raise EnvironmentFault("pip install failed: ERROR: no route")

    peer = Peer("x", "X", "x==1", "x", "1 GB", fill, "", {}, (), lambda bench: None)
    with pytest.raises(Skip, match=r"x==1 can't be installed into .*: .*no route"):
        prepare(peer, folder, build=True)
    assert not list(folder.glob("*.stamp"))


def test_inside_its_environment_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure is the peer's time by ours, per run; both sides' times stand beside it."""
    runs = [{"ours": [0.001, 0.001], "peer": [0.003, 0.005]}, {"ours": [0.002], "peer": [0.002]}]
    rows: list[float] = []

    def measure(bench: Bench) -> None:
        rows.extend(versus(bench, peer, "work", runs).values)

    peer = Peer("x", "X", "x==1", "json", "1 GB", lambda _: None, "", {}, ("no tea",), measure)
    folder = tmp_path / "env"
    environment(folder, peer)
    monkeypatch.setattr(sys, "prefix", str(folder))
    arguments = ("--environment", str(folder), "--folder", str(tmp_path), "--json")
    assert main(peer, arguments) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [row["runs"] for row in document["rows"]] == [rows] == [[4.0, 1.0]]
    assert document["rows"][0]["beside"] == "kvstore 1.5 ms, X 3 ms (medians)"
    assert "differs: no tea" in said.err


def test_small_numbers_are_readable() -> None:
    """The row itself, as it is shown."""
    out = StringIO()
    bench = Bench(Size.SMALL, Path(), out)
    versus(bench, LMCACHE, "start", [{"ours": [0.5], "peer": [5.0]}])
    assert "kvstore 500 ms, LMCache 5,000 ms (medians)" in out.getvalue()
