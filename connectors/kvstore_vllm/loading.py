"""Loading: what is being loaded for whom, so that requests with the same prefix load it once.

vLLM's own prefix cache has a prefix only when its load has ended. Requests that come meanwhile
would each load it again, into blocks of their own. They are held back instead ("ask again") until
the load has ended, and then have it from vLLM's cache, as vLLM looks at the loading request first.
Where that takes long, or was in vain, each goes its own way.
"""

from __future__ import annotations

from kvstore import ChunkKey, ChunkKeys

OTHERS_WAIT_S = 1.0
"""How long a request waits for another one's load in all: many times a load, but a stopped
daemon."""


class Loading:
    """The loads under way, by the first chunk that each loads. One thread uses it."""

    def __init__(self) -> None:
        self._requests: dict[ChunkKey, str] = {}
        self._chunks: dict[str, ChunkKey] = {}

    def begin(self, request: str, keys: ChunkKeys) -> None:
        """A request's load is ordered."""
        self.end(request)
        self._chunks[request] = keys[0]
        self._requests[keys[0]] = request

    def end(self, request: str) -> None:
        """A request's load has ended, or the request has. Idempotent."""
        chunk = self._chunks.pop(request, None)
        if chunk is not None and self._requests.get(chunk) == request:
            del self._requests[chunk]

    def is_for_another(self, request: str, chunk: ChunkKey) -> bool:
        """Whether another request loads what would begin with this chunk."""
        return self._requests.get(chunk, request) != request
