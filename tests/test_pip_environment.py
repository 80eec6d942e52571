"""Environments of their own for other software, as far as that needs no download."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvstore_vllm import pip_environment
from kvstore_vllm.pip_environment import EnvironmentFault, PipEnvironment


def environment(folder: Path, wanted: str = "a==1") -> PipEnvironment:
    """One whose interpreter is this test's."""
    (folder / "bin").mkdir(exist_ok=True)
    if not (folder / "bin" / "python").exists():
        (folder / "bin" / "python").symlink_to(sys.executable)
    return PipEnvironment(folder, "a.stamp", wanted, lambda line: None)


def test_an_environment_is_whole_once_its_build_was_finished(tmp_path: Path) -> None:
    """An interrupted build is gone on with, and so is one of another version."""
    assert not environment(tmp_path).is_whole()
    environment(tmp_path).finish()
    assert environment(tmp_path).is_whole()
    assert not environment(tmp_path, "a==2").is_whole()


def test_requirements_leave_out_extras_and_what_is_named(tmp_path: Path) -> None:
    """pytest needs pluggy and, on other systems or for its own development, more."""
    found = environment(tmp_path).requirements("pytest", ("pluggy",))
    assert any(line.startswith("packaging") for line in found)
    assert not any(line.startswith("pluggy") or "extra ==" in line for line in found)


def test_what_pip_says_last_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement that isn't anywhere fails with pip's own line."""
    monkeypatch.setattr(pip_environment, "ATTEMPTS", 1)
    with pytest.raises(EnvironmentFault, match=r"pip install failed: ERROR: .*kvstore-no-such"):
        environment(tmp_path).install("--no-index", "kvstore-no-such==1")
