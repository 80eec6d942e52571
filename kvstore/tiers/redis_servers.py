"""RedisServers: which server holds a name, and how one command gets there.

Standalone: the one. Sentinel: the master that a Sentinel names. Cluster: by the name's hash slot,
from the map that any node gives; MOVED corrects the map, ASK sends one command elsewhere while a
slot moves. The map is asked for again in the tier's own thread, never by who reads or writes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.redis_connect import Login, login_of
from kvstore.tiers.redis_driver import REDIS_CLUSTER_HASH_SLOTS, key_slot
from kvstore.tiers.redis_errors import AuthFailedError, of_lane, of_reply
from kvstore.tiers.redis_hosts import RedisHosts
from kvstore.tiers.redis_lane import Lane, Reply, ReplyError
from kvstore.tiers.redis_node import CONNECTING, NodeLimits, RedisNode
from kvstore.tiers.redis_settings import RedisMode, RedisSettings, host_text, parse

T = TypeVar("T")

REDIRECTS_MAX = 4
"""While a slot moves: MOVED, ASK and MOVED again; more is a loop."""


class RedisServers:
    """The servers of one address. Thread-safe. ``changed`` is called when one of them goes up or
    down; ``outdated`` when the map is seen to be out of date."""

    def __init__(
        self, settings: RedisSettings, changed: Callable[[], None], outdated: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._address = settings.address
        self._login = login_of(settings)
        self._hosts = RedisHosts(settings)
        self._changed = changed
        self._outdated = outdated
        self._lock = threading.Lock()
        self._nodes: dict[str, RedisNode] = {}
        self._slots: list[RedisNode | None] = []
        self._only: RedisNode | None = None
        self._reason = CONNECTING
        self._closed = False

    @property
    def mode(self) -> RedisMode:
        """How they are found."""
        return self._address.mode

    @property
    def reason(self) -> str:
        """Why no server is known; empty where some are."""
        return self._reason

    @property
    def only(self) -> RedisNode | None:
        """The server that holds every name, where there is such a one."""
        return self._only

    def nodes(self) -> tuple[RedisNode, ...]:
        """All that are known, in the order of their addresses."""
        with self._lock:
            return tuple(self._nodes[address] for address in sorted(self._nodes))

    def holder(self, name: bytes) -> RedisNode:
        """Who holds a name. Raises TierUnavailableError where nobody does."""
        node = self._only
        if self._slots:
            node = self._slots[key_slot(name)]
        if node is None:
            raise TierUnavailableError(f"redis: {self._reason or 'no server holds the slot'}")
        return node

    def redirect(self, error: ReplyError) -> tuple[RedisNode, bool] | None:
        """Where MOVED or ASK says to go, and whether to say ASKING there; None for any other
        error. MOVED corrects the map."""
        if error.code not in ("MOVED", "ASK") or self.mode is not RedisMode.CLUSTER:
            return None
        words = str(error).split()
        if len(words) < 3:
            return None
        host, _, port_text = words[2].rpartition(":")
        slot, port = _number(words[1]), _number(port_text)
        if not host or port is None or slot is None or slot >= REDIS_CLUSTER_HASH_SLOTS:
            return None
        host = host.strip("[]")
        node = self._node(host, port)
        if self._hosts.knows(host, port):
            node.trust()
        if error.code == "MOVED":
            with self._lock:
                if self._slots:
                    self._slots[slot] = node
            self._outdated()
        return node, error.code == "ASK"

    def note(self, errors: Sequence[ReplyError]) -> None:
        """Errors that may mean that another server serves by now."""
        if any(error.code in ("READONLY", "CLUSTERDOWN") for error in errors):
            self._outdated()

    def run(self, name: bytes, use: Callable[[Lane], T]) -> T:
        """Do ``use`` on a lane to the holder of ``name``, following redirections. Raises
        CapacityError, ChunkCorruptError or TierUnavailableError, and what else ``use`` raises."""
        node, asking = self.holder(name), False
        for _ in range(REDIRECTS_MAX):
            try:
                with node.lane() as lane:
                    if asking:
                        lane.ask((b"ASKING",))
                    return use(lane)
            except ReplyError as error:
                elsewhere = self.redirect(error)
                if elsewhere is None:
                    self.note([error])
                    raise of_reply(error, node.address) from error
                node, asking = elsewhere
        raise TierUnavailableError(f"redis: {REDIRECTS_MAX} redirections, and no end of them")

    def discover(self) -> None:
        """Find the servers, anew; blocks for some timeouts at worst. What was known stays where
        nobody answers."""
        if self.mode is RedisMode.STANDALONE:
            host, port = (self._address.hosts or ((self._address.path, 0),))[0]
            self._only = self._node(host, port)
            self._reason = ""
        elif self.mode is RedisMode.SENTINEL:
            self._discover_master()
        else:
            self._discover_slots()

    def close(self) -> None:
        """Close all nodes; whoever uses one gets an error at once. Idempotent."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _discover_master(self) -> None:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._address.service.encode())
        failed = "no Sentinel answers"
        for host, port in self._address.hosts:
            try:
                reply = self._ask_sentinel(host, port, command)
            except TierUnavailableError as error:
                failed = str(error).removeprefix("redis: ")
                continue
            master = list(map(_text, reply)) if isinstance(reply, list) else []
            port_number = _number(master[1]) if len(master) == 2 else None
            if port_number is not None:
                node = self._node(master[0], port_number)
                self._only, self._reason = node, ""
                self._keep({node})
                return
            failed = f"Sentinel {host_text(host, port)} knows no such service"
        if self._only is None:
            self._reason = failed

    def _ask_sentinel(self, host: str, port: int, command: tuple[bytes, ...]) -> Reply:
        """Sentinels mostly take everybody; where one doesn't, the address's credentials are tried,
        which are the server's, too, where it has none of its own."""
        server = host_text(host, port)
        try:
            return self._ask(self._hosts.reach(host, port, Login()), server, command)
        except AuthFailedError:
            given = parse(self._settings.url)
            theirs = given if given.password else self._address
            login = Login(theirs.username, theirs.password)
            return self._ask(self._hosts.reach(host, port, login), server, command)

    def _discover_slots(self) -> None:
        known = [(node.is_up, (node.host, node.port)) for node in self.nodes()]
        up = [server for is_up, server in known if is_up]
        down = [server for is_up, server in known if not is_up]
        failed = "no node answers"
        for host, port in dict.fromkeys((*up, *self._address.hosts, *down)):
            try:
                lane = self._hosts.reach(host, port, self._login)
                reply = self._ask(lane, host_text(host, port), (b"CLUSTER", b"SLOTS"))
            except TierUnavailableError as error:
                failed = str(error).removeprefix("redis: ")
                continue
            if isinstance(reply, list) and reply:
                self._take_slots(reply, host)
                return
            failed = f"{host_text(host, port)} serves no slots"
        if not self._slots:
            self._reason = failed

    def _take_slots(self, reply: list[Reply], asked: str) -> None:
        slots: list[RedisNode | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for entry in reply:
            if not (isinstance(entry, list) and len(entry) > 2 and isinstance(entry[2], list)):
                continue
            first, last, master = entry[0], entry[1], entry[2]
            if not (isinstance(first, int) and isinstance(last, int) and len(master) > 1):
                continue
            # An unknown host means the one that was asked.
            host = _text(master[0]) if master[0] else ""
            port = master[1]
            if not isinstance(port, int) or not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                continue
            node = self._node(asked if host in ("", "?") else host, port)
            slots[first : last + 1] = [node] * (last + 1 - first)
        self._slots, self._reason = slots, ""
        self._keep({node for node in slots if node is not None})

    def _ask(self, lane: Lane, server: str, command: tuple[bytes, ...]) -> Reply:
        """One question on a lane to a server, closed afterwards."""
        with contextlib.closing(lane):
            try:
                return lane.ask(command)
            except ReplyError as error:
                raise of_reply(error, server) from error
            except OSError as error:
                raise of_lane(error, server) from error

    def _node(self, host: str, port: int) -> RedisNode:
        address = host_text(host, port) if port else host
        with self._lock:
            if self._closed:
                raise TierUnavailableError("redis: the tier is closed")
            node = self._nodes.get(address)
            if node is None:
                node = self._nodes[address] = RedisNode(
                    (host, port),
                    lambda: self._hosts.connect(host, port, self._login),
                    lambda: self._hosts.find(host, port, self._login),
                    NodeLimits(self._settings.connections, self._settings.operation_timeout_s),
                    self._changed,
                )
            return node

    def _keep(self, wanted: set[RedisNode]) -> None:
        with self._lock:
            gone = [n for n in self._nodes.values() if n not in wanted]
            self._nodes = {a: n for a, n in self._nodes.items() if n in wanted}
        for node in gone:
            node.close()
        if gone:
            self._changed()


def _number(text: str) -> int | None:
    """A slot or port; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def _text(reply: Reply) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
