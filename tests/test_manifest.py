"""The NVMe folder's manifest: durable, whole, and refused when it isn't ours."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, TierUnavailableError
from kvstore.core.messages import Place, SpaceRecord, TierName
from kvstore.testing import pattern, sample_header, scanned
from kvstore.tiers import manifest
from kvstore.tiers.nvme import NvmeTier
from tests.nvme_bench import KINDS, make_odd, remove_odd

SPACES = (
    SpaceRecord("tenänt", bytes(range(32)), "org/model", "alias", 7),
    SpaceRecord("other", bytes(32), "", "", 1 << 40),
)
SLAB_BYTES = 65_536
PLACE = Place(TierName.NVME, 0, 0, 16_384)


def opened(folder: Path) -> NvmeTier:
    tier = NvmeTier(folder, 2, SLAB_BYTES)
    tier.open()
    return tier


def content(folder: Path) -> dict[str, object]:
    data: dict[str, object] = json.loads((folder / "manifest.json").read_text())
    return data


def test_spaces_come_back_after_clean_stop_and_crash(tmp_path: Path) -> None:
    """A clear raised an epoch; whatever happens next, the epoch stays raised."""
    tier = opened(tmp_path)
    assert tier.load_manifest() == ()
    tier.save_manifest(SPACES)
    assert tier.load_manifest() == SPACES
    assert content(tmp_path)["clean"] is False
    tier._let_go()
    tier = opened(tmp_path)
    assert tier.load_manifest() == SPACES
    tier.scan(lambda slots: None, threading.Event())
    tier.close()
    assert content(tmp_path)["clean"] is True
    tier = opened(tmp_path)
    assert content(tmp_path)["clean"] is False
    assert tier.load_manifest() == SPACES
    tier.close()


def test_a_folder_left_uncleanly_stays_so_until_a_scan_has_ended(tmp_path: Path) -> None:
    """A daemon was killed; the next one stops before it has scanned: the one after that must still
    verify the newest slots, as a torn write may be among them."""
    opened(tmp_path)._let_go()
    tier = opened(tmp_path)
    tier.close()
    assert content(tmp_path)["clean"] is False


def test_format_at_rest(tmp_path: Path) -> None:
    """Later versions must read, or refuse, what this one writes."""
    tier = opened(tmp_path)
    tier.save_manifest(SPACES[1:])
    tier.close()
    assert content(tmp_path) == {
        "format": "kvstore/nvme/1",
        "slab_bytes": SLAB_BYTES,
        "clean": True,
        "spaces": [
            {"tenant": "other", "namespace": "00" * 32, "model": "", "alias": "", "epoch": 1 << 40}
        ],
    }


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_crash_in_the_middle_of_a_save_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The save fails before the rename: the old records stand, here and after a restart, and
    what was half written is removed."""
    tier = opened(tmp_path)
    tier.save_manifest(SPACES)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(TierUnavailableError, match="manifest"):
            tier.save_manifest(())
    assert tier.load_manifest() == SPACES
    assert (tmp_path / "manifest.json.tmp").exists()
    tier._let_go()
    tier = opened(tmp_path)
    assert tier.load_manifest() == SPACES
    assert not (tmp_path / "manifest.json.tmp").exists()
    tier.close()


def test_save_is_synced_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves the old file or the new one, never an empty one."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def counted(*args: object, real: object = real, name: str = name) -> object:
            calls.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, counted)
    manifest.save(tmp_path, manifest.Manifest(SLAB_BYTES, True, SPACES))
    assert calls == ["fsync", "replace", "fsync"]


def test_full_disk_does_not_keep_a_clear_from_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 63: the save finds no room until the reserve is given up."""
    tier = opened(tmp_path)
    reserve, real = tmp_path / "reserve", os.fsync
    assert reserve.stat().st_size == manifest.RESERVE_BYTES

    def full_disk(fd: int) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "full")
        real(fd)

    monkeypatch.setattr(os, "fsync", full_disk)
    tier.save_manifest(SPACES)
    monkeypatch.undo()
    assert manifest.load(tmp_path) == manifest.Manifest(SLAB_BYTES, False, SPACES)
    assert reserve.exists()
    tier.close()


@pytest.mark.parametrize(
    ("text", "word"),
    [('{"format": "kvstore/nvme/2"}', "kvstore/nvme/2"), ("[]", "None"), ("{", "damaged"),
     ('{"format": "kvstore/nvme/1"}', "damaged"), ("\xff", "None|damaged"),
     ('{"format": "kvstore/nvme/1", "slab_bytes": 65536, "clean": true, "spaces": [{}]}',
      "damaged")],
)  # fmt: skip
def test_manifest_of_another_kind_is_refused(tmp_path: Path, text: str, word: str) -> None:
    """Written by a later version, or damaged: one line that says what to do; nothing is touched,
    and the folder isn't left locked."""
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    for _ in range(2):
        with pytest.raises(ConfigError, match=word) as caught:
            opened(tmp_path)
        assert "\n" not in str(caught.value)
        assert "empty the folder" in str(caught.value)
    assert (tmp_path / "manifest.json").read_text(encoding="latin-1") == text


