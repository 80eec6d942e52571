"""The wheel: built from the project, installed into an environment of its own, and used far
away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from kvstore import __version__
from tests.conftest import ROOT, SETTINGS, RunningDaemon, private_environment

SOURCES = ("kvstore", "connectors", "cuda", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (folder / "out").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with nothing but the wheel. Its dependencies are those
    of the environment that runs the tests, found after its own packages."""
    folder = tmp_path_factory.mktemp("fresh") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
         "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=300,
    )  # fmt: skip
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_wheel_holds_the_packages_and_nothing_of_the_tests(wheel: Path) -> None:
    """Daemon, client, generated code and connectors; the licence; no test, no benchmark."""
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "kvstore/cli.py",
        "kvstore/core/service.py",
        "kvstore/proto_gen/admin_pb2.py",
        "kvstore/proto_gen/engine_pb2.py",
        "kvstore_transformers/__init__.py",
        "kvstore_vllm/__init__.py",
    ):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    connectors = {"kvstore_transformers", "kvstore_vllm"}
    assert tops == {"kvstore", *connectors, f"kvstore-{__version__}.dist-info"}


def test_bare_package_needs_no_torch(wheel: Path) -> None:
    """Torch and the engines are extras."""
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    needs = [
        line
        for line in archive.read(name).decode().splitlines()
        if line.startswith("Requires-Dist")
    ]
    bare = [line for line in needs if "extra ==" not in line]
    assert any("grpcio" in line for line in bare)
    assert not any("torch" in line or "vllm" in line or "redis" in line for line in bare)
    extras = {line.split('"')[1] for line in needs if 'extra == "' in line}
    assert extras >= {"cuda", "redis", "vllm", "sglang", "transformers", "dev"}


def test_installed_wheel_serves_outside_the_repository(
    installed: Path, private_folder: Path
) -> None:
    """``kvstore serve``, ``stats`` and ``doctor`` of the installed scripts, from another folder,
    with the code of the wheel and none of the checkout's."""
    environment = private_environment(private_folder, SETTINGS)
    del environment["PYTHONPATH"]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=environment,
            cwd=private_folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    where = run(str(installed / "python"), "-c", "import kvstore; print(kvstore.__file__)")
    assert where.stdout.startswith(str(installed.parent)), where.stdout + where.stderr
    script = str(installed / "kvstore")
    assert run(script, "--version").stdout.strip() == f"kvstore {__version__}"
    assert run(script, "stats").returncode == 3
    daemon = RunningDaemon(private_folder, environment, ())
    daemon.start(script)
    try:
        shown = run(script, "stats", "--json")
        assert shown.returncode == 0, shown.stderr
        process = json.loads(shown.stdout)["process"]
        assert (process["pid"], process["version"]) == (daemon.pid, __version__)
        checked = run(script, "doctor")
        assert checked.returncode == 0, checked.stdout
        assert f"pid {daemon.pid}" in checked.stdout
    finally:
        assert daemon.stop() == 0
    assert run(script, "verify").returncode == 0
