"""Chunk keys: pinned values, and everything that must or must not change a key."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keys import (
    HASH_ALGORITHM,
    KEY_BYTES,
    NO_PARENT,
    PROBE_TOKENS,
    Adapter,
    ChunkKeys,
    ContentItem,
    KeyContext,
    Namespace,
    PrefixHasher,
    golden_probe,
    namespace_digest,
    prefix_keys,
)
from kvstore.core.layout import Shard
from tests.test_canonical import reference_bytes, reference_field

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
DIGEST = hashlib.sha256(b"namespace").digest()
Fields = list[tuple[str, str | int | bytes]]


def reference_keys(
    digest: bytes, size: int, tokens: Sequence[int], context: KeyContext
) -> list[bytes]:
    """The keys as documented, written a second time: no shared code but hashlib."""
    fields: Fields = [("namespace", digest)]
    if context.adapter is not None:
        fields.append(("adapter_name", context.adapter.name))
        fields.append(("adapter_digest", context.adapter.digest))
    if context.salt:
        fields.append(("salt", context.salt))
    last = hashlib.sha256(reference_bytes("kvstore/root/v1", *fields)).digest()
    prefix = reference_bytes("kvstore/chunk/v1", ("parent_bytes", 32), ("token_bytes", size * 4))
    items = sorted(context.items, key=lambda i: (i.start, i.length, i.digest))
    keys = []
    for start in range(0, len(tokens) - size + 1, size):
        packed = b"".join(struct.pack("<I", token) for token in tokens[start : start + size])
        behind = b""
        for item in items:
            if item.start < start + size and item.start + item.length > start:
                behind += reference_field("digest", item.digest)
                behind += reference_field("start", item.start - start)
                behind += reference_field("length", item.length)
        if behind:
            behind = reference_field("domain", "items") + behind
        last = hashlib.sha256(prefix + last + packed + behind).digest()
        keys.append(last)
    return keys


def reference_namespace(case: dict[str, Any]) -> bytes:
    """A namespace digest as documented, written a second time."""
    fields: Fields = [(tag, case[tag]) for tag in ("model", "revision", "format", "config")]
    fields += [("dtype", case["dtype"]), ("tokens_per_chunk", case["tokens_per_chunk"])]
    fields += [(tag, case[tag]) for tag in ("tp_size", "pp_size", "replicas")]
    fields += [("fingerprint", bytes.fromhex(one)) for one in case["fingerprints"]]
    return hashlib.sha256(reference_bytes("kvstore/namespace/v1", *fields)).digest()


def context_of(case: dict[str, Any]) -> KeyContext:
    adapter = Adapter(**case["adapter"]) if case["adapter"] else None
    return KeyContext(case["salt"], adapter, tuple(ContentItem(**item) for item in case["items"]))


def tokens_of(case: dict[str, Any]) -> list[int]:
    rule = case["tokens"]
    return [(rule["start"] + i * rule["step"]) % rule["modulo"] for i in range(rule["count"])]


# ---------------------------------------------------------------- pinned values


@pytest.mark.parametrize("case", GOLDEN["keys"], ids=lambda case: case["name"])
def test_pinned_keys_never_change(case: dict[str, Any]) -> None:
    digest, size = bytes.fromhex(case["namespace"]), case["tokens_per_chunk"]
    tokens, context = tokens_of(case), context_of(case)
    keys = prefix_keys(digest, size, tokens, context)
    assert [key.hex() for key in keys] == case["keys"]
    assert reference_keys(digest, size, tokens, context) == list(keys)


@pytest.mark.parametrize("case", GOLDEN["namespaces"], ids=lambda case: case["name"])
def test_pinned_namespace_digests_never_change(case: dict[str, Any]) -> None:
    digest = namespace_digest(
        Namespace(case["model"], case["revision"], case["format"], case["config"]),
        case["dtype"],
        case["tokens_per_chunk"],
        Shard(tp_size=case["tp_size"], pp_size=case["pp_size"], replicas=case["replicas"]),
        [bytes.fromhex(one) for one in case["fingerprints"]],
    )
    assert digest.hex() == case["digest"]
    assert reference_namespace(case) == digest


def test_pinned_golden_probe_never_changes() -> None:
    """field case 3: the probe that both sides of a handshake must compute alike."""
    assert golden_probe().hex() == GOLDEN["golden_probe"]
    assert GOLDEN["algorithm"] == HASH_ALGORITHM
    context = KeyContext("probe", Adapter("adapter", "digest"), (ContentItem("item", 100, 200),))
    root = hashlib.sha256(b"kvstore/probe").digest()
    assert reference_keys(root, 128, PROBE_TOKENS, context)[-1] == golden_probe()


def test_the_probe_covers_every_kind_of_field() -> None:
    """A side that drops the salt, the adapter or the items computes another probe."""
    full = KeyContext("probe", Adapter("adapter", "digest"), (ContentItem("item", 100, 200),))
    root = hashlib.sha256(b"kvstore/probe").digest()
    lesser = [replace(full, salt=""), replace(full, adapter=None), replace(full, items=())]
    probes = [prefix_keys(root, 128, PROBE_TOKENS, one)[-1] for one in lesser]
    assert golden_probe() not in probes
    assert len(set(probes)) == 3


def test_keys_are_equal_in_fresh_interpreters_whatever_the_hash_seed() -> None:
    """field case 1: three interpreters, PYTHONHASHSEED unset, 0 and random, 1,024 tokens."""
    script = (
        "from kvstore.core.keys import *\n"
        "tokens = [i * 7919 % 151936 for i in range(1024)]\n"
        "context = KeyContext('s', Adapter('a', 'd'), (ContentItem('x', 9, 400),))\n"
        "print(prefix_keys(bytes(32), 16, tokens, context).data.hex())\n"
    )
    root = Path(__file__).parent.parent
    base = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    outputs = set()
    for seed in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "random"}):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**base, "PYTHONPATH": str(root), **seed},
            capture_output=True,
            check=True,
            text=True,
        )
        outputs.add(run.stdout.strip())
    tokens = [i * 7919 % 151936 for i in range(1024)]
    context = KeyContext("s", Adapter("a", "d"), (ContentItem("x", 9, 400),))
    assert outputs == {prefix_keys(bytes(32), 16, tokens, context).data.hex()}


# ---------------------------------------------------------------- what a key covers


def test_images_with_equal_placeholders_have_different_keys() -> None:
    """field case 4: 768 tokens, an image at [300, 500), chunks of 128."""
    tokens = [1] * 300 + [99] * 200 + [1] * 268

    def keys(digest: str) -> list[bytes]:
        return list(prefix_keys(DIGEST, 128, tokens, KeyContext(items=(image(digest),))))

    def image(digest: str) -> ContentItem:
        return ContentItem(digest, 300, 200)

    first, second = keys("A"), keys("B")
    assert len(first) == 6
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert keys("A") == first


def test_an_item_enters_the_chunks_that_it_overlaps_and_no_earlier_one() -> None:
    tokens = list(range(64))
    base = list(prefix_keys(DIGEST, 8, tokens))
    for start, length, first in ((0, 1, 0), (7, 1, 0), (8, 8, 1), (15, 2, 1), (63, 1, 7)):
        context = KeyContext(items=(ContentItem("x", start, length),))
        keys = list(prefix_keys(DIGEST, 8, tokens, context))
        changed = [i for i in range(8) if keys[i] != base[i]]
        assert changed == list(range(first, 8))


def test_an_item_behind_the_tokens_changes_nothing() -> None:
    context = KeyContext(items=(ContentItem("x", 64, 5),))
    assert prefix_keys(DIGEST, 8, list(range(64)), context) == prefix_keys(
        DIGEST, 8, list(range(64))
    )


def test_items_are_told_apart_by_digest_place_and_length() -> None:
    tokens = [5] * 32
    items = [
        (ContentItem("x", 3, 4),),
        (ContentItem("y", 3, 4),),
        (ContentItem("x", 4, 4),),
        (ContentItem("x", 3, 5),),
        (ContentItem("x", 3, 4), ContentItem("y", 3, 4)),
        (ContentItem("x", 3, 2), ContentItem("x", 5, 2)),
    ]
    keys = {prefix_keys(DIGEST, 32, tokens, KeyContext(items=one))[0] for one in items}
    assert len(keys) == len(items)


def test_the_order_in_which_items_are_listed_does_not_matter() -> None:
    items = (ContentItem("x", 3, 4), ContentItem("y", 9, 4), ContentItem("z", 9, 2))
    forward = prefix_keys(DIGEST, 8, list(range(32)), KeyContext(items=items))
    assert prefix_keys(DIGEST, 8, list(range(32)), KeyContext(items=items[::-1])) == forward


def test_an_adapter_and_the_base_model_never_share_keys() -> None:
    """field case 7: keys of base requests are those from before adapters existed."""
    tokens = list(range(64))
    base = prefix_keys(DIGEST, 16, tokens)
    first = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("A", "1")))
    second = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("B", "2")))
    assert len({*base, *first, *second}) == 12
    assert prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=None, salt="", items=())) == base
    pinned = next(case for case in GOLDEN["keys"] if case["name"] == "plain")
    plain = prefix_keys(bytes.fromhex(pinned["namespace"]), 8, tokens_of(pinned))
    assert [key.hex() for key in plain] == pinned["keys"]


def test_an_adapter_is_its_name_and_the_digest_of_its_weights() -> None:
    """field case 8: an engine's own integer ID has no place in Adapter; the digest has."""
    tokens = list(range(32))
    one = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("A", "1")))
    other_digest = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("A", "2")))
    other_name = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("B", "1")))
    assert not set(one) & set(other_digest)
    assert not set(one) & set(other_name)
    assert set(Adapter.__slots__) == {"name", "digest"}
    again = prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=Adapter("A", "1")))
    assert again == one


