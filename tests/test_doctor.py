"""``kvstore doctor``: one line a check, what to do, and nothing left behind."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvstore import doctor
from kvstore.config import Settings, load
from kvstore.doctor import CHECKS
from kvstore.doctor_findings import Status
from tests.conftest import RunningDaemon, private_environment, run_kvstore


def settings(folder: Path, **flags: str) -> Settings:
    return load(
        {key.replace("__", "."): text for key, text in flags.items()}, {"HOME": str(folder)}
    )


def test_every_check_is_one_line_and_leaves_nothing(private_folder: Path) -> None:
    """On the machine that runs the tests nothing fails, so the command exits with 0."""
    environment = private_environment(private_folder)
    done = run_kvstore(environment, "doctor")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert len(lines) == len(CHECKS)
    assert all(line.split()[0] in ("ok", "warn", "skip") for line in lines)
    assert [path.name for path in private_folder.rglob("*")] == ["run"]


def test_json_has_status_detail_and_advice(private_folder: Path) -> None:
    """For machines."""
    report = json.loads(run_kvstore(private_environment(private_folder), "doctor", "--json").stdout)
    assert report["ok"] is True
    assert {"name", "status", "detail", "advice"} == set(report["checks"][0])
    assert {check["name"] for check in report["checks"]} >= {
        "python", "kernel", "memory", "memfd sealing", "open files", "locked memory", "disk",
        "direct I/O", "socket folder", "daemon", "extras", "gpu",
    }  # fmt: skip


def test_sizes_that_dont_fit_fail_with_advice(private_folder: Path) -> None:
    """The same refusal as at a start, before the start."""
    environment = private_environment(private_folder, {"KVSTORE_HOST_SIZE": "900TiB"})
    done = run_kvstore(environment, "doctor")
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert "host.size=900TiB" in line
    assert "set host.size to at most" in line


def test_running_daemon_is_found(daemon: RunningDaemon) -> None:
    """With its process ID and its state."""
    report = json.loads(daemon.kvstore("doctor", "--json").stdout)
    [found] = [check for check in report["checks"] if check["name"] == "daemon"]
    assert found["status"] == "ok"
    assert f"pid {daemon.pid}" in found["detail"]


def test_folder_of_the_socket_that_others_can_write_is_a_warning(tmp_path: Path) -> None:
    """Whoever writes there can put another daemon's socket in its place."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    finding = doctor.socket_folder(settings(tmp_path, socket=str(folder / "kv.sock")))
    assert finding.status is Status.WARN
    assert "chmod 700" in finding.advice
    folder.chmod(0o700)
    assert (
        doctor.socket_folder(settings(tmp_path, socket=str(folder / "kv.sock"))).status is Status.OK
    )


def test_direct_io_is_tried_in_the_folder_itself(tmp_path: Path) -> None:
    """What the file system says counts, and the file of the trial is gone."""
    finding = doctor.direct_io(settings(tmp_path, nvme__path=str(tmp_path / "nvme")))
    assert finding.status in (Status.OK, Status.WARN)
    assert list(tmp_path.iterdir()) == []


def test_nvme_in_memory_is_a_warning(tmp_path: Path) -> None:
    """/dev/shm is memory on every Linux."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    finding = doctor.disk(settings(tmp_path, nvme__path="/dev/shm/kvstore-test"))
    assert finding.status is Status.WARN
    assert "this file system is memory" in finding.advice


def test_a_folder_that_cannot_be_looked_at_keeps_no_check_from_its_line(
    private_folder: Path,
) -> None:
    """A doctor who faints at the wound helps nobody."""
    environment = private_environment(private_folder)
    done = run_kvstore(environment, "doctor", "--nvme-path", f"/tmp/{'x' * 300}/nvme")
    assert len(done.stdout.splitlines()) == len(CHECKS), done.stdout + done.stderr
    assert "ok    python" in done.stdout
    [disk] = [line for line in done.stdout.splitlines() if line.split()[1] == "disk"]
    assert disk.startswith("fail")
    assert "File name too long; set nvme.path to a folder of your own" in disk
    assert (done.returncode, done.stderr) == (1, "")


def test_a_check_that_fails_itself_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the system refuses."""

    def odd_check(_: Settings) -> doctor.Finding:
        raise PermissionError(13, "Permission denied", "/odd")

    monkeypatch.setattr(doctor, "CHECKS", (odd_check,))
    assert doctor.run(settings(tmp_path), argparse.Namespace(json=False, redis=None)) == 1
    line = " ".join(capsys.readouterr().out.split())
    assert line == "fail odd check Permission denied: /odd"
