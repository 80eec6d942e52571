"""The canonical encoding, against a second implementation written from its documentation alone."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.canonical import Encoder

TAGS = st.text(st.characters(min_codepoint=97, max_codepoint=122), max_size=4)
NUMBERS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
FIELDS = st.one_of(
    st.tuples(st.just("text"), TAGS, st.text(max_size=6)),
    st.tuples(st.just("number"), TAGS, NUMBERS),
    st.tuples(st.just("raw"), TAGS, st.binary(max_size=9)),
)
FieldList = list[tuple[str, str, str | int | bytes]]


def reference_field(tag: str, value: str | int | bytes) -> bytes:
    """One field as the documentation of ``kvstore.core.canonical`` has it, written a second
    time."""
    if isinstance(value, str):
        kind, payload = "t", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int):
        kind, payload = "n", struct.pack("<q", value)
    else:
        kind, payload = "b", value
    head = len(tag).to_bytes(4, "little") + tag.encode()
    return head + kind.encode() + len(payload).to_bytes(8, "little") + payload


def reference_bytes(domain: str, *fields: tuple[str, str | int | bytes]) -> bytes:
    """A whole encoding: the domain first, then the fields in order."""
    return b"".join([reference_field("domain", domain), *(reference_field(*f) for f in fields)])


def encode(domain: str, fields: FieldList) -> bytes:
    encoder = Encoder(domain)
    for kind, tag, value in fields:
        getattr(encoder, kind)(tag, value)
    return encoder.encoded()


@given(st.text(max_size=5), st.lists(FIELDS, max_size=5))
def test_encoding_equals_the_documented_format(domain: str, fields: FieldList) -> None:
    expected = reference_bytes(domain, *((tag, value) for _, tag, value in fields))
    assert encode(domain, fields) == expected


@given(st.lists(FIELDS, max_size=4), st.lists(FIELDS, max_size=4))
def test_different_fields_never_give_equal_bytes(first: FieldList, second: FieldList) -> None:
    """Neither a moved border between two fields, nor another type, nor a missing field collide."""
    assert (encode("d", first) == encode("d", second)) == (first == second)


@given(st.lists(FIELDS, min_size=1, max_size=4), st.integers(min_value=0, max_value=3))
def test_a_missing_field_differs_from_an_empty_one(fields: FieldList, place: int) -> None:
    with_empty = [*fields[:place], ("text", "salt", ""), *fields[place:]]
    assert encode("d", with_empty) != encode("d", fields)


def test_the_domain_is_part_of_the_bytes() -> None:
    assert encode("kvstore/a", []) != encode("kvstore/b", [])


def test_pinned_bytes_of_each_type() -> None:
    encoder = Encoder("d")
    encoder.text("t", "é")
    encoder.number("n", -2)
    encoder.raw("r", b"\x00\xff")
    assert encoder.encoded().hex() == (
        "06000000646f6d61696e" + "74" + "0100000000000000" + "64"
        "01000000" + "74" + "74" + "0200000000000000" + "c3a9"
        "01000000" + "6e" + "6e" + "0800000000000000" + "feffffffffffffff"
        "01000000" + "72" + "62" + "0200000000000000" + "00ff"
    )


def test_encoding_may_be_read_while_fields_are_added() -> None:
    encoder = Encoder("d")
    before = encoder.encoded()
    encoder.number("n", 1)
    assert encoder.encoded() == before + reference_field("n", 1)


def test_lone_surrogates_are_kept_apart_from_their_escape() -> None:
    assert encode("d", [("text", "t", "\ud800")]) != encode("d", [("text", "t", "\\ud800")])


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        Encoder("d").number("n", value)