def test_name_and_digest_of_an_adapter_do_not_run_together() -> None:
    tokens = list(range(16))
    pairs = (Adapter("ab", "c"), Adapter("a", "bc"), Adapter("abc", ""), Adapter("", "abc"))
    keys = {prefix_keys(DIGEST, 16, tokens, KeyContext(adapter=one))[0] for one in pairs}
    salted = prefix_keys(DIGEST, 16, tokens, KeyContext(salt="abc"))[0]
    assert len(keys) == 4
    assert salted not in keys


def base_namespace() -> dict[str, Any]:
    return {
        "namespace": Namespace("m", "r", "f", "c"),
        "dtype": "bfloat16",
        "tokens_per_chunk": 16,
        "shard": Shard(tp_size=4, pp_size=2, replicas=2),
        "fingerprints": (b"1" * 32, b"2" * 32),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": Namespace("M", "r", "f", "c")},
        {"namespace": Namespace("m", "R", "f", "c")},
        {"namespace": Namespace("m", "r", "F", "c")},
        {"namespace": Namespace("m", "r", "f", "C")},
        {"namespace": Namespace("mr", "", "f", "c")},
        {"dtype": "float16"},
        {"tokens_per_chunk": 32},
        {"shard": Shard(tp_size=2, pp_size=2, replicas=2)},
        {"shard": Shard(tp_size=4, pp_size=1, replicas=2)},
        {"shard": Shard(tp_size=4, pp_size=2, replicas=1)},
        {"fingerprints": (b"1" * 32, b"3" * 32)},
        {"fingerprints": (b"2" * 32, b"1" * 32)},
        {"fingerprints": (b"1" * 32,)},
    ],
)
def test_every_field_of_a_namespace_changes_its_digest(change: dict[str, Any]) -> None:
    assert namespace_digest(**{**base_namespace(), **change}) != namespace_digest(
        **base_namespace()
    )


