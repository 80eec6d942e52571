"""Which layouts are refused, and with which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import LayoutMismatchError
from kvstore.core.layout import (
    DTYPES,
    GROUPS_MAX,
    NULL_BLOCK,
    TENSORS_MAX,
    TOKENS_PER_CHUNK_MAX,
    LayerGroup,
    Layout,
    Shard,
    TensorSpan,
)
from tests.test_layout import group, layout, span


def refusal(bad: Layout, memory_bytes: int = 1 << 20) -> str:
    """The one line that a person gets."""
    with pytest.raises(LayoutMismatchError) as caught:
        bad.validate(memory_bytes)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- refusals


def test_group_of_544_tokens_is_negotiated_to_a_multiple_or_refused_with_the_valid_sizes() -> None:
    """field case 35: a hybrid model whose second group has 544 tokens a block."""
    groups = (group("full", 16, span(0, 8)), group("swa", 544, span(100, 8), window=1024))
    message = refusal(layout(*groups, chunk=256))
    assert "tokens_per_chunk=256" in message
    assert "full=16" in message
    assert "swa=544" in message
    assert "multiples of 544 up to 65536" in message
    layout(*groups, chunk=1088).validate(1000)


@pytest.mark.parametrize("chunk", [0, -64, 24, TOKENS_PER_CHUNK_MAX * 2])
def test_a_chunk_is_a_multiple_of_every_block_within_the_limit(chunk: int) -> None:
    groups = (group("a", 16, span(0, 8)), group("b", 12, span(100, 8)))
    assert "multiples of 48 up to 65536" in refusal(layout(*groups, chunk=chunk))


def test_block_sizes_without_a_usable_common_chunk_are_refused() -> None:
    groups = (group("a", 251, span(0, 8)), group("b", 509, span(100, 8)))
    message = refusal(layout(*groups, chunk=251))
    assert "none up to 65536" in message
    assert "a=251, b=509" in message


@pytest.mark.parametrize("chunk", [16, TOKENS_PER_CHUNK_MAX])
def test_the_smallest_and_the_largest_chunk_are_accepted(chunk: int) -> None:
    layout(group("a", 16, span(0, 8)), chunk=chunk).validate(1000)


def test_an_unknown_element_type_is_refused_with_the_known_ones() -> None:
    message = refusal(layout(group("a", 16, span(0, 8)), dtype="bf16"))
    assert "'bf16'" in message
    for dtype in DTYPES:
        assert dtype in message


def test_a_name_without_end_is_not_repeated_in_full() -> None:
    """A peer sends 70,000 characters for the element type; the answer and the log are short."""
    bad = replace(layout(group("a", 16, span(0, 8))), dtype="y" * 70_000)
    assert len(refusal(bad)) < 1000


def test_the_number_of_groups_is_limited() -> None:
    assert f"valid are 1..{GROUPS_MAX}" in refusal(layout())
    many = [group(f"g{i}", 16, span(i * 100, 8)) for i in range(GROUPS_MAX + 1)]
    assert f"{GROUPS_MAX + 1} groups" in refusal(layout(*many))
    layout(*many[:-1]).validate(1 << 20)


@pytest.mark.parametrize("names", [("a", "a"), ("", "b")])
def test_group_names_are_distinct_and_not_empty(names: tuple[str, str]) -> None:
    groups = [group(name, 16, span(i * 100, 8)) for i, name in enumerate(names)]
    assert "distinct and not empty" in refusal(layout(*groups))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (group("a", 0, span(0, 8)), "tokens_per_block=0; valid is 1 or more"),
        (group("a", -16, span(0, 8)), "tokens_per_block=-16"),
        (group("a", 16, span(0, 8), window=0), "window=0; valid is None or 1 or more"),
        (group("a", 16), f"0 tensors; valid are 1..{TENSORS_MAX}"),
        (group("a", 16, span(-8, 8)), "offset_bytes=-8"),
        (group("a", 16, span(0, 0)), "block_bytes=0"),
        (group("a", 16, span(0, 8, count=0)), "num_blocks=0"),
        (group("a", 16, span(0, 8, stride=4)), "block_stride_bytes=4 is less than block_bytes=8"),
        (group("a", 16, span(0, 1, count=NULL_BLOCK)), "valid is less than 2^32-1"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_malformed_groups_are_refused_naming_field_and_value(bad: LayerGroup, words: str) -> None:
    message = refusal(layout(bad), memory_bytes=1 << 40)
    assert "group 'a'" in message
    assert words in message


def test_a_tensor_behind_the_end_of_the_memory_is_refused() -> None:
    one = layout(group("a", 16, span(100, 8, count=4, stride=10)))
    one.validate(138)
    message = refusal(one, memory_bytes=137)
    assert "ends at 138" in message
    assert "137 bytes" in message


def test_aliased_tensors_are_refused() -> None:
    """Layers that share KV register it once; the same span twice would store it twice."""
    message = refusal(layout(group("a", 16, span(0, 8), span(0, 8))))
    assert "overlap" in message
    assert "register memory that several layers share once" in message


def test_groups_may_overlay_each_other() -> None:
    """Engines with several block tables take all blocks from one pool of IDs: full and sliding
    layers then lie on the same bytes, and an ID belongs to one group at a time."""
    layout(group("a", 16, span(0, 8)), group("b", 16, span(0, 8))).validate(1 << 20)


def test_block_major_tensors_may_interleave() -> None:
    """Every layer's block side by side: one stride, disjoint places within it."""
    tensors = [span(i * 16, 16, count=10, stride=64) for i in range(4)]
    layout(group("a", 16, *tensors)).validate(640)
    moved = [*tensors[:3], span(47, 16, count=10, stride=64)]
    assert "overlap" in refusal(layout(group("a", 16, *moved)))


