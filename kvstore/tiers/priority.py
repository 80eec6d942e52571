"""Priority: how background threads give way to the daemon's loop."""

from __future__ import annotations

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
