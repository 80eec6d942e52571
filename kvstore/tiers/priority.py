"""Priority: how background threads give way to the daemon's loop, and where they wait for work."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

_log = logging.getLogger(__name__)

NICE = 10


def lower_priority() -> None:
    """Nice the calling thread, and only it, by NICE where the system allows."""
    thread = threading.get_native_id()
    try:
        nice = os.getpriority(os.PRIO_PROCESS, thread) + NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice))
    except OSError as error:
        _log.info("thread %s keeps its priority: %s", threading.current_thread().name, error)


class Home:
    """The core that the calling thread waits on: ``number`` says which of the process's.

    Only while it waits is it bound to it, so that it wakes there; at work it goes wherever there is
    room. Where the system refuses, nothing happens.
    """

    def __init__(self, number: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._home = _mask([cores[number % len(cores)]])
        self._all = _mask(cores)

    def stay(self) -> None:
        """Go there; the interpreter lock is free until the thread has arrived."""
        _waiting.sched_setaffinity(0, len(self._home), self._home)

    def leave(self) -> None:
        """Be free to go; takes a microsecond, too little to give up the interpreter lock for."""
        _at_once.sched_setaffinity(0, len(self._all), self._all)


_waiting = ctypes.CDLL(None)
_at_once = ctypes.PyDLL(None)


def _mask(cores: list[int]) -> bytes:
    """The kernel's set of cores: a bit each, in whole words."""
    bits = sum(1 << core for core in cores)
    return bits.to_bytes(8 * (max(cores) // 64 + 1), "little")