def test_a_span_that_starts_a_few_strides_later_may_interleave_too() -> None:
    first, second = span(0, 16, count=10, stride=64), span(64 * 3 + 16, 48, count=10, stride=64)
    layout(group("a", 16, first, second)).validate(1 << 20)
    assert "overlap" in refusal(layout(group("a", 16, first, span(64 * 3 + 17, 48, 10, 64))))


def test_a_block_that_wraps_into_the_next_stride_is_refused() -> None:
    first, second = span(0, 8, count=4, stride=16), span(8, 9, count=4, stride=16)
    assert "overlap" in refusal(layout(group("a", 16, first, second)))


def test_single_blocks_need_no_stride() -> None:
    """A span of one block has nothing to stride over, so a stride of 0 says all there is to
    say."""
    first, second = span(0, 16, count=1, stride=0), span(16, 16, count=1, stride=0)
    layout(group("a", 16, first, second)).validate(32)
    overlapping = span(8, 16, count=1, stride=0)
    assert "overlap" in refusal(layout(group("a", 16, first, overlapping)))


SPANS = st.tuples(
    st.integers(0, 60), st.integers(1, 12), st.integers(1, 6), st.integers(0, 20)
).map(lambda v: span(v[0], v[1], v[2], v[1] + v[3]))
SPANS_OF_ONE_STRIDE = st.tuples(st.integers(0, 90), st.integers(1, 12), st.integers(1, 5)).map(
    lambda v: span(v[0], v[1], v[2], 24)
)


def shares_a_byte(spans: list[TensorSpan]) -> bool:
    """Found by counting every byte."""
    used: set[int] = set()
    total = 0
    for one in spans:
        for block in range(one.num_blocks):
            start = one.offset_bytes + block * one.block_stride_bytes
            used.update(range(start, start + one.block_bytes))
            total += one.block_bytes
    return len(used) < total


@given(st.lists(SPANS_OF_ONE_STRIDE, min_size=1, max_size=4))
def test_spans_of_one_stride_are_refused_exactly_when_they_share_a_byte(
    spans: list[TensorSpan],
) -> None:
    made = layout(group("a", 16, *spans))
    if shares_a_byte(spans):
        assert "overlap" in refusal(made)
    else:
        made.validate(1 << 20)


@given(st.lists(SPANS, min_size=1, max_size=4))
def test_spans_that_share_a_byte_are_refused_whatever_their_strides(
    spans: list[TensorSpan],
) -> None:
    """Those that interleave with different strides may be refused without sharing one."""
    made = layout(group("a", 16, *spans))
    if shares_a_byte(spans):
        assert "overlap" in refusal(made)


@given(st.lists(SPANS, min_size=2, max_size=2))
def test_two_spans_one_behind_the_other_are_accepted(spans: list[TensorSpan]) -> None:
    first, second = spans
    behind = TensorSpan(
        first.end_bytes() + second.offset_bytes,
        second.block_stride_bytes,
        second.block_bytes,
        second.num_blocks,
    )
    layout(group("a", 16, behind, first)).validate(1 << 20)


# ---------------------------------------------------------------- shards


def test_replicas_share_an_index_and_not_a_rank() -> None:
    shards = [Shard(tp_rank=r, tp_size=4, replicas=2) for r in range(4)]
    assert [shard.index() for shard in shards] == [0, 0, 1, 1]
    assert [shard.rank() for shard in shards] == [0, 1, 2, 3]
    assert {shard.count() for shard in shards} == {2}
    assert {shard.ranks() for shard in shards} == {4}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_indices_and_ranks_are_complete(per: int, replicas: int, stages: int) -> None:
    size = per * replicas
    shards = [
        Shard(tp_rank=t, tp_size=size, pp_rank=p, pp_size=stages, replicas=replicas)
        for p in range(stages)
        for t in range(size)
    ]
    for shard in shards:
        shard.validate()
    assert {shard.index() for shard in shards} == set(range(shards[0].count()))
    assert {shard.rank() for shard in shards} == set(range(shards[0].ranks()))


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (Shard(tp_rank=2, tp_size=2), "tp_rank=2 of tp_size=2; valid ranks are 0..tp_size-1"),
        (Shard(tp_rank=-1, tp_size=2), "tp_rank=-1"),
        (Shard(tp_size=0), "tp_size=0"),
        (Shard(pp_rank=1, pp_size=1), "pp_rank=1 of pp_size=1; valid ranks are 0..pp_size-1"),
        (Shard(tp_size=4, replicas=3), "replicas=3 doesn't divide tp_size=4"),
        (Shard(tp_size=4, replicas=0), "replicas=0"),
        (Shard(nodes=2), "nodes=2; this version serves engines on one node only"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_impossible_shards_are_refused_in_one_line(shard: Shard, words: str) -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        shard.validate()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
