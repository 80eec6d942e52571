"""Layouts: what is refused and with which words, how chunks are cut, and what a fingerprint
covers."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.layout import (
    DTYPES,
    LayerGroup,
    Layout,
    Part,
    TensorSpan,
    TokenRows,
)
from tests.test_canonical import reference_bytes

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())


def span(offset: int, size: int, count: int = 4, stride: int | None = None) -> TensorSpan:
    return TensorSpan(offset, size if stride is None else stride, size, count)


def group(name: str, tokens: int, *tensors: TensorSpan, window: int | None = None) -> LayerGroup:
    return LayerGroup(name, tokens, window, tensors)


def layout(*groups: LayerGroup, chunk: int = 64, dtype: str = "bfloat16") -> Layout:
    return Layout(dtype, chunk, groups)


def reference_fingerprint(dtype: str, chunk: int, groups: list[dict[str, Any]]) -> bytes:
    """The fingerprint as documented, written a second time."""
    fields: list[tuple[str, str | int | bytes]] = [("dtype", dtype), ("tokens_per_chunk", chunk)]
    for one in groups:
        fields += [("tokens_per_block", one["tokens_per_block"]), ("window", one["window"] or 0)]
        fields += [("block_bytes", size) for size in one["block_bytes"]]
        fields.append(("tensors", len(one["block_bytes"])))
    return hashlib.sha256(reference_bytes("kvstore/layout/v1", *fields)).digest()


def layout_of(case: dict[str, Any]) -> Layout:
    """A layout with the golden case's sizes, its tensors one behind the other."""
    groups, offset = [], 0
    for number, one in enumerate(case["groups"]):
        tensors = []
        for size in one["block_bytes"]:
            tensors.append(span(offset, size))
            offset += 4 * size
        groups.append(group(f"g{number}", one["tokens_per_block"], *tensors, window=one["window"]))
    return Layout(case["dtype"], case["tokens_per_chunk"], tuple(groups))


# ---------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("case", GOLDEN["layouts"], ids=lambda case: case["name"])
def test_pinned_fingerprints_never_change(case: dict[str, Any]) -> None:
    made = layout_of(case)
    made.validate(1 << 30)
    assert made.fingerprint().hex() == case["fingerprint"]
    again = reference_fingerprint(case["dtype"], case["tokens_per_chunk"], case["groups"])
    assert again.hex() == case["fingerprint"]


SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=3)
GROUPS = st.lists(
    st.tuples(st.sampled_from([1, 4, 16, 32]), st.sampled_from([None, 8, 128]), SIZES),
    min_size=1,
    max_size=3,
)


def placed(shape: list[tuple[int, int | None, list[int]]], draw: st.DataObject) -> Layout:
    """The same packing somewhere else: other offsets, strides, counts, names and rows."""
    groups, offset = [], 0
    for number, (tokens, window, sizes) in enumerate(shape):
        tensors = []
        for size in sizes:
            offset += draw.draw(st.integers(0, 100))
            stride = size + draw.draw(st.integers(0, 32))
            count = draw.draw(st.integers(1, 9))
            rows = draw.draw(st.sampled_from([None, TokenRows("kv", 2, 4, 16)]))
            tensors.append(TensorSpan(offset, stride, size, count, rows))
            offset = tensors[-1].end_bytes()
        name = draw.draw(st.sampled_from("abc")) + str(number)
        groups.append(LayerGroup(name, tokens, window, tuple(tensors)))
    return Layout("bfloat16", 64, tuple(groups))


@given(GROUPS, st.data())
def test_another_memory_size_still_hits(
    shape: list[tuple[int, int | None, list[int]]], data: st.DataObject
) -> None:
    """Offsets, strides and counts say where bytes lie, never what they are."""
    first, second = placed(shape, data), placed(shape, data)
    for one in (first, second):
        one.validate(1 << 20)
    assert first.fingerprint() == second.fingerprint()


@given(GROUPS, GROUPS, st.data())
def test_another_packing_never_hits(
    first: list[tuple[int, int | None, list[int]]],
    second: list[tuple[int, int | None, list[int]]],
    data: st.DataObject,
) -> None:
    same = first == second
    assert (placed(first, data).fingerprint() == placed(second, data).fingerprint()) == same


