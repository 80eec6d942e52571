"""BoundedReflection: gRPC's reflection service, a few streams at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

STREAMS_MAX = 4
"""Each open stream takes a thread of the admin service until its caller ends it."""


class BoundedReflection:
    """Reflection for ``names``; beyond STREAMS_MAX a stream is refused at once."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._service: Any = reflection.ReflectionServicer(names)
        self._free = threading.Semaphore(STREAMS_MAX)

    def ServerReflectionInfo(  # the name that gRPC calls
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Answer one stream's questions."""
        if not self._free.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS_MAX} reflection streams are open"
            )
        try:
            yield from self._service.ServerReflectionInfo(request_iterator, context)
        finally:
            self._free.release()
