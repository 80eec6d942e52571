"""Settings: four sources, one parser, one line for each mistake, and sizes that fit the machine."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from kvstore import config_kinds as kinds
from kvstore.cli_serve import flatten, print_config
from kvstore.config import SCHEMA, Setting, load, parse, suggestion
from kvstore.config_kinds import MASK
from kvstore.core.errors import ConfigError
from kvstore.sizing import fit
from tests.test_sizing import machine

MIB = 1 << 20
SAMPLES = {
    "socket": "/run/a/kv.sock",
    "admin.address": "127.0.0.1:7411",
    "host.size": "1GiB",
    "host.slab_size": "32MiB",
    "host.huge_pages": "off",
    "nvme.size": "2GiB",
    "nvme.path": "/data/kv",
    "nvme.slab_size": "128MiB",
    "nvme.direct_io": "off",
    "nvme.prewrite": "512MiB",
    "nvme.write_budget": "200MiB",
    "nvme.admit_after": "2",
    "redis.url": "redis://host:6380/1",
    "redis.prefix": "fleet",
    "redis.ttl": "1h",
    "redis.codec": "lz4",
    "redis.connect_timeout": "500ms",
    "redis.timeout": "5s",
    "redis.probe_timeout": "10ms",
    "redis.connections": "4",
    "redis.split_size": "32MiB",
    "redis.namespace_size": "10GiB",
    "redis.backlog": "128",
    "redis.username": "kv",
    "redis.password": "hush",
    "redis.ca": "/etc/ca.pem",
    "redis.cert": "/etc/cert.pem",
    "redis.key": "/etc/key.pem",
    "eviction": "fifo",
    "tenants.quota": "uid:1001=20%,*=50%",
    "lease_s": "5min",
    "session.bytes_max": "1GiB",
    "session.partial": "miss",
    "threads.copy": "3",
    "threads.read": "5",
    "threads.write": "1",
    "log.level": "debug",
}
"""A value other than the default for each key; a new key must get one here."""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(folder), **variables}


@pytest.mark.parametrize("setting", SCHEMA, ids=lambda setting: setting.key)
def test_each_key_is_reachable_by_file_environment_and_flag(
    tmp_path: Path, setting: Setting
) -> None:
    """field case 107: every key of the schema, set in each of the three ways, gives the same parsed
    value, which isn't the default's."""
    text = SAMPLES[setting.key]
    file = tmp_path / "kv.toml"
    *tables, name = setting.key.split(".")
    file.write_text("".join(f"[{table}]\n" for table in tables) + f"{name} = {json.dumps(text)}\n")
    ways = (
        load({"config": str(file)}, environment(tmp_path)),
        load({}, environment(tmp_path, **{setting.variable(): text})),
        load({setting.key: text}, environment(tmp_path)),
    )
    values = [way.values[setting.key].value for way in ways]
    assert values[0] == values[1] == values[2]
    assert values[0] != load({}, environment(tmp_path)).values[setting.key].value
    assert [way.values[setting.key].source for way in ways] == [
        f"file {file}", f"environment {setting.variable()}", f"flag {setting.flag()}",
    ]  # fmt: skip


@pytest.mark.parametrize("literal", ["67108864", '"64MiB"', '"65536 KiB"'])
def test_file_takes_numbers_and_text_alike(tmp_path: Path, literal: str) -> None:
    """A size may be a TOML number or a string; both go through the one parser."""
    file = tmp_path / "kv.toml"
    file.write_text(f"[host]\nsize = {literal}\n")
    settings = load({"config": str(file)}, environment(tmp_path))
    assert settings.amount("host.size").nbytes == 64 * MIB


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """field case 106: the sources have one order, and the value that counts says which it is
    from."""
    file = tmp_path / "kv.toml"
    file.write_text("[host]\nsize = '1GiB'\n[nvme]\nsize = '1GiB'\nadmit_after = 3\n")
    settings = load(
        {"config": str(file), "host.size": "3GiB"},
        environment(tmp_path, KVSTORE_HOST_SIZE="2GiB", KVSTORE_NVME_SIZE="2GiB"),
    )
    assert settings.values["host.size"].text == "3GiB"
    assert settings.values["nvme.size"].text == "2GiB"
    assert settings.values["nvme.admit_after"].text == "3"
    assert settings.values["lease_s"].source == "default"


def test_users_own_file_is_read_and_may_be_missing(tmp_path: Path) -> None:
    """~/.config/kvstore/kvstore.toml counts when it is there, without being named."""
    assert load({}, environment(tmp_path)).values["log.level"].text == "info"
    file = tmp_path / ".config" / "kvstore" / "kvstore.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[log]\nlevel = 'debug'\n")
    assert load({}, environment(tmp_path)).values["log.level"].source == f"file {file}"


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_named_file_that_is_missing_is_an_error(tmp_path: Path, how: str) -> None:
    """field case 106: a file that was named and isn't there is never skipped."""
    flags = {"config": "/nowhere.toml"} if how == "flag" else {}
    variables = {} if how == "flag" else {"KVSTORE_CONFIG": "/nowhere.toml"}
    with pytest.raises(ConfigError, match=r"config='/nowhere.toml' .* name one that exists"):
        load(flags, environment(tmp_path, **variables))


