"""Hashing step by step, and sequences of keys: slices, places in the chain, what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keys import (
    KEY_BYTES,
    NO_PARENT,
    ChunkKeys,
    KeyContext,
    PrefixHasher,
    prefix_keys,
)
from tests.test_keys import CONTEXTS, DIGEST, TOKENS

# ---------------------------------------------------------------- the hasher


@given(TOKENS, st.lists(st.integers(0, 20), max_size=6), CONTEXTS, st.integers(1, 4))
def test_incremental_hashing_equals_one_shot(
    tokens: list[int], cuts: list[int], context: KeyContext, size: int
) -> None:
    """Whatever the steps in which a request decodes, and whichever sequence type it comes in."""
    hasher = PrefixHasher(DIGEST, size, context)
    for cut in sorted(cuts):
        part = tokens[:cut]
        assert hasher.keys(part) == prefix_keys(DIGEST, size, part, context)
    assert hasher.keys(tokens) == prefix_keys(DIGEST, size, tokens, context)
    assert hasher.keys(tokens).num_tokens == len(tokens)


@given(TOKENS, st.integers(1, 4))
def test_the_sequence_type_of_the_tokens_does_not_matter(tokens: list[int], size: int) -> None:
    expected = prefix_keys(DIGEST, size, tokens)
    packed = array("I", tokens)
    for form in (tuple(tokens), packed, memoryview(packed), array("Q", tokens)):
        assert prefix_keys(DIGEST, size, form) == expected


def test_fewer_tokens_than_before_give_fewer_keys() -> None:
    hasher = PrefixHasher(DIGEST, 4)
    hasher.keys(list(range(20)))
    assert hasher.keys(list(range(9))) == prefix_keys(DIGEST, 4, list(range(9)))


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "x", None])
def test_a_token_that_is_no_u32_is_refused_naming_its_chunk(token: Any) -> None:
    tokens = [*range(20), token]
    with pytest.raises(ValueError, match=r"tokens 18\.\.20"):
        prefix_keys(DIGEST, 3, tokens)


def test_a_refused_token_leaves_the_hasher_as_it_was() -> None:
    hasher = PrefixHasher(DIGEST, 2)
    with pytest.raises(ValueError, match="tokens"):
        hasher.keys([1, 2, 3, -4])
    assert hasher.keys([1, 2, 3, 4]) == prefix_keys(DIGEST, 2, [1, 2, 3, 4])


def test_chunk_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_chunk=0"):
        PrefixHasher(DIGEST, 0)


def test_two_hashers_share_nothing() -> None:
    one, other = PrefixHasher(DIGEST, 2), PrefixHasher(DIGEST, 2)
    one.keys([1, 2, 3, 4])
    assert len(other.keys([9])) == 0
    assert other.keys([5, 6]) == prefix_keys(DIGEST, 2, [5, 6])


# ---------------------------------------------------------------- sequences of keys


@given(TOKENS, st.integers(-22, 22), st.integers(-22, 22), st.integers(0, 22))
def test_slices_keep_their_place_in_the_chain(
    tokens: list[int], start: int, stop: int, inner: int
) -> None:
    keys = prefix_keys(DIGEST, 1, tokens)
    whole = list(keys)
    part = keys[start:stop]
    assert list(part) == whole[start:stop]
    first = slice(start, stop).indices(len(whole))[0]
    assert part.first == first
    assert part.parent == (whole[first - 1] if first else NO_PARENT)
    assert part.num_tokens == len(tokens)
    again = part[inner:]
    assert list(again) == whole[start:stop][inner:]
    assert again.first == first + min(inner, len(part))
    if len(again) and again.first:
        assert again.parent == whole[again.first - 1]


def test_index_and_iteration_agree() -> None:
    keys = prefix_keys(DIGEST, 1, list(range(5)))
    assert [keys[i] for i in range(5)] == list(keys) == [keys[i - 5] for i in range(5)]
    assert keys.data == b"".join(keys)
    assert len(keys[0]) == KEY_BYTES
    with pytest.raises(IndexError):
        keys[5]
    with pytest.raises(ValueError, match="slice step 2"):
        keys[::2]


def test_equal_keys_at_another_place_are_not_equal() -> None:
    keys = prefix_keys(DIGEST, 1, list(range(5)))
    moved = ChunkKeys(keys.data, 1, 5, first=1, parent=keys[0])
    assert keys != moved
    assert keys == prefix_keys(DIGEST, 1, list(range(5)))
    assert hash(keys) == hash(prefix_keys(DIGEST, 1, list(range(5))))
    assert keys != list(keys)


def test_keys_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes; valid are multiples of 32"):
        ChunkKeys(bytes(33), 1, 1)


def test_a_tail_of_no_chunk_has_no_key() -> None:
    for length in range(8):
        assert len(prefix_keys(DIGEST, 8, list(range(length)))) == 0
    assert len(prefix_keys(DIGEST, 8, list(range(15)))) == 1
