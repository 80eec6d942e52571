"""What the connector's layout says of kinds of KV cache: run by tests with an environment's Python.

Prints one line a kind: its groups' windows, or why it is refused.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from kvstore_vllm.layout import describe, group_shapes, tokens_per_chunk
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore import LayoutMismatchError

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
PAGE = 16 * 2 * 2 * 8 * 4
BLOCKS = 4


def config(*specs: KVCacheSpec, drafts: bool = False, transfer: bool = True) -> KVCacheConfig:
    """A configuration of one layer a group, each with a span of its own."""
    groups = [
        KVCacheGroupSpec([f"layer{n}"], spec, drafts, enable_kv_transfer=transfer)
        for n, spec in enumerate(specs)
    ]
    size = len(specs) * BLOCKS * PAGE
    tensors = [
        KVCacheTensor(size, [f"layer{n}"], BLOCKS * PAGE, PAGE, n * BLOCKS * PAGE)
        for n in range(len(specs))
    ]
    return KVCacheConfig(BLOCKS, tensors, groups)


def judge(name: str, found: KVCacheConfig) -> None:
    """Print what is said of one."""
    try:
        print(f"{name}: {[(g.tokens_per_block, g.window) for g in group_shapes(found)]}")
    except LayoutMismatchError as error:
        print(f"{name}: {error}")


def judge_views(name: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
    """Print what is said of a layer whose view is so."""
    found = config(FullAttentionSpec(**SIZES))
    memory = torch.zeros(2 * BLOCKS * PAGE)
    view = torch.as_strided(memory, shape, stride, offset)
    try:
        layout = describe(found, {"layer0": view}, memory.data_ptr(), tokens_per_chunk(
            group_shapes(found), 0))  # fmt: skip
        print(f"{name}: {layout.groups[0].tensors[0]}")
    except LayoutMismatchError as error:
        print(f"{name}: {error}")


def main() -> None:
    """Print all."""
    full, window = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=64)
    judge("hybrid", config(full, window))
    judge("drafts", config(full, drafts=True))
    judge("quantised", config(replace(full, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)))
    judge("ephemeral", config(full, transfer=False))
    judge("recurrent", config(full, MambaSpec(16, shapes=((2, 2),), dtypes=(torch.float32,))))
    judge("local", config(ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)))
    judge("none", KVCacheConfig(BLOCKS, [], []))
    row = PAGE // 4
    judge_views("as described", (BLOCKS, 2, 16, 16), (row, 256, 16, 1), 0)
    judge_views("split in two", (2 * BLOCKS, 2, 8, 16), (row // 2, 128, 16, 1), 0)
    judge_views("elsewhere", (BLOCKS, 2, 16, 16), (row, 256, 16, 1), 16)
    judge_views("closer", (BLOCKS, 2, 16, 16), (row // 2, BLOCKS * row // 2, 16, 1), 0)
    judge_views("heads apart", (BLOCKS, 2, 16, 16), (row, BLOCKS * row, 16, 1), 0)


if __name__ == "__main__":
    main()
