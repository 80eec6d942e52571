"""Mutated replies against the client: nothing is raised into the engine, every ticket that is
settled has an outcome of its own size, and a daemon that isn't understood is left."""

from __future__ import annotations

import random
import socket
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstore import wire
from kvstore.client_counts import LinkCounts
from kvstore.client_joining import Attaching
from kvstore.client_link import Link
from kvstore.client_tickets import GroupBlocks, Ticket
from kvstore.core.changes import Changes
from kvstore.core.errors import ProtocolError
from kvstore.core.messages import (
    Body,
    Completed,
    Done,
    EngineState,
    HitStatus,
    LookupReply,
    Refused,
)
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire_messages import write_hello, write_reply
from tests.fuzz.mutate import EXAMPLES, fuzz, is_line, mangle, only_lines, scramble
from tests.fuzz.rig import IDS, KEYS
from tests.link_rig import CHUNK_TOKENS, DIGEST, frame

CHUNKS = 3
STATE = EngineState("e1", True, DIGEST, CHUNK_TOKENS)
FIXED_BYTES = 1 << 20
FULL_MAX = 100
"""So often a client may be asked to read and the socket be full still."""


class Joined:
    """A live link of a client, its daemon's end, and one open transfer."""

    def __init__(self) -> None:
        self.daemon, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (self.daemon, peer):
            end.setblocking(False)
        self.link = Link(peer, Attaching("e1", "").join, LinkCounts(), lambda: None)
        self.link.open()
        self.say(write_hello(1, wire.hello()))
        self.say(write_reply(2, STATE))
        self.link.poll()
        assert self.link.live()
        assert self.link.namespace == DIGEST
        self.ticket = Ticket(CHUNKS, (GroupBlocks("full", IDS, 4),), self.link)
        store = pb.ClientMessage(kind=pb.ClientMessage.STORE, request="r", keys=KEYS)
        self.link.start(self.ticket, store)

    def say(self, message: bytes) -> None:
        """The daemon says something, as long as somebody listens; what the socket can't hold, the
        client reads meanwhile."""
        left = memoryview(frame(message))
        full = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while left and full < FULL_MAX:
                try:
                    left, full = left[self.daemon.send(left) :], 0
                except BlockingIOError:
                    full += 1
                    self.link.poll()
        assert full < FULL_MAX, "the client doesn't read"

    def close(self) -> None:
        """The daemon is gone, and the client sees it."""
        self.daemon.close()
        while not self.link.channel.lost:
            self.link.poll()
        assert self.link.channel.dispose()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Counter[str]]:
    """What became of the replies: neither all senseless nor all harmless."""
    counts: Counter[str] = Counter()
    yield counts
    assert sum(counts.values()) < 500 or counts.keys() >= {"left", "stayed", "settled"}, counts


def reply(rng: random.Random, number: int) -> bytes:
    """A sound reply of some kind."""
    bodies: tuple[Body | Changes, ...] = (
        LookupReply(HitStatus.HIT, 2),
        LookupReply(HitStatus.PENDING, 0),
        Completed(b"\1\1\0", reason="a reason"),
        Refused("a reason"),
        Done(),
        STATE,
    )
    if rng.random() < 0.1:
        return write_hello(number, wire.hello())
    return write_reply(number, rng.choice(bodies))


@fuzz(EXAMPLES // 4)
def test_a_mutated_reply_never_raises_into_the_engine(outcomes: Counter[str], seed: int) -> None:
    """Each call on the link returns, and the end of the stream settles what was open."""
    rng = random.Random(seed)
    joined = Joined()
    link, ticket = joined.link, joined.ticket
    for _ in range(rng.choice((1, 1, 3))):
        message = pb.DaemonMessage.FromString(reply(rng, rng.choice((0, 1, 2, 3, 3))))
        if rng.random() < 0.5:
            scramble(rng, message)
        raw = message.SerializeToString()
        joined.say(raw if rng.random() < 0.5 else mangle(rng, raw))
    link.poll()
    if not link.gone():
        link.lookup("r", KEYS, 0.0)
    link.release("r")
    link.cancel(ticket)
    link.wait(ticket, time.monotonic())
    assert is_line(link.channel.reason)
    outcomes["left" if link.gone() else "stayed"] += 1
    outcomes["settled"] += ticket.settled
    joined.close()
    assert link.gone()
    outcome = ticket.outcome()
    assert outcome is not None
    assert len(outcome.done) == CHUNKS
    blocks = [block for ids in outcome.failed_blocks.values() for block in ids]
    assert len(blocks) == 4 * outcome.done.count(False)


@fuzz(EXAMPLES // 4)
def test_decoding_a_mutated_reply_costs_what_its_bytes_say(seed: int) -> None:
    """Bytes that are no message are a ProtocolError of one line, and cost no more than they are."""
    rng = random.Random(seed)
    raw = mangle(rng, reply(rng, 3))
    tracemalloc.start()
    try:
        with only_lines(ProtocolError):
            wire.read_daemon_message(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < FIXED_BYTES + 40 * len(raw)
