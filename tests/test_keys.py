"""Chunk keys: pinned values, and everything that must or must not change a key."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.keys import (
    HASH_ALGORITHM,
    PROBE_TOKENS,
    Adapter,
    ContentItem,
    KeyContext,
    Namespace,
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
