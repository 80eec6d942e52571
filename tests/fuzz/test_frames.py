"""Mutated frames against the daemon: decoding, the session layer and the real core behind a real
socket. A frame is refused in one line, ends its own session, or is carried out; a refused one
leaves the core as it was, and no other engine ever notices."""

from __future__ import annotations

import random
import resource
import socket
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError

from kvstore import create_host_memory, wire
from kvstore.core.errors import KVStoreError
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire_messages import read_engine, read_registration, read_request
from tests.fuzz.mutate import EXAMPLES, fuzz, is_line, mangle, only_lines, scramble
from tests.fuzz.rig import (
    BYSTANDER,
    IDS,
    KEYS,
    MEMORY_BYTES,
    FuzzRig,
    fuzz_rig,
    joined,
    register_message,
)
from tests.link_rig import Peer, frame

Kind = pb.ClientMessage.Kind
FIXED_BYTES = 2 << 20
"""What decoding may take beside some copies of the frame."""
GROWTH_BYTES_MAX = 512 << 20
"""What the whole process may grow by while it is fuzzed; a lying length could take gigabytes."""
OUTCOMES = {"REFUSED", "DONE", "ENGINE", "LOOKUP", "COMPLETED", "ended", "nothing"}
"""What becomes of a thousand mutated frames, or the mutations are too wild or too tame."""


def message(rng: random.Random, kind: int) -> pb.ClientMessage:
    """A sound message of this kind."""
    made = pb.ClientMessage(kind=kind, request=rng.choice(("r", "r2")))
    chunks = rng.randint(1, 3)
    if kind == pb.ClientMessage.HELLO:
        made.hello.CopyFrom(wire.hello())
    elif kind == pb.ClientMessage.REGISTER:
        made.CopyFrom(register_message("e1"))
    elif kind in (pb.ClientMessage.STORE, pb.ClientMessage.RETRIEVE, pb.ClientMessage.LOOKUP):
        made.keys = KEYS[: 32 * chunks]
        if kind != pb.ClientMessage.LOOKUP:
            made.blocks.extend([IDS[: 16 * chunks]] * 2)
    made.engine, made.revision, made.transfer = "e1", "r2", rng.randrange(9)
    return made


def mutated(rng: random.Random, sound: pb.ClientMessage) -> bytes:
    """A frame made of a sound message by mutation of fields, bytes, or both."""
    way = rng.random()
    if way < 0.1:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    if way < 0.7:
        scramble(rng, sound)
    raw = sound.SerializeToString()
    return raw if 0.2 < way < 0.7 else mangle(rng, raw)


@pytest.fixture(scope="module")
def memory() -> Iterator[int]:
    """An engine's memory."""
    with create_host_memory("fuzz", MEMORY_BYTES) as owned:
        yield owned.fd


class Attacker:
    """Connections in each phase, made again when the daemon has hung up."""

    def __init__(self, rig: FuzzRig, fd: int) -> None:
        self.rig = rig
        self.fd = fd
        self.peers: dict[str, Peer] = {}
        self.outcomes: Counter[str] = Counter()

    def peer(self, phase: str) -> Peer:
        """A connection that has come so far."""
        peer = self.peers.get(phase)
        if peer is None:
            peer = self.peers[phase] = Peer(self.rig.path)
            if phase == "worker":
                joined(peer, "e1", self.fd)
            elif phase == "scheduler":
                peer.attach("e1")
            elif phase == "greeted":
                peer.greet()
        return peer

    def hang_up(self, phase: str) -> None:
        """Forget a connection that has ended, and wait until the daemon has, too."""
        self.peers.pop(phase).close()
        self.rig.look()

    def close(self) -> None:
        """Hang up everywhere."""
        for phase in list(self.peers):
            self.hang_up(phase)


