"""FolderLock: keeps a second daemon out of a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kvstore.core.errors import TierUnavailableError
from kvstore.tiers.regular_file import open_regular

FILE_NAME = "lock"


class FolderLock:
    """A lock on a folder, held by this process until ``release`` or its end, however it ends.

    The file ``lock`` stays behind; it holds the process ID of the last holder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def acquire(self) -> None:
        """Take the lock, also on a file system that can only be read. Raises
        TierUnavailableError, naming folder and holder, if another has it, and OSError where the
        lock file can't be had."""
        path = self._folder / FILE_NAME
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            fd = open_regular(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise TierUnavailableError(
                f"nvme: {self._folder} is in use by process {holder}; stop it or choose another "
                "folder"
            ) from error
        except OSError:
            os.close(fd)
            raise
        with suppress(OSError):  # only a person reads it, and the device may be full or read-only
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._fds.append(fd)

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())