def edited(**changes: object) -> str:
    """A good manifest with other values, at its top or in its space."""
    space = {"tenant": "t", "namespace": "00" * 32, "model": "m", "alias": "", "epoch": 0}
    top = {"format": "kvstore/nvme/1", "slab_bytes": SLAB_BYTES, "clean": True}
    inner = space | {name: changes[name] for name in space if name in changes}
    outer = top | {name: changes[name] for name in top if name in changes}
    return json.dumps(outer | {"spaces": changes.get("spaces", [inner])})


@pytest.mark.parametrize(
    "changes",
    [
        {"slab_bytes": 0}, {"slab_bytes": -4096}, {"slab_bytes": 4096}, {"slab_bytes": 10_000},
        {"slab_bytes": 1 << 60}, {"slab_bytes": float("inf")}, {"slab_bytes": "65536"},
        {"slab_bytes": True}, {"slab_bytes": 65536.5},
        {"epoch": -1}, {"epoch": 1 << 63}, {"epoch": float("inf")}, {"epoch": 1.5},
        {"epoch": False}, {"namespace": "ab"}, {"namespace": "zz"}, {"namespace": 5},
        {"tenant": None}, {"tenant": "é" * 65}, {"tenant": "a\nb"}, {"model": "\ud800x"},
        {"model": "\x1b[2J"}, {"alias": "a" * 1025}, {"spaces": "none"}, {"spaces": 7},
    ],
)  # fmt: skip
def test_values_that_no_daemon_writes_are_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Somebody edited the manifest: what the wire or a header can't hold is refused at start, not
    found out by every ``kvstore stats`` later."""
    (tmp_path / "manifest.json").write_text(edited(**changes))
    with pytest.raises(ConfigError, match="is damaged") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "manifest.json").write_text(edited(epoch=(1 << 63) - 1))
    opened(tmp_path).close()


def test_one_namespace_with_two_epochs_is_damage(tmp_path: Path) -> None:
    """The lower one could bring back what was cleared."""
    spaces = json.loads(edited())["spaces"]
    (tmp_path / "manifest.json").write_text(edited(spaces=[spaces[0], spaces[0] | {"epoch": 4}]))
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path)


def test_manifest_of_brackets_is_damage(tmp_path: Path) -> None:
    """Nested deeper than a parser goes."""
    (tmp_path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.tmp", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_waited_for_nor_followed(
    tmp_path: Path, name: str, kind: str
) -> None:
    """A folder, a pipe or a symbolic link has one of the tier's names: one line, nothing hangs,
    nothing is written elsewhere, and no descriptor or lock stays behind."""
    folder, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("mine")
    make_odd(folder / name, kind, elsewhere)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnavailableError, match=f"can't be opened: {name}: "):
        opened(folder)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert elsewhere.read_text() == "mine"
    remove_odd(folder / name)
    opened(folder).close()


def test_other_slab_size_is_refused_with_the_way_on(tmp_path: Path) -> None:
    """The configuration changed under existing files: both sizes are named, and what to do."""
    opened(tmp_path).close()
    with pytest.raises(ConfigError, match=r"slab_bytes=65536.* says 131072; set it back to 65536"):
        NvmeTier(tmp_path, 2, 2 * SLAB_BYTES).open()
    opened(tmp_path).close()


def test_chunks_without_a_manifest_are_gone_for_good(tmp_path: Path) -> None:
    """Somebody removed the manifest, and with it the epochs: what was cleared must not come back
    under epoch 1, so nothing comes back, at this start or a later one."""
    tier = opened(tmp_path)
    tier.write(PLACE, sample_header(1, 5000), pattern(1, 5000))
    tier.close()
    (tmp_path / "manifest.json").unlink()
    for _ in range(2):
        tier = opened(tmp_path)
        assert [slot for slot in scanned(tier) if slot.header] == []
        tier.close()


def test_close_that_fails_is_no_clean_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device refuses the last sync: the next start verifies, as after a crash."""
    tier = opened(tmp_path)
    tier.write(PLACE, sample_header(1, 5000), pattern(1, 5000))

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        tier.close()
    assert "isn't left cleanly" in caplog.text
    assert content(tmp_path)["clean"] is False
    tier = opened(tmp_path)
    tier.read(PLACE, sample_header(1, 5000), np.zeros(5000, np.uint8))
    tier.close()
