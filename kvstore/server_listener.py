"""The daemon's listening Unix socket: one daemon a path, private to its user.

A lock file beside the socket, held for as long as the daemon listens, decides races between
daemons that start together; the kernel drops it with the process, so it can't go stale. A socket
file that nobody listens on (kill -9 leaves one) is replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress

from kvstore.core.errors import ConfigError, TierUnavailableError
from kvstore.wire import socket_path

BACKLOG = 128


class Listener:
    """A listening, non-blocking Unix stream socket of mode 0600 and the lock that guards its
    path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._lock_fd: int | None = None
        self._identity: tuple[int, int] | None = None

    def open(self) -> None:
        """Lock the path, replace a stale socket, bind and listen.

        Leaves everything as it was and raises ConfigError where the path is unusable,
        TierUnavailableError where another daemon listens there.
        """
        path = socket_path(self._path)
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
            self._lock(path)
            self._remove_stale(path)
            self._bind(path)
        except OSError as error:
            self.close()
            raise ConfigError(f"socket {path}: {error.strerror or error}") from error
        except (ConfigError, TierUnavailableError):
            self.close()
            raise

    def listening(self) -> bool:
        """Whether there is a socket to connect to."""
        return self._socket is not None

    def fileno(self) -> int:
        """The descriptor to watch for connections."""
        assert self._socket is not None, "listener is open"
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection, non-blocking and close-on-exec; None where none waits.

        Raises OSError where the process or machine has no descriptors left.
        """
        assert self._socket is not None, "listener is open"
        try:
            peer, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        peer.setblocking(False)
        return peer

    def stop_listening(self) -> None:
        """Close the socket and remove its file if it is still ours; the lock stays. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._identity is not None:
            with suppress(OSError):
                if _identity(self._path_only()) == self._identity:
                    os.unlink(self._path_only())
            self._identity = None

    def close(self) -> None:
        """Stop listening and let the lock go. Idempotent."""
        self.stop_listening()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _path_only(self) -> str:
        return socket_path(self._path)

    def _lock(self, path: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock_fd = os.open(f"{path}.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            raise TierUnavailableError(
                f"socket {path}: another daemon listens there (process {owner or 'unknown'})"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def _remove_stale(self, path: str) -> None:
        """Remove a socket file whose listener is gone; raise for anything else."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"socket {path}: the path exists and isn't a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(path)
        if code == errno.ECONNREFUSED:
            os.unlink(path)
        elif code != errno.ENOENT:
            raise TierUnavailableError(f"socket {path}: another daemon listens there")

    def _bind(self, path: str) -> None:
        """Bind and only then listen, so that nobody connects before the mode is set."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._identity = _identity(path)
        os.chmod(path, 0o600)
        self._socket.listen(BACKLOG)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino
