"""RedisHosts: where the servers' names lead, and lanes to there.

A name server that hangs holds whoever asks it for half a minute: the system's lookup has no
deadline. So only the tier's own thread looks names up, when it looks for a server; who reads,
writes or probes connects to the address at which that thread reached it last, and never waits for a
name. Another address is found when the server fails at the former one, which opens its breaker.
"""

from __future__ import annotations

import ipaddress
import socket

from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.redis_connect import Login, connect
from kvstore.tiers.redis_errors import AuthFailedError, of_connect
from kvstore.tiers.redis_lane import Lane
from kvstore.tiers.redis_settings import RedisSettings, host_text

_NAMES_MAX = 1024
"""A server may name others without end."""


class RedisHosts:
    """Thread-safe. Raises TierUnavailableError (AuthFailedError is one)."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._found: dict[tuple[str, int], str] = {}

    def connect(self, host: str, port: int, login: Login) -> Lane:
        """A lane to where the server was found last; looks no name up."""
        return connect(self._settings, (host, port), login, self._known(host, port))

    def find(self, host: str, port: int, login: Login) -> Lane:
        """A lane to the first of the name's addresses that takes one. For the tier's own thread:
        blocks for as long as the name servers like."""
        failed: TierUnavailableError | None = None
        for address in self._look_up(host, port):
            try:
                lane = connect(self._settings, (host, port), login, address)
            except AuthFailedError:
                raise
            except TierUnavailableError as error:
                failed = error.with_traceback(None)
                continue
            if (host, port) not in self._found and len(self._found) >= _NAMES_MAX:
                self._found.pop(next(iter(self._found)))
            self._found[host, port] = address
            return lane
        try:
            raise failed or TierUnavailableError(f"redis: {host} has no address")
        finally:
            failed = None  # or this frame would be in a cycle: the daemon collects none

    def reach(self, host: str, port: int, login: Login) -> Lane:
        """As ``find``, but the name is looked up only where the known address fails."""
        if (host, port) in self._found:
            try:
                return self.connect(host, port, login)
            except AuthFailedError:
                raise
            except TierUnavailableError:
                pass  # it may have moved; until it is found elsewhere, others try it there
        return self.find(host, port, login)

    def knows(self, host: str, port: int) -> bool:
        """Whether ``connect`` needs no name looked up first."""
        return not port or _is_literal(host) or (host, port) in self._found

    def _known(self, host: str, port: int) -> str:
        if not port or _is_literal(host):
            return host
        found = self._found.get((host, port))
        if found is None:
            raise TierUnavailableError(f"redis: {host_text(host, port)} wasn't reached yet")
        return found

    @staticmethod
    def _look_up(host: str, port: int) -> list[str]:
        """All addresses of a name, each once; a Unix socket's path and literal addresses are their
        own."""
        if not port or _is_literal(host):
            return [host]
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError, OverflowError) as error:
            raise of_connect(error, host_text(host, port)) from error
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
