"""Addresses and settings of the Redis tier: every form, and no secret in any text."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.core.errors import ConfigError
from kvstore.tiers.redis_settings import RedisMode, RedisSettings, parse

SECRET = "s3cr%40t"
STANDALONE, SENTINEL, CLUSTER = RedisMode


@pytest.mark.parametrize(
    ("url", "mode", "hosts", "database", "tls"),
    [
        ("redis://h", STANDALONE, (("h", 6379),), 0, False),
        ("redis://u:p%40ss@h:6380/2", STANDALONE, (("h", 6380),), 2, False),
        ("rediss://h:1", STANDALONE, (("h", 1),), 0, True),
        ("REDIS://h?db=7", STANDALONE, (("h", 6379),), 7, False),
        ("redis://[::1]", STANDALONE, (("::1", 6379),), 0, False),
        ("rediss://[fe80::2]:7/1", STANDALONE, (("fe80::2", 7),), 1, True),
        ("redis://a:1,b:2", CLUSTER, (("a", 1), ("b", 2)), 0, False),
        ("redis+cluster://a", CLUSTER, (("a", 6379),), 0, False),
        ("rediss+cluster://a:1,[::1]:2/", CLUSTER, (("a", 1), ("::1", 2)), 0, True),
        ("redis+sentinel://a,b:2/m/3", SENTINEL, (("a", 26379), ("b", 2)), 3, False),
    ],
)
def test_addresses(
    url: str, mode: RedisMode, hosts: tuple[tuple[str, int], ...], database: int, tls: bool
) -> None:
    """Field case 74: the forms that users write."""
    found = parse(url)
    assert (found.mode, found.hosts, found.database, found.tls) == (mode, hosts, database, tls)


def test_unix_sockets_and_services() -> None:
    """A path instead of hosts; Sentinel's service."""
    assert (parse("unix:///p.sock").path, parse("unix:///p.sock").hosts) == ("/p.sock", ())
    assert parse("unix:///a%20b.sock?db=4").database == 4
    assert parse("unix://u:p@/a%20b.sock").path == "/a b.sock"
    assert parse("redis+sentinel://a/my%20master").service == "my master"


def test_credentials_are_decoded_and_settings_win() -> None:
    """Percent-encoded in an address; the settings of their own replace them."""
    found = parse("redis://us%3Aer:p%40ss%2F:w@h")
    assert (found.username, found.password) == ("us:er", "p@ss/:w")
    assert parse("redis://:only@h").password == "only"
    settings = RedisSettings("redis://u:old@h", username="", password="new")
    assert (settings.address.username, settings.address.password) == ("u", "new")


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@",
        f"redis://u:{SECRET}/@h",
        f"redis://u:{SECRET}@h:x",
        f"redis://u:{SECRET}@h:70000",
        f"redis://u:{SECRET}@@h",
        f"redis://{SECRET}@h",
        f"redis://u:{SECRET}@h/nine",
        f"redis://u:{SECRET}@h?x={SECRET}",
        f"redis+cluster://u:{SECRET}@h/3",
        f"redis+sentinel://u:{SECRET}@h",
        f"redis+other://u:{SECRET}@h",
        f"http://u:{SECRET}@h",
        f"u:{SECRET}@h",
        f"unix://u:{SECRET}@run.sock",
        f"unix+cluster:///{SECRET}",
        "unix:///" + "x" * 107,
        "",
    ],
)
def test_what_is_refused_is_not_quoted(url: str) -> None:
    """Field case 123: the error says which forms are valid, and nothing of this one."""
    with pytest.raises(ConfigError) as caught:
        RedisSettings(url)
    assert "s3cr" not in str(caught.value)
    assert str(caught.value).startswith("redis: ")


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "a:b"},
        {"prefix": ""},
        {"prefix": "{x}"},
        {"ttl_s": -1.0},
        {"connect_timeout_s": 0.0},
        {"operation_timeout_s": 0.0},
        {"connections": 0},
        {"split_bytes": 100},
        {"split_bytes": 1 << 30},
        {"namespace_bytes": -1},
        {"key": "k.pem"},
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    """When they are made, not when they are used."""
    with pytest.raises(ConfigError):
        dataclasses.replace(RedisSettings("redis://h"), **change)


def test_no_representation_shows_a_secret() -> None:
    """Field case 123: settings and addresses end up in logs."""
    settings = RedisSettings(f"redis://u:{SECRET}@h", password="hidden")
    for text in (repr(settings), str(settings.address), settings.address.shown):
        assert "s3cr" not in text
        assert "hidden" not in text
