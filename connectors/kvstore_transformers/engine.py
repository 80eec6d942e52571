"""Engine: runs requests on a CausalModel over paged KV, reusing what the daemon holds.

A request in order: blocks for prompt and answer are taken; the daemon is asked which leading chunks
of the prompt it has, and writes them into the first of those blocks; the rest of the prompt, at
least its last token, is computed in blocks of 512; the first token is chosen (that is the time to
first token); new full chunks are handed to the daemon, which reads them while decoding goes on; in
every ending the lease is released.

Who owns a block? From allocation to the end the request does. While a transfer that names it is
open the daemon may touch it too, so a block is freed only when every ticket of the request has
ended; until then the request waits in ``_parting``. At a deadline a transfer is cancelled and its
acknowledgement awaited. If not even that comes (a daemon stopped in mid-copy), the blocks can't be
had back and can't be waited for: the engine leaves the whole memory to that daemon and goes on in
a new one. Both are settled before any KV of the request is computed, so nothing is lost by it.

Chunks are stored and loaded whole. A load writes only blocks of this request, below the first token
that it computes, so nothing that an engine has computed is ever overwritten.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore.core.errors import KVStoreError
from kvstore.core.guard import guarded
from kvstore.core.keys import ChunkKeys
from kvstore.core.layout import Layout
from kvstore.memory import OwnedHostMemory, create_host_memory
from kvstore_transformers.errors import RequestError
from kvstore_transformers.link import Answer, DaemonLink, Session, Ticket, leading, settle
from kvstore_transformers.model import CausalModel
from kvstore_transformers.paged import CacheShape, PagedCache
from kvstore_transformers.sampling import GREEDY, Sampling

LOG = logging.getLogger(__name__)
Connect = Callable[[OwnedHostMemory, Layout], Session]
"""Registers memory of a layout with a daemon, under an engine ID of its own each time."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and deadlines. ``cache_tokens`` is the KV pool; ``prefill_tokens`` a block of the
    prompt; ``store_decoded`` also stores chunks that decoding fills. Deadlines as in engine.py's
    essay."""

    tokens_per_block: int = 32
    tokens_per_chunk: int = 128
    cache_tokens: int = 8192
    prefill_tokens: int = 512
    store_decoded: bool = True
    transfer_deadline_s: float = 10.0
    acknowledge_deadline_s: float = 5.0

    def validate(self) -> None:
        """Raise RequestError for sizes that don't fit together."""
        if self.tokens_per_block < 1 or self.tokens_per_chunk % self.tokens_per_block:
            raise RequestError(
                f"engine: tokens_per_chunk={self.tokens_per_chunk}; valid are multiples of "
                f"tokens_per_block={self.tokens_per_block}"
            )
        if min(self.tokens_per_chunk, self.cache_tokens, self.prefill_tokens) < 1:
            raise RequestError("engine: sizes in tokens must be 1 or more")


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request gave: the new ``tokens``; how many of ``prompt_tokens`` were ``reused`` from
    the daemon; seconds to the first token and in all; ``finish`` is "end" at an end token, else
    "length"."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    total_s: float
    finish: str


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way: ``computed`` leading tokens have their KV in ``blocks``; the daemon has
    been given, or has given, the first ``known_chunks``."""

    name: str
    owner: int
    tokens: list[int]
    blocks: tuple[int, ...]
    computed: int = 0
    known_chunks: int = 0
    tickets: list[Ticket] = field(default_factory=list)


class Boundary:
    """The connector's outer boundary: no exception of the cache reaches the engine. ``failures``
    counts, by verb, the calls that raised and were answered as a miss."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def __call__(self, verb: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Run ``call``; when it raises, log the first of its verb and give ``otherwise``."""

        def missed(error: Exception) -> Answer:
            self.failures[verb] += 1
            if self.failures[verb] == 1:
                text = "kvstore: %s failed; the engine goes on without the cache"
                LOG.error(text, verb, exc_info=error)
            return otherwise

        return guarded(call, missed)