def test_element_types_never_share_a_namespace() -> None:
    """field case 11: bf16 and fp16; e4m3fn, e4m3fnuz and e5m2."""
    dtypes = ("bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
    digests = {namespace_digest(**{**base_namespace(), "dtype": dtype}) for dtype in dtypes}
    assert len(digests) == len(dtypes)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": Namespace("m", "r", "f", "c", alias="shown to people")},
        {"shard": Shard(tp_rank=3, tp_size=4, pp_rank=1, pp_size=2, replicas=2)},
    ],
)
def test_alias_and_rank_are_no_part_of_the_identity(change: dict[str, Any]) -> None:
    """All ranks of an engine, and engines that show another name, share their keys."""
    assert namespace_digest(**{**base_namespace(), **change}) == namespace_digest(
        **base_namespace()
    )


TEXT = st.text(max_size=3)
ITEMS = st.lists(
    st.builds(ContentItem, TEXT, st.integers(0, 12), st.integers(1, 6)), max_size=2, unique=True
)
CONTEXTS = st.builds(
    KeyContext,
    TEXT,
    st.none() | st.builds(Adapter, TEXT, TEXT),
    ITEMS.map(lambda items: tuple(sorted(items, key=lambda i: (i.start, i.length, i.digest)))),
)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(CONTEXTS, CONTEXTS, st.integers(1, 4))
def test_different_fields_never_collide(first: KeyContext, second: KeyContext, size: int) -> None:
    """Over 20 tokens every item of these overlaps, so the last keys are equal only for equals."""
    tokens = list(range(20))
    one = prefix_keys(DIGEST, size, tokens, first)[-1]
    assert (one == prefix_keys(DIGEST, size, tokens, second)[-1]) == (first == second)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(
    first: list[int], second: list[int], size: int
) -> None:
    one, other = prefix_keys(DIGEST, size, first), prefix_keys(DIGEST, size, second)
    for i in range(min(len(one), len(other))):
        assert (one[i] == other[i]) == (first[: (i + 1) * size] == second[: (i + 1) * size])


@given(TOKENS, CONTEXTS, st.integers(1, 5))
def test_keys_equal_the_reference(tokens: list[int], context: KeyContext, size: int) -> None:
    assert list(prefix_keys(DIGEST, size, tokens, context)) == reference_keys(
        DIGEST, size, tokens, context
    )


def test_chunk_sizes_never_share_a_key() -> None:
    tokens = [0] * 64
    keys = [list(prefix_keys(DIGEST, size, tokens)) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert len({key for one in keys for key in one}) == sum(map(len, keys))


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
