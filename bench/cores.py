"""Cores: where the two ends of a round trip run.

On a virtual machine it takes 20 to 50 us to wake a process on another core that has gone idle, and
2 us on the same one, and the scheduler puts two processes that talk now so, now so. A round trip
compared with another one says nothing unless both ends of both lie alike. Here they lie on two
cores, as those of an engine and a daemon do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Keep the calling thread on one core and the main threads of these processes on another, as
    long as the context lasts; a single core is shared. Other threads stay where they want."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, {cores[0]})
        for process in servers:
            os.sched_setaffinity(process, {cores[-1]})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for process in servers:
            os.sched_setaffinity(process, cores)
