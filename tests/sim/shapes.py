"""Shapes: the engines, layouts and limits that a world may have, all tiny."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvstore.core.keys import Adapter, ContentItem, KeyContext, Namespace
from kvstore.core.layout import LayerGroup, Layout, Shard, TensorSpan
from kvstore.core.limits import Limits, TierLimits

TOKENS_PER_CHUNK = 4
BLOCKS = 112
"""Blocks of each group in an engine's memory."""
HOST_SLAB_BYTES = 16_384
NVME_SLAB_BYTES = 49_152


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine: whose it is, what it serves, and the memory layout of each of its ranks."""

    engine: str
    tenant: str
    namespace: Namespace
    layout: Layout
    shards: tuple[Shard, ...]


def layout(*groups: tuple[str, int, int | None, int]) -> Layout:
    """A layout of (name, tokens per block, window, bytes a block) with one tensor a group."""
    made, offset = [], 0
    for name, tokens, window, size in groups:
        made.append(LayerGroup(name, tokens, window, (TensorSpan(offset, size, size, BLOCKS),)))
        offset += BLOCKS * size
    return Layout("bfloat16", TOKENS_PER_CHUNK, tuple(made))


LAYOUTS: dict[str, Layout] = {
    "small": layout(("full", 2, None, 1000)),
    "large": layout(("full", 2, None, 3000)),
    "hybrid": layout(("full", 2, None, 1000), ("swa", 2, 6, 500)),
    "hybrid-narrow": layout(("swa", 4, 2, 100), ("full", 1, None, 1500)),
    "hybrid-wide": layout(("full", 2, None, 2500), ("swa", 1, 10, 900), ("local", 2, 3, 300)),
    "windows": layout(("a", 2, 6, 700), ("b", 4, 3, 900)),
    "groups": layout(("main", 4, None, 3000), ("index", 2, None, 600), ("state", 1, None, 50)),
}
RANKS: dict[str, tuple[Shard, ...]] = {
    "one": (Shard(),),
    "two": tuple(Shard(tp_rank=i, tp_size=2) for i in range(2)),
    "replicas": tuple(Shard(tp_rank=i, tp_size=2, replicas=2) for i in range(2)),
    "four": tuple(
        Shard(tp_rank=t, tp_size=2, pp_rank=p, pp_size=2) for p in range(2) for t in range(2)
    ),
    "four-replicas": tuple(Shard(tp_rank=i, tp_size=4, replicas=2) for i in range(4)),
}
TENANTS = ("blue", "red")
CONTEXTS = (
    KeyContext(),
    KeyContext(adapter=Adapter("lora", "1")),
    KeyContext(adapter=Adapter("lora", "2")),
    KeyContext(salt="user"),
    KeyContext(items=(ContentItem("image", 5, 6),)),
)


def namespace(model: str) -> Namespace:
    """The namespace of a model, whose alias differs from its name."""
    return Namespace(model, "r0", "sim", alias=f"{model}-alias")


def draw_engines(rng: random.Random) -> list[EngineShape]:
    """One to three models, each served by one or two engines of either tenant."""
    shapes = []
    for number, name in enumerate(rng.sample(list(LAYOUTS), rng.choice((1, 1, 2, 2, 3)))):
        ranks = RANKS[rng.choice(list(RANKS))]
        for copy in range(rng.choice((1, 1, 2))):
            tenant = rng.choice(TENANTS)
            shapes.append(
                EngineShape(f"e{number}{copy}", tenant, namespace(name), LAYOUTS[name], ranks)
            )
    return shapes


def draw_limits(rng: random.Random, roomy: bool) -> Limits:
    """Limits of one world; a roomy one never has to evict."""
    nvme = TierLimits(rng.randint(2, 9), NVME_SLAB_BYTES) if rng.random() < 0.75 else None
    if roomy and nvme is not None:
        nvme = TierLimits(400, NVME_SLAB_BYTES)
    return Limits(
        host=TierLimits(400 if roomy else rng.choice((1, 2, 3, 5, 8)), HOST_SLAB_BYTES),
        nvme=nvme,
        staging_slots=rng.randint(1, 3),
        lease_s=rng.choice((0.2, 5.0, 60.0)),
        session_bytes_max=1 << 30 if roomy else rng.choice((20_000, 1 << 30)),
        copy_depth=rng.randint(1, 4),
        read_depth=rng.randint(1, 4),
        write_depth=rng.randint(1, 3),
        answer_first_s=rng.choice((0.0, 0.001)),
        write_backlog_max=rng.choice((2, 16, 65_536)),
        write_budget_bytes_s=rng.choice((0, 0, 0, 3000)),
        write_burst_s=rng.choice((2.0, 10.0)),
        admit_after=rng.choice((1, 1, 2)),
        sweep_entries=rng.choice((1, 3, 500)),
        leases_max=rng.choice((3, 65_536, 65_536)),
        sessions_max=rng.choice((6, 1024, 1024)),
        nvme_retry_s=rng.choice((0.1, 30.0)),
    )
