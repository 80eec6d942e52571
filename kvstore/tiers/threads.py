"""start_thread: how the daemon's own threads begin."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.core.errors import TierUnavailableError


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread that runs and doesn't keep the process alive. Raises TierUnavailableError where
    the system refuses it."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TierUnavailableError(
            f"the system refuses the thread {name} ({error}); raise the limit on processes or on "
            "memory"
        ) from error
    return thread