class Engine:
    """One request at a time; nothing is kept between requests but what the daemon keeps.

    ``connect`` is None for an engine without a daemon. Use it in a ``with``, or ``open`` and
    ``close``; not safe from several threads.
    """

    def __init__(
        self,
        model: CausalModel,
        options: EngineOptions | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.model = model
        self.options = options or EngineOptions()
        self._connect = connect
        self._memory: OwnedHostMemory | None = None
        self._cache: PagedCache | None = None
        self._link: DaemonLink | None = None
        self._boundary = Boundary()
        self._parting: list[_Request] = []
        self._requests = 0

    def open(self) -> None:
        """Create the KV memory and register it. All or nothing: raises CapacityError when there is
        no room, and what ``connect`` raises; a daemon that is away raises nothing."""
        self.options.validate()
        self._create_cache()
        try:
            self._link = self._register()
        except KVStoreError:
            self._leave()
            raise

    def close(self) -> None:
        """End open transfers, leave the daemon and let the memory go. Idempotent."""
        self.flush(self.options.transfer_deadline_s)
        self._leave()

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def cache(self) -> PagedCache:
        """The KV in use now; raises RequestError before ``open`` and after ``close``."""
        if self._cache is None:
            raise RequestError("engine: it isn't open")
        return self._cache

    @property
    def failures(self) -> dict[str, int]:
        """Calls to the daemon's client that raised here, by verb; a sound engine has none."""
        return dict(self._boundary.failures)

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether the daemon knows this engine, waiting at most ``timeout_s``; without it every
        request is a miss."""
        return self._link is not None and self._link.wait_ready(timeout_s)

    def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        ignore_end: bool = False,
    ) -> Generation:
        """Continue ``tokens`` by up to ``max_new_tokens``, to an end token unless they are ignored.

        Raises RequestError for a request that can't be served whatever the cache holds; nothing
        that happens at the daemon raises.
        """
        self._check(tokens, max_new_tokens)
        sampling.validate()
        started = time.perf_counter()
        request = self._begin(tokens, max_new_tokens)
        try:
            self._load(request)
            reused = request.computed
            generator = sampling.generator()
            chosen = sampling.choose(self._prefill(request), generator)
            ttft_s = time.perf_counter() - started
            self._store(request)
            end_tokens = () if ignore_end else self.model.spec.end_tokens
            while True:
                request.tokens.append(chosen)
                if chosen in end_tokens or len(request.tokens) == len(tokens) + max_new_tokens:
                    break
                chosen = sampling.choose(self._prefill(request), generator)
            if self.options.store_decoded:
                self._store(request)
        finally:
            self._end(request)
        return Generation(
            tokens=tuple(request.tokens[len(tokens) :]),
            prompt_tokens=len(tokens),
            reused_tokens=reused,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - started,
            finish="end" if chosen in end_tokens else "length",
        )

    def flush(self, deadline_s: float) -> bool:
        """Wait until all stores of ended requests have ended; False when one hadn't at the
        deadline and wasn't acknowledged after its cancel."""
        tickets = [ticket for request in self._parting for ticket in request.tickets]
        ended = settle(tickets, deadline_s, self.options.acknowledge_deadline_s)
        self._reap()
        return ended

    def _check(self, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Raise RequestError for a request that no cache content could make servable."""
        spec, shape = self.model.spec, self.cache.shape
        if not tokens or max_new_tokens < 1:
            raise RequestError(
                f"request: {len(tokens)} tokens, max_new_tokens={max_new_tokens}; valid is 1 or "
                "more of each"
            )
        if min(tokens) < 0 or max(tokens) >= spec.vocabulary:
            raise RequestError(f"request: valid tokens are 0..{spec.vocabulary - 1}")
        total = len(tokens) + max_new_tokens
        longest = min(spec.positions_max, shape.num_blocks * shape.tokens_per_block)
        if total > longest:
            raise RequestError(
                f"request: {len(tokens)} tokens and max_new_tokens={max_new_tokens} are {total}; "
                f"valid are up to {longest}"
            )

    def _begin(self, tokens: Sequence[int], max_new_tokens: int) -> _Request:
        """Take blocks for the whole request, waiting for parting requests where they are short."""
        self._requests += 1
        self._reap()
        count = self.cache.shape.blocks_for(len(tokens) + max_new_tokens)
        blocks = self.cache.allocator.allocate(self._requests, count)
        if blocks is None:
            if not self.flush(self.options.transfer_deadline_s):
                self._abandon()
            blocks = self.cache.allocator.allocate(self._requests, count)
        assert blocks is not None, "an empty cache is too small for a checked request"
        return _Request(f"request-{self._requests}", self._requests, list(tokens), blocks)

    def _load(self, request: _Request) -> None:
        """Have the daemon write the leading chunks that it holds; sets ``computed`` to the tokens
        that are there, less than the prompt's."""
        keys = self._keys(request.tokens)
        if self._link is None or keys is None:
            return
        usable = (len(request.tokens) - 1) // self.options.tokens_per_chunk
        found = min(self._link.lookup(request.name, keys), usable)
        if found == 0:
            return
        ticket = self._link.retrieve(request.name, keys[:found], self._blocks(request, 0, found))
        if ticket is None:
            return
        request.tickets.append(ticket)
        deadlines = self.options.transfer_deadline_s, self.options.acknowledge_deadline_s
        if not settle([ticket], *deadlines):
            self._abandon()
            blocks = self.cache.allocator.allocate(request.owner, len(request.blocks))
            assert blocks is not None, "a new cache has room for what the old one held"
            request.blocks = blocks
            request.tickets.clear()
            return
        request.known_chunks = leading(ticket)
        request.computed = request.known_chunks * self.options.tokens_per_chunk

    def _prefill(self, request: _Request) -> Tensor:
        """Compute the KV of all tokens that lack it, in blocks that end at multiples of
        ``prefill_tokens``; returns the logits of the last."""
        pages = self.cache.pages(request.blocks)
        states = torch.empty(0)
        while request.computed < len(request.tokens):
            start, size = request.computed, self.options.prefill_tokens
            end = min(len(request.tokens), (start // size + 1) * size)
            part = torch.tensor(request.tokens[start:end])
            states = self.model.forward(part, start, pages)
            request.computed = end
        return self.model.logits(states[-1:])[0]

    def _store(self, request: _Request) -> None:
        """Hand the daemon the full chunks that it hasn't been given."""
        first, end = request.known_chunks, request.computed // self.options.tokens_per_chunk
        if self._link is None or first >= end:
            return
        keys = self._keys(request.tokens[: request.computed])
        if keys is None:
            return
        blocks = self._blocks(request, first, end)
        ticket = self._link.store(request.name, keys[first:end], blocks)
        if ticket is not None:
            request.tickets.append(ticket)
            request.known_chunks = end

    def _end(self, request: _Request) -> None:
        """Release the lease, and the blocks as soon as every ticket has ended."""
        if self._link is not None:
            self._link.release(request.name)
        self._parting.append(request)
        self._reap()

    def _reap(self) -> None:
        """Free the blocks of ended requests whose transfers have all ended."""
        done = [r for r in self._parting if all(ticket.done() for ticket in r.tickets)]
        self._parting = [r for r in self._parting if r not in done]
        for request in done:
            self.cache.allocator.free(request.owner, request.blocks)

    def _abandon(self) -> None:
        """Leave the memory to a daemon that doesn't answer, and go on in a new one."""
        LOG.error("kvstore: the daemon doesn't acknowledge a cancel; going on in new memory")
        self._leave()
        self._create_cache()
        self._link = self._boundary("register", self._register, None)

    def _leave(self) -> None:
        """Close the link and let the memory go; blocks that the daemon holds go with it."""
        if self._link is not None:
            self._link.close()
        if self._memory is not None:
            self._memory.close()
        self._link, self._cache, self._memory = None, None, None
        self._parting.clear()

    def _create_cache(self) -> None:
        shape = self._shape()
        self._memory = create_host_memory("kvstore-transformers", shape.memory_bytes())
        self._cache = PagedCache(shape, self._memory)

    def _register(self) -> DaemonLink | None:
        if self._connect is None or self._memory is None:
            return None
        layout = self.cache.shape.layout(self.options.tokens_per_chunk)
        return DaemonLink(self._connect(self._memory, layout), self._boundary)

    def _keys(self, tokens: Sequence[int]) -> ChunkKeys | None:
        return self._link.keys(tokens) if self._link is not None else None

    def _blocks(self, request: _Request, first: int, end: int) -> tuple[int, ...]:
        """The request's blocks of chunks [first, end)."""
        size = self.options.tokens_per_chunk // self.options.tokens_per_block
        return request.blocks[first * size : end * size]

    def _shape(self) -> CacheShape:
        spec, options = self.model.spec, self.options
        return CacheShape(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.weights.dtype,
            tokens_per_block=options.tokens_per_block,
            num_blocks=-(-options.cache_tokens // options.tokens_per_block),
        )