@pytest.mark.parametrize("key", ["redis.password", "redis.url"])
def test_a_secret_of_the_wrong_kind_in_the_file_is_not_shown(tmp_path: Path, key: str) -> None:
    """field case 74: a list where a string belongs is refused without its content."""
    file = tmp_path / "kv.toml"
    file.write_text(f"{key} = ['redis://u:s3cr3t@h']\n")
    with pytest.raises(ConfigError, match=rf"{key}=.*is refused") as caught:
        load({"config": str(file)}, environment(tmp_path))
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[host]\nsiez = '1GiB'\n", "unknown setting 'host.siez' in .*did you mean host.size"),
        ("hots.size = '1GiB'\n", "did you mean host.size"),
        ("zzzzzz = 1\n", "valid are socket, admin.address"),
        ("[host]\nsize = [1]\n", "host.size=.* is refused; valid is one string"),
        ("[host\n", "can't be read: .*; it must be TOML"),
        ("a = " + "[" * 5000, "can't be read: .*; it must be TOML"),
        (
            "[host]\nsize = 'much'\n",
            "host.size='much' .file .* is refused; valid: auto, a size",
        ),
    ],
)
def test_mistakes_in_the_file_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    """What was given, what is valid, and the name that was probably meant."""
    file = tmp_path / "kv.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load({"config": str(file)}, environment(tmp_path))
    assert "\n" not in str(caught.value)


def test_unknown_variable_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    """A misspelt KVSTORE_ variable would otherwise be silently not used."""
    with pytest.raises(ConfigError, match=r"KVSTORE_HOST_SIZ .*did you mean KVSTORE_HOST_SIZE\?"):
        load({}, environment(tmp_path, KVSTORE_HOST_SIZ="1GiB"))


def test_service_links_of_kubernetes_are_not_settings(tmp_path: Path) -> None:
    """A Service called kvstore makes Kubernetes set these in every pod of its namespace."""
    links = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "7411",
        "KVSTORE_SERVICE_PORT_ADMIN": "7411",
        "KVSTORE_PORT": "tcp://10.0.0.1:7411",
        "KVSTORE_PORT_7411_TCP": "tcp://10.0.0.1:7411",
        "KVSTORE_PORT_7411_TCP_ADDR": "10.0.0.1",
        "KVSTORE_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    assert load({}, environment(tmp_path, **links)).values["host.size"].source == "default"


