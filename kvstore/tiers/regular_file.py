"""open_regular: how a tier opens a file of its folder by name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_regular(path: Path, flags: int) -> int:
    """The descriptor of a regular file; one that ``flags`` makes is private.

    Raises OSError for whatever else has its name: a folder, a symbolic link, which isn't followed,
    or a pipe, which isn't waited for.
    """
    fd = os.open(path, flags | _FLAGS, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
