"""Real Valkey clusters and Sentinels for tests, made with the servers' own commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from redis.crc import key_slot

from tests.redis_rig import Server, free_port, standalone, wait_until

SLOTS = 16384
NODE_TIMEOUT_MS = 1500
"""After which a node that doesn't answer is taken for dead."""
SERVICE = "kv"
"""The name that Sentinel knows the servers by."""


class Cluster:
    """Nodes without replicas that share the slots evenly. Where a node is dead, the others go on
    serving their slots. ``folder`` needs a short path."""

    def __init__(self, folder: Path, nodes: int = 3, **options: str) -> None:
        self.folder = folder
        self.options = options
        self.nodes = [self._node(number) for number in range(nodes)]

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._create()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.kill()

    @property
    def url(self) -> str:
        """All addresses, as the tier takes them."""
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def live(self) -> list[Server]:
        """The nodes that run."""
        return [node for node in self.nodes if node.process is not None]

    @staticmethod
    def slot(name: bytes | str) -> int:
        """The slot of a name."""
        return int(key_slot(name.encode() if isinstance(name, str) else name))

    def owner(self, name: bytes | str) -> Server:
        """The node that serves a name's slot, as the first live node says."""
        return self.owner_of_slot(self.slot(name))

    def names(self) -> dict[int, list[bytes]]:
        """What the live nodes hold, by the node's port."""
        return {node.port: node.names() for node in self.live()}

    def kill(self, node: Server) -> None:
        """Kill a node and wait until the others have seen it."""
        node.kill()
        wait_until(
            lambda: all(self._states(n).get(node.port) == "fail" for n in self.live()),
            "the others take the killed node for dead",
        )

    def restart(self, node: Server) -> None:
        """Start a killed node again and wait until all know it."""
        node.start()
        self._await_whole()

    def add(self) -> Server:
        """Start one node more, without slots."""
        node = self._node(len(self.nodes))
        node.start()
        self.nodes.append(node)
        self.nodes[0].run("CLUSTER", "MEET", "127.0.0.1", node.port, node.cluster_port)
        self._await_known()
        self._await_whole()
        return node

    def migrate(self, slot: int, target: Server) -> None:
        """Move a slot with all its values, as an operator's tool does."""
        source = self.begin_migration(slot, target)
        while names := source.run("CLUSTER", "GETKEYSINSLOT", slot, 16):
            self.move(source, target, names)
        self.end_migration(slot, target)

    def begin_migration(self, slot: int, target: Server) -> Server:
        """From now on the source answers ASK for what it doesn't hold. Gives the source."""
        source = self.owner_of_slot(slot)
        target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", self._identity(source))
        source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", self._identity(target))
        return source

    def move(self, source: Server, target: Server, names: list[bytes]) -> None:
        """Move values of a slot that migrates."""
        source.run("MIGRATE", "127.0.0.1", target.port, "", 0, 30000, "KEYS", *names)

    def end_migration(self, slot: int, target: Server) -> None:
        """From now on the source answers MOVED."""
        for node in (target, *(node for node in self.live() if node is not target)):
            node.run("CLUSTER", "SETSLOT", slot, "NODE", self._identity(target))

    def owner_of_slot(self, slot: int) -> Server:
        """The node that serves a slot."""
        for first, last, (_, port, *_), *_ in self.live()[0].run("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody serves slot {slot}")

    def _node(self, number: int) -> ClusterNode:
        return ClusterNode(self.folder / f"n{number}", self.options)

    def _create(self) -> None:
        first, *others = self.nodes
        bounds = [SLOTS * number // len(self.nodes) for number in range(len(self.nodes) + 1)]
        for number, node in enumerate(self.nodes):
            node.run("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.run("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        for node in others:
            first.run("CLUSTER", "MEET", "127.0.0.1", node.port, node.cluster_port)
        self._await_known()
        self._await_whole()

    def _await_known(self) -> None:
        wait_until(
            lambda: all(
                list(self._states(node).values()) == ["ok"] * len(self.live())
                for node in self.live()
            ),
            "every node knows every other",
        )

    def _await_whole(self) -> None:
        wait_until(
            lambda: all(
                b"cluster_state:ok" in node.run("CLUSTER", "INFO")
                and b"cluster_slots_ok:16384" in node.run("CLUSTER", "INFO")
                for node in self.live()
            ),
            "all slots are served",
        )

    def _states(self, node: Server) -> dict[int, str]:
        """ok or fail of each node by port, as one of them sees it."""
        states = {}
        for line in node.run("CLUSTER", "NODES").decode().splitlines():
            _, address, flags, *rest = line.split()
            bad = {"fail", "fail?", "handshake", "noaddr"} & set(flags.split(","))
            linked = rest[4] == "connected" or "myself" in flags
            port = int(address.split("@")[0].rpartition(":")[2])
            states[port] = "fail" if bad & {"fail"} else "ok" if linked and not bad else "unsure"
        return states

    @staticmethod
    def _identity(node: Server) -> str:
        return node.run("CLUSTER", "MYID").decode()


class ClusterNode(Server):
    """One node: it knows its peers from a file of its own, so it finds them again."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        named = {name.replace("_", "-"): value for name, value in options.items()}
        self.cluster_port = free_port()
        super().__init__(
            folder,
            {
                "cluster-enabled": "yes",
                "cluster-port": str(self.cluster_port),
                "cluster-config-file": "nodes.conf",
                "cluster-node-timeout": str(NODE_TIMEOUT_MS),
                "cluster-require-full-coverage": "no",
                "cluster-announce-ip": "127.0.0.1",
                **named,
            },
        )


class Sentinels:
    """A server, a replica of it, and one Sentinel that fails over by itself. ``folder`` needs a
    short path."""

    def __init__(self, folder: Path) -> None:
        self.first = standalone(folder / "a", repl_diskless_sync_delay="0")
        self.second = standalone(folder / "b")
        self.second.options["replicaof"] = f"127.0.0.1 {self.first.port}"
        self.sentinel = Server(folder / "s", self._settings())
        self.sentinel.arguments = ("--sentinel",)

    def __enter__(self) -> Sentinels:
        with contextlib.ExitStack() as stack:
            for server in (self.first, self.second):
                stack.enter_context(server)
            self._await_replica()
            stack.enter_context(self.sentinel)
            wait_until(lambda: self._sees_replica(), "the Sentinel knows the replica")
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for server in (self.sentinel, self.second, self.first):
            server.kill()

    @property
    def url(self) -> str:
        """As the tier takes it."""
        return f"redis+sentinel://{self.sentinel.address}/{SERVICE}/0"

    def master_port(self) -> int:
        """The port of the server that the Sentinel calls master."""
        with self.sentinel.connection() as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def fail_over(self) -> Server:
        """Kill the master and wait until the other server is it. Gives the new one."""
        assert self.master_port() == self.first.port
        self.first.kill()
        wait_until(lambda: self.master_port() == self.second.port, "the replica is promoted")
        wait_until(lambda: self.second.info("replication")["role"] == "master", "it is master")
        return self.second

    def _settings(self) -> dict[str, str | list[str]]:
        return {
            "sentinel": [
                f"monitor {SERVICE} 127.0.0.1 {self.first.port} 1",
                f"down-after-milliseconds {SERVICE} 300",
                f"failover-timeout {SERVICE} 2000",
            ]
        }

    def _await_replica(self) -> None:
        wait_until(
            lambda: self.second.info("replication").get("master_link_status") == "up",
            "the replica follows",
        )

    def _sees_replica(self) -> bool:
        with self.sentinel.connection() as client:
            return int(client.sentinel_master(SERVICE)["num-slaves"]) > 0


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 3, **options: str) -> Iterator[Cluster]:
    """A whole cluster, ended afterwards."""
    with Cluster(folder, nodes, **options) as made:
        yield made
