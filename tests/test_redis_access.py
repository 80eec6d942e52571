"""RedisTier and its rights: credentials, what they may do, and that they are never shown."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from kvstore.core.errors import TierUnavailableError
from kvstore.core.remote_messages import RemoteClear, RemoteEnter
from kvstore.testing import sample_header
from kvstore.testing.remote_tiers import probe_of
from tests.redis_rig import (
    PASSWORD,
    USER,
    Certificates,
    guarded,
    guarded_url,
    standalone,
    tls_sentinel,
    tls_server,
    unix_url,
    wait_until,
)
from tests.redis_tiers import name_of, opened, up, write, write_blindly

MODEL = "org/model"
SENTINEL_PASSWORD = "s3ntinel"


def test_every_form_of_an_address_is_used(private_folder: Path) -> None:
    """Field case 74: [::1], a database, a Unix socket; each is where it says."""
    header = sample_header(1, 100)
    with standalone(private_folder / "r", bind="127.0.0.1 -::1") as server:
        forms = {
            f"redis://127.0.0.1:{server.port}/3": 3,
            f"redis://localhost:{server.port}?db=4": 4,
            unix_url(server, 5): 5,
        }
        if has_ipv6():
            forms[f"redis://[::1]:{server.port}/6"] = 6
        for url, database in forms.items():
            with up(url) as tier:
                epoch = write(tier, header)
            with server.connection(db=database) as client:
                assert client.exists(name_of(header, epoch))


def has_ipv6() -> bool:
    """Whether this machine has ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_wrong_credentials_are_a_state(
    private_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Field cases 74 and 123: right ones work; wrong ones are "auth failed", and the secret is in
    no log, state, error or representation."""
    caplog.set_level(logging.DEBUG)
    texts = []
    with guarded(private_folder / "r") as server:
        with up(guarded_url(server)) as tier:
            write(tier, sample_header(1, 100))
        with up(server.url, username=USER, password=PASSWORD) as tier:
            assert tier.probe(probe_of(sample_header(1, 100))).found == (b"\1",)
        secret = "wr0ng-s3cret"
        for url in (guarded_url(server, password=secret), server.url):
            with opened(url) as wrong:
                wait_until(lambda t=wrong.tier: t.stats().state == "auth failed", "auth failed")
                assert True not in wrong.told
                with pytest.raises(TierUnavailableError) as caught:
                    write_blindly(wrong.tier, sample_header(1, 100))
                probed = wrong.tier.probe(probe_of(sample_header(1, 100)))
                texts += [str(caught.value), repr(wrong.tier.stats()), repr(probed)]
                texts.append(repr(wrong.tier.clear(RemoteClear(1, None, None))))
                assert "auth failed" in probed.error
    for text in (*texts, caplog.text):
        assert secret not in text
        assert PASSWORD not in text


@pytest.mark.parametrize("server_password", ["", "the server's own"])
def test_sentinels_with_a_password_and_tls(private_folder: Path, server_password: str) -> None:
    """The address's password opens Sentinel and server, or the Sentinel alone where the settings
    have another one for the server; a wrong one is "auth failed"."""
    files = Certificates.create(private_folder / "pem")
    master = tls_server(
        private_folder / "m", files, requirepass=f'"{server_password or SENTINEL_PASSWORD}"'
    )
    with master, tls_sentinel(
        private_folder / "s", files, "kv", master, SENTINEL_PASSWORD
    ) as sentinel:  # fmt: skip
        tls = {"ca": str(files.ca), "cert": str(files.client), "key": str(files.client)}
        url = f"rediss+sentinel://:{SENTINEL_PASSWORD}@{sentinel.address}/kv/2"
        with up(url, password=server_password, **tls) as tier:
            write(tier, sample_header(1, 100))
            assert tier.stats().server_mode == "sentinel"
        wrong = url.replace(SENTINEL_PASSWORD, "wr0ng")
        with opened(wrong, password=server_password, **tls) as ours:
            wait_until(lambda: ours.tier.stats().state == "auth failed", "auth failed")


def test_credentials_that_are_taken_back(private_folder: Path) -> None:
    """The password changes while connections are open, then comes back."""
    with guarded(private_folder / "r") as server, opened(guarded_url(server)) as ours:
        ours.wait(True)
        with server.connection(username="admin", password="admin") as admin:
            admin.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
            admin.execute_command("CLIENT", "KILL", "USER", USER)
            ours.wait(False)
            assert ours.tier.stats().state == "auth failed"
            admin.execute_command("ACL", "SETUSER", USER, f">{PASSWORD}")
        ours.wait(True)
        write(ours.tier, sample_header(1, 100))


def test_few_rights_are_enough(private_folder: Path) -> None:
    """An ACL for our prefix and no administration."""
    rules = "~kvstore:* -@all +@read +@write +@connection"
    header = sample_header(1, 100)
    with guarded(private_folder / "r", rules) as server, up(
        guarded_url(server), namespace_bytes=1 << 20
    ) as tier:  # fmt: skip
        tier.enter(RemoteEnter(header.tenant, header.namespace, MODEL, ""))
        write(tier, header)
        assert tier.clear(RemoteClear(1, None, MODEL)).error == ""
        assert tier.probe(probe_of(header)).found == (b"\0",)


def test_rights_that_lack_are_said(private_folder: Path) -> None:
    """A user of another prefix: down, with the reason."""
    with guarded(private_folder / "r", "~other:* +@all") as server, opened(
        guarded_url(server)
    ) as ours:  # fmt: skip
        wait_until(lambda: "NOPERM" in ours.tier.stats().state, "the state says why")
        assert True not in ours.told
