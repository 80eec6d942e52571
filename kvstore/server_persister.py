"""Persister: makes namespaces durable in a thread, one Persist at a time.

Each Persist replaces what was there as a whole. So of those that come while one is being written
only the newest is kept: what is done, and what a stop has to wait for, is at most one more write,
however many engines register meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.core.errors import KVStoreError
from kvstore.core.messages import Persist, Persisted

_log = logging.getLogger(__name__)


class Persister:
    """The thread that makes Persists durable with ``persist`` (OSError or KVStoreError where it
    can't) and tells ``report``, from there, of each that it wrote: its number stands for all
    before it. ``fail`` hears of any other error, which is a bug."""

    def __init__(
        self,
        persist: Callable[[Persist], None],
        report: Callable[[Persisted], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._persist = persist
        self._report = report
        self._fail = fail
        self._lock = threading.Lock()
        self._newest: Persist | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-persist")

    def submit(self, effect: Persist) -> None:
        """Make this one durable, and with it those that still wait."""
        with self._lock:
            former, self._newest = self._newest, effect
        if former is None:
            self._thread.submit(self._write).add_done_callback(self._written)

    def close(self) -> None:
        """Write what waits and end the thread. Idempotent."""
        self._thread.shutdown(wait=True)

    def _write(self) -> None:
        with self._lock:
            effect, self._newest = self._newest, None
        assert effect is not None, "a write is queued for each that waits alone"
        error = ""
        try:
            self._persist(effect)
        except (OSError, KVStoreError) as caught:
            error = str(caught) or type(caught).__name__
            _log.error("namespaces could not be made durable: %s", error)
        self._report(Persisted(effect.number, error))

    def _written(self, written: Future[None]) -> None:
        error = written.exception()
        if error is not None:
            self._fail(error)
