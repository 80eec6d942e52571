"""The block allocator: one owner a block, and nothing lost."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from kvstore_transformers.errors import OwnershipError
from kvstore_transformers.paged import BlockAllocator, CacheShape


def test_allocate_is_all_or_nothing() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(1, 3) == (0, 1, 2)
    assert allocator.allocate(2, 2) is None
    assert allocator.available() == 1
    assert allocator.allocate(2, 1) == (3,)
    allocator.check_invariants()


@pytest.mark.parametrize("blocks", [(0, 3), (0, 9), (0, 0)], ids=["foreign", "unknown", "twice"])
def test_free_of_what_isnt_owned_raises_and_frees_nothing(blocks: tuple[int, ...]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(1, 2)
    allocator.allocate(2, 2)
    with pytest.raises(OwnershipError):
        allocator.free(1, blocks)
    assert allocator.available() == 0
    allocator.check_invariants()


def test_double_free_raises() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1, 2)
    assert blocks is not None
    allocator.free(1, blocks)
    with pytest.raises(OwnershipError):
        allocator.free(1, blocks)


def test_threads_never_share_a_block() -> None:
    """field case 25: eight threads allocate, mark each of their blocks with their name, look again
    and free; no mark is ever another's, and the count of blocks stays."""
    allocator = BlockAllocator(64)
    marks = [0] * 64
    strangers: list[tuple[int, int]] = []

    def work(owner: int) -> None:
        chance = random.Random(owner)
        for _ in range(400):
            blocks = allocator.allocate(owner, chance.randint(1, 12))
            if blocks is None:
                continue
            for block in blocks:
                marks[block] = owner
            strangers.extend((owner, marks[block]) for block in blocks if marks[block] != owner)
            allocator.free(owner, blocks)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strangers == []
    assert allocator.available() == 64
    allocator.check_invariants()


def test_layout_describes_the_tensor() -> None:
    """Spans cover the memory once, in the order of the tensor; rows name K, V and their strides."""
    shape = CacheShape(3, 2, 8, torch.bfloat16, 16, 5)
    layout = shape.layout(64)
    layout.validate(shape.memory_bytes())
    spans = layout.groups[0].tensors
    assert [span.offset_bytes for span in spans] == [
        n * 5 * shape.block_bytes() for n in range(3 * 2)
    ]
    assert spans[-1].end_bytes() == shape.memory_bytes()
    assert layout.dtype == "bfloat16"
    rows = spans[3].rows
    assert rows is not None
    assert (rows.content, rows.heads, rows.head_dim, rows.token_stride_bytes) == ("v", 2, 8, 32)