def test_no_setting_is_mistaken_for_a_service_link(tmp_path: Path) -> None:
    """Every variable of the schema is one that the environment can set."""
    for setting in SCHEMA:
        settings = load({}, environment(tmp_path, **{setting.variable(): SAMPLES[setting.key]}))
        assert settings.values[setting.key].source.startswith("environment"), setting.key


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("host.size", "64 MuB"),
        ("host.size", "-1"),
        ("host.size", "120%"),
        ("host.size", ""),
        ("host.huge_pages", "maybe"),
        ("nvme.direct_io", "yes"),
        ("nvme.admit_after", "0"),
        ("nvme.write_budget", "fast"),
        ("tenants.quota", "0%"),
        ("tenants.quota", "a=10%,a=20%"),
        ("tenants.quota", "a=10%,30%,*=20%"),
        ("tenants.quota", "=10%"),
        ("tenants.quota", "a"),
        ("lease_s", "0"),
        ("lease_s", "soon"),
        ("threads.copy", "-1"),
        ("threads.copy", "1000"),
        ("log.level", "loud"),
        ("socket", ""),
        ("session.bytes_max", "x"),
        ("session.bytes_max", "0"),
        ("session.bytes_max", "off"),
        ("host.size", "9" * 400),
        ("nvme.path", "~nosuchuser/x"),
        ("socket", "~nosuchuser/x"),
        ("socket", "unix:"),
        ("socket", "unix://"),
        ("socket", "http://x"),
    ],
)
def test_bad_value_names_key_value_source_and_what_is_valid(
    tmp_path: Path, key: str, text: str
) -> None:
    """One line each, with everything needed to put it right. Field case 64: an option of direct
    I/O that isn't valid is an error at start."""
    with pytest.raises(ConfigError) as caught:
        load({key: text}, environment(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{key}={text!r} (flag --")
    assert len(message) < 600
    assert "; valid: " in message
    assert "\n" not in message


def test_suggestion_lists_all_where_nothing_is_near() -> None:
    """A word like none of them gets the list."""
    assert suggestion("hostsize", ["host.size", "lease_s"]) == "did you mean host.size?"
    assert suggestion("qqq", ["a", "b"]) == "valid are a, b"


def test_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A Unix socket's path has at most 107 bytes; beyond it bind would fail without a reason."""
    fits = load({"socket": "/" + "a" * 106}, environment(tmp_path))
    assert len(str(fits.socket())) == 107
    with pytest.raises(ConfigError, match=r"has 108 bytes; .* at most 107: choose a shorter one"):
        load({"socket": "/" + "a" * 107}, environment(tmp_path)).socket()
    with pytest.raises(ConfigError, match=r"admin.address=.* at most 107"):
        fits.admin_address()


def test_places_follow_the_xdg_folders(tmp_path: Path) -> None:
    """Socket under XDG_RUNTIME_DIR, chunks under XDG_CACHE_HOME, each with its fallback."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    xdg = {"XDG_RUNTIME_DIR": str(runtime), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    settings = load({}, environment(tmp_path, **xdg))
    assert settings.socket() == runtime / "kvstore" / "kvstore.sock"
    assert settings.nvme_path() == tmp_path / "cache" / "kvstore" / "nvme"
    assert settings.admin_address() == f"unix:{runtime}/kvstore/kvstore-admin.sock"
    bare = load({}, environment(tmp_path, XDG_CACHE_HOME="relative"))
    assert str(bare.socket()).startswith("/tmp/kvstore-")
    assert bare.nvme_path() == tmp_path / ".cache" / "kvstore" / "nvme"


@pytest.mark.parametrize("address", ["0.0.0.0:7411", "10.1.2.3:7411", "[::]:7411", "host:80"])
def test_admin_address_that_others_reach_is_refused(tmp_path: Path, address: str) -> None:
    """field case 121: without TLS and a token, which this version doesn't have, administration
    stays on this machine."""
    settings = load({"admin.address": address}, environment(tmp_path))
    with pytest.raises(ConfigError, match="needs TLS and a token, which this version doesn't have"):
        settings.admin_address()


@pytest.mark.parametrize("address", ["127.0.0.1:7411", "localhost:1", "[::1]:65535", "unix:/a/b"])
def test_admin_address_of_this_machine_is_taken(tmp_path: Path, address: str) -> None:
    """A Unix socket or a loopback port."""
    url = load({"admin.address": "unix:///a/b", "socket": "unix:///a/c"}, environment(tmp_path))
    assert (url.admin_address(), str(url.socket())) == ("unix:/a/b", "/a/c")
    assert load({"admin.address": address}, environment(tmp_path)).admin_address() == address


@pytest.mark.parametrize(
    "address",
    ["7411", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "x:y", "127.0.0.1:²", "unix:",
     "unix:~nosuchuser/x", "unix:http://x"],
)  # fmt: skip
def test_admin_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    """What isn't an address gets the valid forms."""
    settings = load({"admin.address": address}, environment(tmp_path))
    with pytest.raises(ConfigError, match="valid: auto, unix:/path, or a loopback host:port"):
        settings.admin_address()


# ------------------------------------------------------------------ --print-config


def test_tree_and_schema_have_the_same_keys(tmp_path: Path) -> None:
    """Every setting reaches the typed tree, and nothing is in the tree that can't be set."""
    config = fit(load({}, environment(tmp_path)), machine())
    derived = {"host.staging_slots"}
    assert set(flatten(config)) - derived == {setting.key for setting in SCHEMA}
    assert dataclasses.is_dataclass(config)


def test_printed_config_can_be_used_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """field case 106: each value with its source, in a form that gives the same daemon again."""
    variables = environment(tmp_path, KVSTORE_HOST_SIZE="1GiB", XDG_RUNTIME_DIR="")
    settings = load({"lease_s": "5min"}, variables)
    config = fit(settings, machine())
    print_config(settings, config, as_json=False)
    text = capsys.readouterr().out
    assert "# environment KVSTORE_HOST_SIZE" in text
    assert "# flag --lease-s" in text
    assert "# default (auto)" in text
    assert tomllib.loads(text)["host"]["size"] == "1GiB"
    file = tmp_path / "again.toml"
    file.write_text(text)
    assert fit(load({"config": str(file)}, environment(tmp_path)), machine()) == config


def test_secrets_are_never_shown() -> None:
    """field case 123: neither the stored text nor an error repeats what was given for a secret."""
    secret = Setting("a.token", kinds.integer(1, 9), "1", "a secret", secret=True)
    with pytest.raises(ConfigError) as caught:
        parse(secret, "hunter2", "environment KVSTORE_A_TOKEN")
    assert "hunter2" not in str(caught.value)
    assert parse(secret, "7", "default").text == MASK
