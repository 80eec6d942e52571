"""The Redis tier's settings: what is refused, in one line that holds no secret."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvstore.cli_serve import print_config
from kvstore.config import Settings, load
from kvstore.core.errors import ConfigError
from kvstore.core.limits import RemoteLimits
from kvstore.daemon_parts import limits_of
from kvstore.sizing import OWN_BYTES, Config, fit
from kvstore.sizing_redis import redis_settings
from tests.test_sizing import machine

SECRET = "s3cr3t"
MIB = 1 << 20


def settings_of(folder: Path, **redis: str) -> Settings:
    return load({f"redis.{name}": text for name, text in redis.items()}, {"HOME": str(folder)})


def fitted(folder: Path, **redis: str) -> Config:
    return fit(settings_of(folder, **redis), machine())


def test_without_an_address_there_is_no_redis(tmp_path: Path) -> None:
    """The default, and the word off; whatever else is set for it."""
    for given in ({}, {"url": "off", "password": SECRET, "ttl": "1h", "ca": "/nowhere"}):
        config = fitted(tmp_path, **given)
        assert config.redis.url == ""
        assert limits_of(config).remote is None


def test_settings_reach_the_tier_and_the_core(tmp_path: Path) -> None:
    """Each where it belongs, in bytes and seconds."""
    pem = tmp_path / "a.pem"
    pem.write_text("x")
    config = fitted(
        tmp_path, url="rediss://h:1/3", prefix="fleet/a", ttl="1h", connect_timeout="300ms",
        timeout="4s", probe_timeout="5ms", connections="3", split_size="1MiB",
        namespace_size="10GiB", backlog="77", username="u", password=SECRET, ca=str(pem),
        cert=str(pem), key=str(pem),
    )  # fmt: skip
    told = redis_settings(config.redis)
    assert (told.url, told.prefix, told.ttl_s) == ("rediss://h:1/3", "fleet/a", 3600.0)
    assert (told.connect_timeout_s, told.operation_timeout_s) == (0.3, 4.0)
    assert (told.connections, told.split_bytes, told.namespace_bytes) == (3, MIB, 10 << 30)
    assert (told.ca, told.cert, told.key) == (str(pem),) * 3
    assert (told.address.username, told.address.password) == ("u", SECRET)
    assert told.codec == "identity"
    remote = limits_of(config).remote
    assert remote == RemoteLimits(probe_s=0.005, backlog_max=77, read_depth=4, write_depth=4)
    assert SECRET not in repr(config)
    assert SECRET not in repr(settings_of(tmp_path, password=SECRET))


@pytest.mark.parametrize(
    "url",
    [f"redis://u:{SECRET}@h:6379/2", f"rediss://:{SECRET}@[::1]:6380", f"unix://u:{SECRET}@/p.sock",
     f"redis+cluster://u:{SECRET}@a:1,b:2", f"redis+sentinel://u:{SECRET}@a,b:2/service/1"],
)  # fmt: skip
def test_credentials_are_shown_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    """field case 74: --print-config, as text and as JSON, shows where the servers are and hides who
    we are there."""
    settings = settings_of(tmp_path, url=url, password=f"other-{SECRET}")
    for as_json in (False, True):
        print_config(settings, fit(settings, machine()), as_json)
        shown = capsys.readouterr().out
        assert SECRET not in shown
        scheme, _, rest = url.partition("://")
        assert f"{scheme}://********@{rest.rpartition('@')[2]}" in shown


@pytest.mark.parametrize(
    ("url", "said"),
    [(f"http://u:{SECRET}@h", "no valid address"),
     (f"redis://u:{SECRET}@h:99999", "a server is host, host:port or"),
     (f"redis://u:{SECRET}/x@h", "percent-encoded"),
     (f"redis://u:{SECRET}?x@h", "percent-encoded"),
     (f"redis://u:1?{SECRET}@h", "no parameter but db"),
     (f"redis://u:a@{SECRET}@h", "%40"),
     (f"redis://h?password={SECRET}", "no parameter but db"),
     (f"redis+cluster://u:{SECRET}@h/3", "a Cluster has database 0 only"),
     (f"redis+sentinel://u:{SECRET}@h", "names its service"),
     (f"u:{SECRET}@h", "valid: off, or redis://"),
     (f"redis:// u:{SECRET}@h", "valid: off, or redis://")],
)  # fmt: skip
def test_wrong_address_is_refused_without_its_secret(tmp_path: Path, url: str, said: str) -> None:
    """field case 74: what is wrong and where it was given; never the password, however the address
    is misspelt."""
    with pytest.raises(ConfigError) as caught:
        fitted(tmp_path, url=url)
    text = str(caught.value)
    assert said in text
    assert "redis.url=" in text
    assert "flag --redis-url" in text
    assert "\n" not in text
    assert SECRET not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [({"ca": "a.pem"}, "is for TLS, which redis.url=redis://h (flag --redis-url) hasn't"),
     ({"url": "rediss://h", "ca": "/no/ca.pem"}, "redis.ca=/no/ca.pem (flag --redis-ca) can't be"),
     ({"url": "rediss://h", "key": "a.pem"}, "a key needs its certificate"),
     ({"codec": "gzip"}, "redis.codec=gzip (flag --redis-codec): codec=gzip: no such codec is"),
     ({"prefix": "a:b"}, "valid: 1 to 64 letters"),
     ({"split_size": "1KiB"}, "valid: a size from 64KiB to 512MiB"),
     ({"ttl": "-1"}, "valid: off, or a duration"),
     ({"connections": "0"}, "a whole number from 1"),
     ({"probe_timeout": "250ms"}, "a duration from 0.001s to 0.2s, in ms, s, min or h")],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_tier_are_refused(
    tmp_path: Path, given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, in one line, with what is valid."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pem").write_text("x")
    with pytest.raises(ConfigError) as caught:
        fitted(tmp_path, **{"url": "redis://h", **given})
    assert said in str(caught.value)


def test_missing_package_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py is an extra: who asks for the tier is told how to get it; others never need it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs redis and hiredis, not .*'kvstore\[redis\]'"):
        fitted(tmp_path, url="redis://h")
    assert fitted(tmp_path).redis.url == ""


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_every_codec_is_there_with_the_extra(tmp_path: Path, codec: str) -> None:
    assert fitted(tmp_path, url="redis://h", codec=codec).redis.codec == codec


@pytest.mark.parametrize(("size", "off", "on"), [("64MiB", 2, 3), ("8GiB", 4, 6)])
def test_reads_from_redis_have_staging_of_their_own(
    tmp_path: Path, size: str, off: int, on: int
) -> None:
    """In a full host NVMe's reads may take as many staging slots as without Redis, and some are
    left."""
    flags = {"host.size": size}
    for url, slots in (("off", off), ("redis://h", on)):
        settings = load(flags | {"redis.url": url}, {"HOME": str(tmp_path)})
        assert fit(settings, machine()).host.staging_slots == slots


def test_memory_of_the_tier_counts(tmp_path: Path) -> None:
    """What fits without Redis may not fit beside it, and then the start says so."""
    flags = {"host.size": "64MiB", "nvme.size": "off"}
    facts = machine(limit=64 * MIB + OWN_BYTES)
    assert fit(load(flags, {"HOME": str(tmp_path)}), facts).host.size == 64 * MIB
    with pytest.raises(ConfigError, match="the daemon's own 224 MiB"):
        fit(load(flags | {"redis.url": "redis://h"}, {"HOME": str(tmp_path)}), facts)


def test_missing_password_shows_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask stands for a secret that there is, so that one sees whether it was taken."""
    for password, shown in ((SECRET, '"********"'), ("", '""')):
        settings = settings_of(tmp_path, url="redis://h", password=password)
        print_config(settings, fit(settings, machine()), False)
        [line] = [x for x in capsys.readouterr().out.splitlines() if "redis.password" in x]
        assert line.split()[2] == shown
