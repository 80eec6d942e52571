"""What the daemon is told of vLLM's KV memory: groups, and where each layer keeps its blocks.

vLLM places all layers in one allocation: layer *l* of a KVCacheTensor keeps block *b* at ``offset +
l * layer_stride + b * block_stride``. That is taken from vLLM's own description and checked against
the views that the attention layers really use. What is inside a block stays opaque. Every kind of
cache that isn't known here is refused with its name: a wrong guess would be wrong bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore import LayerGroup, Layout, LayoutMismatchError, TensorSpan
from kvstore_vllm.drafts import Drafting

CHUNK_TOKENS = 128
"""The chunk size to start from: small enough that little of a prompt's tail is recomputed."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group as both sides see it; ``window`` is None where every token is kept."""

    name: str
    tokens_per_block: int
    window: int | None


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the scheduler's side knows of an engine: its KV cache groups, the tokens of a chunk, its
    ranks, and its speculative decoding."""

    groups: tuple[GroupShape, ...]
    chunk: int
    ranks: int
    drafting: Drafting

    def retreat(self) -> int:
        """Tokens at the end of a hit that vLLM has to compute, since a drafter's KV of them was
        drafted for other tokens: one block of each group. Where windows are only whole at the end
        of a chunk, that is a chunk."""
        if not self.drafting.reads_ahead:
            return 0
        if any(group.window is not None for group in self.groups):
            return self.chunk
        return math.lcm(*(group.tokens_per_block for group in self.groups))


def group_shapes(config: KVCacheConfig) -> tuple[GroupShape, ...]:
    """The groups, in vLLM's order; raises LayoutMismatchError for one that isn't known."""
    if not config.kv_cache_groups:
        raise LayoutMismatchError("layout: the model has no KV cache")
    return tuple(
        _group_shape(number, group, _kind(group.kv_cache_spec))
        for number, group in enumerate(config.kv_cache_groups)
    )


def tokens_per_chunk(groups: tuple[GroupShape, ...], wanted: int) -> int:
    """``wanted``, or the smallest multiple of all block sizes from CHUNK_TOKENS on."""
    common = math.lcm(*(group.tokens_per_block for group in groups))
    if not wanted:
        return -(-CHUNK_TOKENS // common) * common
    if wanted % common:
        raise LayoutMismatchError(
            f"tokens_per_chunk={wanted}; valid are multiples of {common}, as the blocks are"
        )
    return wanted


def describe(
    config: KVCacheConfig, views: Mapping[str, torch.Tensor], base: int, chunk: int
) -> Layout:
    """The layout of the allocation at address ``base``; raises LayoutMismatchError, in one line,
    where vLLM's description and the layers' views differ or something isn't known."""
    shapes = group_shapes(config)
    tensors = {name: (tensor, place) for tensor in config.kv_cache_tensors
               for place, name in enumerate(tensor.layers)}  # fmt: skip
    dtypes: set[str] = set()
    groups = []
    for shape, group in zip(shapes, config.kv_cache_groups, strict=True):
        spans: dict[int, TensorSpan] = {}
        if not group.layer_names:
            raise LayoutMismatchError(
                f"layout: this pipeline stage has no layer of KV cache group {shape.name}; use a "
                "split in which each stage has layers of every kind"
            )
        own = [name for name in group.layer_names if name in tensors]
        for name in own:
            if name not in views:
                raise LayoutMismatchError(f"layout: vLLM shows no KV tensor of layer {name}")
            tensor, place = tensors[name]
            spec = _layer_spec(group.kv_cache_spec, name)
            blocks = config.num_blocks_of(tensor)
            span = _span(spec, tensor, place, blocks)
            _check_view(name, views[name], span, base)
            spans[span.offset_bytes] = span
            dtypes.add(str(views[name].dtype).removeprefix("torch."))
        for name in set(group.layer_names) - set(own):
            _check_shared(name, views, spans, base)
        groups.append(
            LayerGroup(shape.name, shape.tokens_per_block, shape.window, tuple(spans.values()))
        )
    if len(dtypes) != 1:
        raise LayoutMismatchError(f"layout: KV of several element types: {sorted(dtypes)}")
    return Layout(dtypes.pop(), chunk, tuple(groups))