@pytest.fixture(scope="module")
def attacker(memory: int) -> Iterator[Attacker]:
    """Beside a bystander, whose chunks are stored and leased."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fuzz_rig() as rig, Peer(rig.path) as bystander:
        joined(bystander, BYSTANDER, memory)
        for kind in (Kind.STORE, Kind.LOOKUP):
            asked = message(random.Random(1), kind)
            asked.keys = asked.keys[:32]
            for number in range(len(asked.blocks)):
                asked.blocks[number] = asked.blocks[number][:16]
            bystander.send(asked)
            assert bystander.answer().kind in (Kind.LOOKUP, pb.DaemonMessage.COMPLETED)
        attacker = Attacker(rig, memory)
        yield attacker
        attacker.close()
        asked = message(random.Random(1), Kind.LOOKUP)
        bystander.send(asked)
        assert bystander.answer().chunks >= 1
        if sum(attacker.outcomes.values()) > 1000:
            assert attacker.outcomes.keys() >= OUTCOMES, attacker.outcomes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < GROWTH_BYTES_MAX


PHASES = ("greeting", "greeted", "worker", "worker", "worker", "worker", "scheduler", "scheduler")
KINDS = {
    "greeting": (Kind.HELLO, Kind.REGISTER),
    "greeted": (Kind.REGISTER, Kind.REGISTER, Kind.ATTACH),
    "worker": tuple(range(Kind.SET_REVISION, Kind.WATCH + 1)),
    "scheduler": (Kind.SET_REVISION, Kind.LOOKUP, Kind.RELEASE, Kind.CANCEL, Kind.STORE),
}


@fuzz(EXAMPLES)
def test_a_mutated_frame_harms_nobody(attacker: Attacker, seed: int) -> None:
    """Any frame, in any phase of a session."""
    rng = random.Random(seed)
    phase = rng.choice(PHASES)
    peer = attacker.peer(phase)
    before = attacker.rig.look()
    sound = message(rng, rng.choice(KINDS[phase]))
    peer._last_id += 1
    number = sound.id = peer._last_id
    replies, ended = _exchange(rng, peer, mutated(rng, sound), attacker.fd)
    for reply in replies:
        assert is_line(reply.reason), reply.reason
    mine = {pb.DaemonMessage.Kind.Name(reply.kind) for reply in replies if reply.id == number}
    attacker.outcomes.update(mine or {"ended" if ended else "nothing"})
    if ended:
        attacker.hang_up(phase)
    after = attacker.rig.look()
    assert after["bystander"] == before["bystander"]
    refused = [r for r in replies if r.kind == pb.DaemonMessage.REFUSED and r.id == number]
    if refused and not ended:
        assert after["all"] == before["all"], refused
    if phase in ("greeting", "greeted") and not ended:
        attacker.hang_up(phase)


def _exchange(
    rng: random.Random, peer: Peer, raw: bytes, fd: int
) -> tuple[list[pb.DaemonMessage], bool]:
    """Send a frame, sometimes under a length that lies or with descriptors that nobody asked for;
    and all replies up to that to a RELEASE behind it, or the end of the stream."""
    data = frame(raw)
    lies = rng.random() < 0.05
    if lies:
        length = rng.choice((len(raw) + 5, 1 << 24, wire.FRAME_BYTES_MAX, (1 << 32) - 1))
        data = length.to_bytes(4, "little") + raw
    replies: list[pb.DaemonMessage] = []
    with suppress(OSError):
        peer.send_bytes(data, [fd] * rng.choice((0, 1, 1, 2, 9)))
        if lies:
            peer.socket.shutdown(socket.SHUT_WR)
            marker = -1
        else:
            marker = peer.send(pb.ClientMessage(kind=Kind.RELEASE, request="marker"))
        while (reply := peer.receive()) is not None:
            if reply.id == marker:
                return replies, False
            replies.append(reply)
    return replies, True


@fuzz(EXAMPLES)
def test_decoding_a_mutated_frame_costs_what_its_bytes_say(seed: int) -> None:
    """Decoding raises KVStoreErrors of one line only, and allocates no more than some copies of
    what was received, whatever lengths and counts it claims."""
    rng = random.Random(seed)
    raw = mutated(rng, message(rng, rng.randrange(1, 11)))
    tracemalloc.start()
    try:
        _decode(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < FIXED_BYTES + 40 * len(raw)


def _decode(raw: bytes) -> None:
    with only_lines(KVStoreError):
        parsed = wire.read_client_message(raw)
        if parsed.kind == Kind.REGISTER:
            read_registration(parsed.register).validate()
        elif parsed.kind == Kind.ATTACH:
            read_engine(parsed)
        else:
            read_request(parsed)


@fuzz(EXAMPLES // 4)
def test_a_registration_that_is_accepted_describes_memory_within_its_bounds(seed: int) -> None:
    """What validation lets pass lies within the memory, block by block."""
    rng = random.Random(seed)
    sound = register_message("e1")
    scramble(rng, sound.register, rng.choice((1, 2, 3)))
    with suppress(KVStoreError, DecodeError):
        registration = read_registration(sound.register)
        registration.validate()
        for group in registration.layout.groups:
            for span in group.tensors:
                last = span.offset_bytes + (span.num_blocks - 1) * span.block_stride_bytes
                assert last + span.block_bytes <= registration.nbytes
