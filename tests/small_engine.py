"""A small engine for tests: paged KV in shared memory, with patterns that show any mix-up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from kvstore import ChunkKeys, HitStatus, LookupResult, Namespace, Ticket, TransferOutcome
from kvstore.client_link import Ready
from tests.paged_engine import GROUP, WAIT_S, PagedEngine, Paging

TOKENS_PER_BLOCK = 4
TOKENS_PER_CHUNK = 16
BLOCKS_PER_CHUNK = TOKENS_PER_CHUNK // TOKENS_PER_BLOCK
BLOCK_BYTES = 4096
TENSORS = 2
CHUNK_BYTES = BLOCKS_PER_CHUNK * TENSORS * BLOCK_BYTES


def tokens(chunks: int, seed: int = 0) -> list[int]:
    """Token IDs of so many whole chunks and one token more, so that all chunks are reusable."""
    return [(seed * 7919 + i) % 50_000 for i in range(chunks * TOKENS_PER_CHUNK + 1)]


class SmallEngine(PagedEngine):
    """One engine with one rank: ``chunks`` chunks of memory; chunk i lies in blocks [4i, 4i+4).

    What takes ``first`` deals with a prompt that lies from that chunk of the memory on. A lookup
    waits as long as a slow machine needs unless ``lookup_timeout_s`` is given.
    """

    block_bytes = BLOCK_BYTES

    def __init__(
        self,
        address: str,
        chunks: int,
        model: str = "org/small",
        alias: str = "",
        name: str = "e1",
        *,
        lookup_timeout_s: float = WAIT_S,
    ) -> None:
        blocks = chunks * BLOCKS_PER_CHUNK
        size = self.block_bytes
        paging = Paging(TENSORS, blocks, size, TOKENS_PER_BLOCK, TOKENS_PER_CHUNK)
        super().__init__(address, name, paging, lookup_timeout_s)
        self.worker = self.join(Namespace(model=model, revision="r1", format="test/1", alias=alias))

    def rejoin(self, process: int) -> None:
        """Wait until the daemon with this process ID serves it, where another one did before: a
        session may take a moment to notice that a daemon is gone."""
        until_s = time.monotonic() + WAIT_S
        while not (self.worker.wait_ready(WAIT_S) and self._daemon_process() == process):
            assert time.monotonic() < until_s, self.worker.state()

    def _daemon_process(self) -> int:
        state = self.worker.state()
        return state.daemon_process if state.ready else 0

    def keys(self, token_ids: Sequence[int]) -> ChunkKeys:
        """Chunk keys of a prompt."""
        return self.worker.keys(token_ids)

    def fill(self, keys: ChunkKeys, first: int = 0) -> None:
        """Give each chunk the pattern of its key."""
        for chunk in range(len(keys)):
            self._chunk(first + chunk)[:] = _pattern(keys, chunk, self.block_bytes)

    def wipe(self) -> None:
        """Zero all of the memory."""
        self.pages[:] = 0

    def right_chunks(self, keys: ChunkKeys, first: int = 0) -> int:
        """How many leading chunks hold their keys' patterns."""
        for chunk in range(len(keys)):
            if not self.is_right(keys, chunk, first):
                return chunk
        return len(keys)

    def is_right(self, keys: ChunkKeys, chunk: int, first: int = 0) -> bool:
        """Whether one chunk holds its key's pattern."""
        return np.array_equal(self._chunk(first + chunk), _pattern(keys, chunk, self.block_bytes))

    def begin_store(self, keys: ChunkKeys, first: int = 0, ready: Ready | None = None) -> Ticket:
        """Ask for a store, whose request is named for its place."""
        return self.worker.store(f"store-{first}", keys, self.blocks(keys, first), ready)

    def begin_retrieve(self, keys: ChunkKeys, first: int = 0, ready: Ready | None = None) -> Ticket:
        """Ask for a retrieve, whose request is named for its place."""
        return self.worker.retrieve(f"retrieve-{first}", keys, self.blocks(keys, first), ready)

    def store(self, keys: ChunkKeys, first: int = 0) -> TransferOutcome:
        """Store and wait."""
        outcome = self.begin_store(keys, first).wait(WAIT_S)
        assert outcome is not None
        return outcome

    def retrieve(self, keys: ChunkKeys, first: int = 0) -> TransferOutcome:
        """Retrieve and wait."""
        outcome = self.begin_retrieve(keys, first).wait(WAIT_S)
        assert outcome is not None
        return outcome

    def hits(self, keys: ChunkKeys) -> int:
        """Leading chunks that a lookup finds; its lease is given back at once."""
        found = self.lookup("lookup", keys)
        self.worker.release("lookup")
        return found.chunks

    def lookup(self, request: str, keys: ChunkKeys) -> LookupResult:
        """A lookup that is repeated while it is pending, as an engine's scheduler does."""
        until_s = time.monotonic() + WAIT_S
        found = self.worker.lookup(request, keys)
        while found.status is HitStatus.PENDING:
            assert time.monotonic() < until_s, "no answer follows"
            time.sleep(0.0005)
            found = self.worker.lookup(request, keys)
        return found

    def load(self, keys: ChunkKeys, first: int = 0) -> int:
        """Look up, retrieve the hit under the same request, release: how many leading chunks of
        the prompt are there now."""
        found = self.lookup(f"retrieve-{first}", keys)
        done = self.retrieve(keys[: found.chunks], first).leading_chunks if found.chunks else 0
        self.worker.release(f"retrieve-{first}")
        return done

    def blocks(self, keys: ChunkKeys, first: int = 0) -> dict[str, list[int]]:
        """The blocks of a prompt that lies from this chunk on."""
        start = first * BLOCKS_PER_CHUNK
        return {GROUP: list(range(start, start + len(keys) * BLOCKS_PER_CHUNK))}

    def _chunk(self, chunk: int) -> np.ndarray:
        return self.pages[:, chunk * BLOCKS_PER_CHUNK : (chunk + 1) * BLOCKS_PER_CHUNK]


class LargeEngine(SmallEngine):
    """The same with larger blocks, and so with larger slots in every tier."""

    block_bytes = 5 * BLOCK_BYTES


def _pattern(keys: ChunkKeys, chunk: int, block_bytes: int) -> np.ndarray:
    """Bytes that only this key has, other ones in every block."""
    seed = hashlib.sha256(bytes(keys[chunk])).digest()
    generator = np.random.default_rng(np.frombuffer(seed, np.uint64))
    shape = (TENSORS, BLOCKS_PER_CHUNK, block_bytes)
    return generator.integers(0, 256, shape, np.uint8)