def _kind(spec: KVCacheSpec) -> KVCacheSpec:
    """What stands for all layers of a group."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    kinds = {type(layer) for layer in spec.kv_cache_specs.values()}
    if len(kinds) > 1:
        raise LayoutMismatchError(
            f"layout: a group of several kinds: {sorted(kind.__name__ for kind in kinds)}"
        )
    return spec.first_spec


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _group_shape(number: int, group: KVCacheGroupSpec, spec: KVCacheSpec) -> GroupShape:
    """Exact types: a subclass may mean something else by its blocks."""
    where = f"layout: KV cache group {number}"
    ordinary = group.enable_kv_transfer and group.role is KVCacheGroupRole.DEFAULT
    if group.host_resident or not ordinary:
        raise LayoutMismatchError(f"{where} is part of a hierarchical cache of vLLM's own")
    full = type(spec) in (FullAttentionSpec, MLAAttentionSpec)
    window = type(spec) is SlidingWindowSpec
    if not full and not window:
        raise LayoutMismatchError(
            f"{where} is {type(spec).__name__}; supported are full attention, MLA and sliding "
            "window, all causal"
        )
    if spec.tokens_per_state != 1:
        raise LayoutMismatchError(f"{where} keeps one state of {spec.tokens_per_state} tokens")
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        raise LayoutMismatchError(f"{where} is quantised ({spec.kv_quant_mode.name}); not tried")
    if window and spec.extra_retained_tokens:
        raise LayoutMismatchError(f"{where} keeps tokens beyond its window")
    if window:
        return GroupShape(f"window{number}", spec.block_size, spec.sliding_window)
    drafts = isinstance(spec, MLAAttentionSpec) and spec.non_causal_multi_token_decode
    if spec.non_causal or drafts or spec.attention_chunk_size is not None:
        raise LayoutMismatchError(f"{where} isn't plain causal attention")
    return GroupShape(f"full{number}", spec.block_size, None)


def _span(spec: KVCacheSpec, tensor: KVCacheTensor, place: int, blocks: int) -> TensorSpan:
    return TensorSpan(
        offset_bytes=tensor.offset + place * tensor.layer_stride,
        block_stride_bytes=tensor.block_stride,
        block_bytes=spec.page_size_bytes,
        num_blocks=blocks,
    )


def _check_shared(
    name: str, views: Mapping[str, torch.Tensor], spans: Mapping[int, TensorSpan], base: int
) -> None:
    """A layer without a tensor of its own must use another one's of its group."""
    if name in views and views[name].data_ptr() - base not in spans:
        raise LayoutMismatchError(f"layout: layer {name} has no KV tensor that vLLM describes")


def _check_view(name: str, view: torch.Tensor, span: TensorSpan, base: int) -> None:
    """The view [blocks, heads, states, content] must be the span, cut at block boundaries."""
    size = view.element_size()
    pieces, rest = divmod(view.shape[0], span.num_blocks)
    inner = sum((n - 1) * s for n, s in zip(view.shape[1:], view.stride()[1:], strict=True)) + 1
    stride = view.stride(0) * size
    where = f"layout: layer {name}"
    if view.data_ptr() - base != span.offset_bytes:
        raise LayoutMismatchError(
            f"{where} is at byte {view.data_ptr() - base} of the allocation, "
            f"not at {span.offset_bytes} as described"
        )
    if rest or pieces < 1 or stride * pieces != span.block_stride_bytes:
        raise LayoutMismatchError(
            f"{where} has {view.shape[0]} blocks {stride} bytes apart, "
            f"not {span.num_blocks} blocks {span.block_stride_bytes} apart as described"
        )
    used = (pieces - 1) * stride + inner * size
    if used > span.block_bytes:
        raise LayoutMismatchError(
            f"{where} spreads a block over {used} bytes, not {span.block_bytes} as described"
        )