def test_a_border_moved_between_groups_or_tensors_changes_the_fingerprint() -> None:
    tensors = (span(0, 8), span(100, 8), span(200, 16))
    shapes = [
        (group("a", 16, *tensors),),
        (group("a", 16, *tensors[:2]), group("b", 16, *tensors[2:])),
        (group("a", 16, *tensors[:1]), group("b", 16, *tensors[1:])),
        (group("a", 16, tensors[2], *tensors[:2]),),
        (group("a", 16, span(0, 16), span(200, 16)),),
    ]
    prints = {layout(*shape).fingerprint() for shape in shapes}
    assert len(prints) == len(shapes)


def test_each_element_type_has_a_fingerprint_of_its_own() -> None:
    """field case 11: bf16 and fp16, and e4m3fn, e4m3fnuz and e5m2, never share a chunk."""
    prints = {layout(group("a", 16, span(0, 8)), dtype=d).fingerprint() for d in DTYPES}
    assert len(prints) == len(DTYPES)


def test_element_type_codes_stand_in_headers_and_never_change() -> None:
    assert list(DTYPES.values()) == list(range(1, len(DTYPES) + 1))
    assert [DTYPES[d] for d in ("float32", "bfloat16", "float8_e4m3fnuz", "int4x2")] == [1, 3, 5, 9]


# ---------------------------------------------------------------- sizes


def test_sizes_come_from_the_registered_block_bytes_only() -> None:
    """field case 32: MHA, MLA and MLA with an index of 132 bytes a token, each with padded
    strides."""
    mha = group("mha", 8, span(0, 2 * 8 * 8 * 128, stride=20_000))
    mla = group("mla", 8, span(100_000, 8 * 576, stride=8192))
    index = group("index", 8, span(200_000, 8 * 132, stride=2048))
    for groups in ((mha,), (mla,), (mla, index), (mha, mla, index)):
        made = layout(*groups)
        made.validate(1 << 20)
        sizes = [one.tensors[0].block_bytes for one in groups]
        assert made.part_bytes(Part.FULL) == sum(64 // 8 * size for size in sizes)
        assert made.part_bytes(Part.WINDOW) == 0


def test_groups_of_16_4_and_1_tokens_a_block_share_one_chunk() -> None:
    made = layout(
        group("main", 16, span(0, 160)),
        group("index", 4, span(1000, 24)),
        group("state", 1, span(2000, 3, count=64)),
    )
    made.validate(4096)
    assert [made.blocks_per_chunk(i) for i in range(3)] == [4, 16, 64]
    assert made.part_bytes(Part.FULL) == 4 * 160 + 16 * 24 + 64 * 3


def test_parts_split_groups_by_window() -> None:
    made = layout(
        group("swa", 16, span(0, 8), window=128),
        group("full", 16, span(100, 16)),
        group("chunked", 16, span(200, 32), window=64),
    )
    assert made.part_groups(Part.FULL) == (1,)
    assert made.part_groups(Part.WINDOW) == (0, 2)
    assert made.part_bytes(Part.FULL) == 4 * 16
    assert made.part_bytes(Part.WINDOW) == 4 * (8 + 32)


def test_a_model_of_windows_only_keeps_every_token() -> None:
    made = layout(group("a", 16, span(0, 8), window=128), group("b", 16, span(100, 8), window=32))
    made.validate(1000)
    assert made.part_groups(Part.FULL) == (0, 1)
    assert made.part_groups(Part.WINDOW) == ()
    assert made.part_bytes(Part.FULL) == 4 * 16
    assert made.part_bytes(Part.WINDOW) == 0
    assert made.window_chunks() == 0


@pytest.mark.parametrize(
    ("window", "chunks"), [(1, 0), (2, 1), (65, 1), (66, 2), (128, 2), (129, 2), (130, 3)]
)
def test_window_chunks_reach_back_one_less_than_the_window(window: int, chunks: int) -> None:
    """field case 35: the last token of a hit sees itself and window - 1 tokens before it."""
    made = layout(group("full", 16, span(0, 8)), group("swa", 16, span(100, 8), window=window))
    assert made.window_chunks() == chunks


def test_the_widest_window_decides() -> None:
    made = layout(
        group("full", 16, span(0, 8)),
        group("narrow", 16, span(100, 8), window=32),
        group("wide", 16, span(200, 8), window=200),
    )
    assert made.window_chunks() == math.ceil(199 / 64)


def test_a_group_has_the_blocks_that_each_of_its_tensors_has() -> None:
    assert group("a", 16, span(0, 8, count=7), span(100, 8, count=5)).num_blocks() == 5


def test_validation_changes_nothing() -> None:
    made = layout(group("a", 16, span(0, 8)))
    before = made.fingerprint()
    made.validate(1000)
    assert made.fingerprint() == before
    assert replace(made) == made
