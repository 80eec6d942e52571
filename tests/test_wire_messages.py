"""Messages of the engine link: round trips, and refusals of whatever has the wrong shape."""

from __future__ import annotations

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.core.changes import Changes
from kvstore.core.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    LayoutMismatchError,
    ProtocolError,
    TierUnavailableError,
)
from kvstore.core.layout import LayerGroup, Layout, Shard, TensorSpan, TokenRows
from kvstore.core.messages import Completed, Done, EngineState, HitStatus, LookupReply, Refused
from kvstore.proto_gen import engine_pb2 as pb
from kvstore.wire_messages import (
    Registration,
    read_refusal,
    read_registration,
    read_request,
    refused_as,
    write_registration,
    write_reply,
)
from tests.link_rig import SPACE, layout


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_message_is_refused_or_is_another_well_formed_one(data: st.DataObject) -> None:
    """One byte of a STORE flips: reading it raises a KVStoreError at worst, never anything else,
    and what it gives is of the right shape."""
    message = pb.ClientMessage(
        kind=pb.ClientMessage.STORE, id=7, request="r", keys=bytes(range(64)), first=2,
        parent=b"p" * 32, blocks=[b"\1\0\0\0\2\0\0\0"],
    )  # fmt: skip
    raw = bytearray(message.SerializeToString())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        parsed = read_request(wire.read_client_message(bytes(raw)))
    except KVStoreError:
        return
    assert len(getattr(parsed, "keys", b"")) % 32 == 0
    assert all(len(packed) % 4 == 0 for packed in getattr(parsed, "blocks", ()))


def test_a_registration_round_trips() -> None:
    """Everything that describes an engine's memory arrives as it was sent."""
    rows = TokenRows("kv", 8, 128, 512, "gptj")
    groups = (
        LayerGroup("full", 16, None, (TensorSpan(0, 4096, 2048, 100, rows),)),
        LayerGroup("window", 4, 128, (TensorSpan(2048, 4096, 2048, 100),)),
    )
    sent = Registration(
        "e1", SPACE, Layout("bfloat16", 64, groups), Shard(1, 4, 2, 3, 2, 1), 1 << 40
    )
    raw = write_registration(sent).SerializeToString()
    assert read_registration(pb.Register.FromString(raw)) == sent


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_as_a_registration_are_refused_in_one_line_or_make_one(raw: bytes) -> None:
    """Garbage that happens to parse is described, and validation of it raises nothing but
    KVStoreErrors."""
    good = write_registration(Registration("e1", SPACE, layout(), Shard(), 1 << 20))
    mixed = good.SerializeToString() + raw
    try:
        message = pb.Register.FromString(mixed)
    except DecodeError:
        return
    with suppress(KVStoreError):
        read_registration(message).validate()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kind": 5, "request": "r", "keys": b"x" * 31}, "keys of 31 bytes"),
        ({"kind": 5, "request": "r"}, "keys of 0 bytes"),
        ({"kind": 5, "request": "r", "keys": b"x" * 32 * 65_537}, "up to 65536 keys"),
        ({"kind": 5, "keys": b"x" * 32}, "request of 0 characters"),
        ({"kind": 5, "request": "r" * 1025, "keys": b"x" * 32}, "request of 1025 characters"),
        ({"kind": 7, "request": "r", "keys": b"x" * 32, "first": 1}, "first=1 with a parent of 0"),
        (
            {"kind": 7, "request": "r", "keys": b"x" * 32, "first": 1, "parent": b"p" * 31},
            "parent of 31 bytes",
        ),
        (
            {"kind": 7, "request": "r", "keys": b"x" * 32, "parent": b"p" * 32},
            "first=0 with a parent of 32",
        ),
        ({"kind": 8, "request": "r", "keys": b"x" * 32, "blocks": [b"123"]}, "multiples of 4"),
        ({"kind": 8, "request": "r", "keys": b"x" * 32, "blocks": [b""] * 65}, "65 groups"),
        ({"kind": 4}, "revision of 0 characters"),
        ({"kind": 2}, "message kind 2"),
        ({"kind": 77}, "message kind 77"),
        ({}, "message kind 0"),
    ],
)
def test_a_message_of_the_wrong_shape_is_refused_in_one_line(
    message: dict[str, object], words: str
) -> None:
    """Nothing malformed reaches the core."""
    with pytest.raises(ProtocolError, match=words) as caught:
        read_request(pb.ClientMessage(**message))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_answers_are_written_with_their_number() -> None:
    """Every body that a session may get has its message."""
    for body, kind in (
        (Done(), pb.DaemonMessage.DONE),
        (Refused("no"), pb.DaemonMessage.REFUSED),
        (EngineState("e", True, b"n" * 32, 16), pb.DaemonMessage.ENGINE),
        (LookupReply(HitStatus.HIT, 3), pb.DaemonMessage.LOOKUP),
        (Completed(b"\1\0", True, "why"), pb.DaemonMessage.COMPLETED),
        (Changes(b"k" * 32, b"\1", True), pb.DaemonMessage.CHANGES),
    ):
        message = wire.read_daemon_message(write_reply(9, body))
        assert (message.kind, message.id) == (kind, 9)


def test_an_error_comes_back_as_what_it_was() -> None:
    """The daemon's error is the client's, in one line; a cause of a later version is any error."""
    for error in (
        LayoutMismatchError("a"), CapacityError("a"), ProtocolError("a"), ConfigError("a"),
    ):  # fmt: skip
        message = wire.read_daemon_message(write_reply(9, refused_as(error)))
        assert type(read_refusal(message)) is type(error)
    other = wire.read_daemon_message(write_reply(9, refused_as(TierUnavailableError("a\n b"))))
    assert type(read_refusal(other)) is KVStoreError
    assert other.reason == "a b"
    later = pb.DaemonMessage.FromString(b"\x68\x63")  # cause = 99
    assert type(read_refusal(later)) is KVStoreError


@pytest.mark.parametrize("text", ["a\x1b[31m", "a\nforged line", "\u202eevil", "a\x00b"])
@pytest.mark.parametrize("field", ["engine", "model", "revision", "format", "config", "alias"])
def test_names_that_do_not_print_are_refused(field: str, text: str) -> None:
    """Names are shown by stats and logged: they may not drive a terminal or forge a line."""
    message = write_registration(Registration("e1", SPACE, layout(), Shard(), 1 << 20))
    setattr(message if field == "engine" else message.namespace, field, text)
    with pytest.raises(ProtocolError, match=f"{field}=.* characters that print") as caught:
        read_registration(message)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
