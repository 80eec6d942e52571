"""RedisTier under the published contract: a server on TCP and on a Unix socket, a Cluster, and with
values cut into pieces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.messages import ChunkHeader
from kvstore.testing import RemoteTierContract
from tests.redis_cluster import Cluster
from tests.redis_rig import Certificates, Server, standalone, tls_server, unix_url
from tests.redis_tiers import name_of, up


class RedisBench:
    """Two tiers over one store; ``server_of`` gives the server that holds a name."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        url: str,
        server_of: Callable[[bytes], Server],
        **settings: Any,
    ) -> None:
        self.tier = stack.enter_context(up(url, **settings))
        self.other = stack.enter_context(up(url, **settings))
        self._server_of = server_of

    def swap(self, a: ChunkHeader, b: ChunkHeader, epoch: int) -> None:
        names = [name_of(header, epoch) for header in (a, b)]
        values = [self._server_of(name).run("GET", name) for name in names]
        for name, value in zip(names, reversed(values), strict=True):
            self._server_of(name).run("SET", name, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with standalone(tmp_path_factory.mktemp("r")) as made:
        yield made


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(Path(tmp_path_factory.mktemp("c"))) as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.create(tmp_path_factory.mktemp("t"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, files: Certificates) -> Iterator[Server]:
    with tls_server(tmp_path_factory.mktemp("s"), files) as made:
        made.connection = functools.partial(  # type: ignore[method-assign]
            made.connection,
            ssl=True,
            ssl_ca_certs=str(files.ca),
            ssl_certfile=str(files.client),
            ssl_keyfile=str(files.client),
        )
        yield made


class TestServer(RemoteTierContract):
    @pytest.fixture
    def bench(self, server: Server) -> Iterator[RedisBench]:
        server.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, server.url, lambda _: server)


class TestUnixSocket(RemoteTierContract):
    @pytest.fixture
    def bench(self, server: Server) -> Iterator[RedisBench]:
        server.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, unix_url(server), lambda _: server)


class TestPieces(RemoteTierContract):
    @pytest.fixture
    def bench(self, server: Server) -> Iterator[RedisBench]:
        server.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, server.url, lambda _: server, split_bytes=4096)


class TestCompressed(RemoteTierContract):
    @pytest.fixture(params=["lz4", "zstd"])
    def bench(self, server: Server, request: pytest.FixtureRequest) -> Iterator[RedisBench]:
        server.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, server.url, lambda _: server, codec=request.param)


class TestTls(RemoteTierContract):
    @pytest.fixture
    def bench(self, secure: Server, files: Certificates) -> Iterator[RedisBench]:
        secure.run("FLUSHALL")
        paths = {"ca": str(files.ca), "cert": str(files.client), "key": str(files.client)}
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, f"rediss://{secure.address}", lambda _: secure, **paths)


class TestCluster(RemoteTierContract):
    @pytest.fixture
    def bench(self, nodes: Cluster) -> Iterator[RedisBench]:
        for node in nodes.nodes:
            node.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, nodes.url, nodes.owner)


class TestClusterPieces(RemoteTierContract):
    @pytest.fixture
    def bench(self, nodes: Cluster) -> Iterator[RedisBench]:
        for node in nodes.nodes:
            node.run("FLUSHALL")
        with contextlib.ExitStack() as stack:
            yield RedisBench(stack, nodes.url, nodes.owner, split_bytes=4096)
