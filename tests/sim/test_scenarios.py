"""Scenarios of identity and isolation through the whole core, with fake hands and real bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from kvstore.core.keys import Adapter, ContentItem, KeyContext
from kvstore.core.layout import Shard
from kvstore.core.limits import TierLimits
from kvstore.core.messages import Cancel, Lookup, LookupReply, Retrieve, Store
from tests.sim.inside import check_inside
from tests.sim.script import ROOMY, Script
from tests.sim.shapes import (
    HOST_SLAB_BYTES,
    LAYOUTS,
    NVME_SLAB_BYTES,
    RANKS,
    TOKENS_PER_CHUNK,
    EngineShape,
    namespace,
)

TOKENS = list(range(6 * TOKENS_PER_CHUNK))


def shape(engine: str = "e", tenant: str = "blue", layout: str = "small") -> EngineShape:
    return EngineShape(engine, tenant, namespace("model"), LAYOUTS[layout], RANKS["one"])


def test_a_tenant_finds_its_own_chunks_and_no_other_tenants() -> None:
    """field case 125: same prompt, same namespace; the keys are equal, the chunks aren't shared."""
    script = Script()
    [first] = script.engine(shape("e1"))
    [second] = script.engine(shape("e2"))
    [other] = script.engine(shape("e1", tenant="red"))
    keys = script.keys(first, TOKENS)
    assert keys == script.keys(other, TOKENS)
    assert script.store(first, keys) == "111111"
    assert script.lookup(second, keys) == 6
    assert script.lookup(other, keys) == 0
    assert script.retrieve(other, keys) == "000000"
    assert script.retrieve(second, keys) == "111111"
    assert script.store(other, keys) == "111111"
    assert script.retrieve(other, keys) == "111111"


def test_an_image_is_part_of_what_is_found() -> None:
    """field case 4: images A and B share their placeholder tokens from chunk 2 on."""
    script = Script()
    [view] = script.engine(shape())
    start = 2 * TOKENS_PER_CHUNK + 1
    first, second = (
        script.keys(view, TOKENS, KeyContext(items=(ContentItem(digest, start, 6),)))
        for digest in "AB"
    )
    assert script.store(view, first) == "111111"
    assert script.lookup(view, second) == 2
    assert script.lookup(view, first) == 6
    assert script.retrieve(view, second) == "110000"


def test_an_adapter_is_part_of_what_is_found() -> None:
    """field case 7 and 8: another adapter, another digest of the same name, and the base model
    find nothing; another engine with the same name and digest does."""
    script = Script()
    [one] = script.engine(shape("e1"))
    [two] = script.engine(shape("e2"))
    context = KeyContext(adapter=Adapter("lora", "1"))
    assert script.store(one, script.keys(one, TOKENS, context)) == "111111"
    for other in (Adapter("other", "1"), Adapter("lora", "2"), None):
        assert script.lookup(two, script.keys(two, TOKENS, KeyContext(adapter=other))) == 0
    assert script.lookup(two, script.keys(two, TOKENS, context)) == 6


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float16"),
        ("float8_e4m3fn", "float8_e4m3fnuz"),
        ("float8_e4m3fn", "float8_e5m2"),
    ],
)
def test_an_element_type_is_part_of_what_is_found(dtypes: tuple[str, str]) -> None:
    """field case 11: equal model, shape and sizes; only the element type differs."""
    script = Script()
    views = []
    for number, dtype in enumerate(dtypes):
        made = shape(f"e{number}")
        views += script.engine(replace(made, layout=replace(made.layout, dtype=dtype)))
    assert script.store(views[0], script.keys(views[0], TOKENS)) == "111111"
    assert script.lookup(views[1], script.keys(views[1], TOKENS)) == 0
    assert script.lookup(views[0], script.keys(views[0], TOKENS)) == 6


def test_another_revision_finds_nothing_and_a_clear_takes_all_of_a_model() -> None:
    """field case 12: revision r2 misses; the clear by alias empties both, also after a restart."""
    script = Script()
    [view] = script.engine(shape())
    old = script.keys(view, TOKENS)
    assert script.store(view, old) == "111111"
    script.set_revision(view, "r2")
    new = script.keys(view, TOKENS)
    assert script.lookup(view, new) == 0
    assert script.lookup(view, old) == 0
    assert script.store(view, new) == "111111"
    script.rest()
    script.clear(model="model-alias")
    assert script.lookup(view, new) == 0
    script.world.crash()
    [view] = script.engine(replace(shape(), namespace=replace(namespace("model"), revision="r2")))
    script.world.run_for(1.0)
    assert script.lookup(view, new) == 0
    assert script.store(view, new) == "111111"


def test_chunks_survive_a_restart_of_the_daemon() -> None:
    """field case 60: what was written before the daemon died is found, and right, after it."""
    script = Script()
    [view] = script.engine(shape(layout="hybrid"))
    keys = script.keys(view, TOKENS)
    assert script.store(view, keys) == "111111"
    script.rest()
    script.world.crash()
    [view] = script.engine(shape(layout="hybrid"))
    script.world.run_for(1.0)
    assert script.lookup(view, keys) == 6
    assert script.retrieve(view, keys) == "111111"


def test_ranks_agree_on_a_hit_when_one_lost_a_chunk() -> None:
    """field case 30: one of four ranks doesn't store chunk 4 of 6: the hit is 4 for all."""
    script = Script()
    made = EngineShape("e", "blue", namespace("model"), LAYOUTS["small"], RANKS["four"])
    views = script.engine(made)
    keys = script.keys(views[0], TOKENS)
    for rank, view in enumerate(views):
        assert script.store(view, keys[:4]) == "1111"
        if rank != 2:
            assert script.store(view, keys[4:]) == "11"
    for view in views:
        assert script.lookup(view, keys) == 4
        assert script.retrieve(view, keys[:4]) == "1111"


def test_replicas_are_stored_once_and_read_by_all() -> None:
    script = Script()
    made = EngineShape("e", "blue", namespace("model"), LAYOUTS["small"], RANKS["replicas"])
    first, second = script.engine(made)
    keys = script.keys(first, TOKENS)
    assert script.store(first, keys) == "111111"
    assert script.store(second, keys) == "111111"
    assert script.world.model.counts["store ok"] == 6
    assert script.retrieve(second, keys) == "111111"


def test_an_engine_is_ready_with_its_last_rank_only() -> None:
    """Until then lookups are misses and stores are refused."""
    script = Script()
    whole = EngineShape("e", "blue", namespace("model"), LAYOUTS["small"], RANKS["two"])
    [first] = script.engine(replace(whole, shards=(Shard(tp_rank=0, tp_size=2),)))
    assert first.namespace == b""
    keys = script.keys(first, TOKENS)
    assert script.lookup(first, keys) == 0
    assert script.store(first, keys) == "000000"


def test_a_cancelled_store_never_commits() -> None:
    """field case 16: the cancel is acknowledged once no Move reads the blocks; nothing of what was
    running then is ever found."""
    script = Script()
    [view] = script.engine(shape())
    keys = script.keys(view, TOKENS)
    ended: list[object] = []
    blocks = script.lend(view, 6)
    message = Store("r", keys.data, 0, keys.parent, blocks)
    number = script.world.request(view.id, message, on_end=ended.append)
    assert ended == []
    script.world.request(view.id, Cancel(number))
    assert ended == []
    script.world.run_until(lambda: bool(ended))
    assert script.lookup(view, keys) == 0


def test_many_retrieves_of_one_chunk_cost_one_read() -> None:
    """field case 80: the chunk is on NVMe only; ten requests wait for one read."""
    limits = replace(ROOMY, host=TierLimits(2, HOST_SLAB_BYTES))
    script = Script(limits)
    [view] = script.engine(shape())
    keys = script.keys(view, TOKENS)
    assert script.store(view, keys) == "111111"
    script.rest()
    for number in range(4):
        script.store(view, script.keys(view, [100 + number, *TOKENS]))
    script.rest()
    before = script.world.model.counts["read ok"]
    ended: list[object] = []
    for number in range(4):
        message = Retrieve(f"r{number}", keys.data, script.lend(view, 6))
        script.world.request(view.id, message, on_end=ended.append)
    script.world.run_until(lambda: len(ended) == 4)
    assert script.world.model.counts["read ok"] - before == 6
    assert script.world.model.counts["retrieved"] == 24


def test_a_lookup_repeated_after_a_new_revision_is_a_miss() -> None:
    """The request has a lease of the old revision's chunks; its answer must not live on."""
    script = Script()
    [view] = script.engine(shape())
    keys = script.keys(view, TOKENS)
    script.store(view, keys)
    answers = []
    for revision in ("r1", "r2"):
        body = script.ask(view, Lookup("request", keys.data))
        assert isinstance(body, LookupReply)
        answers.append(body.chunks)
        script.set_revision(view, revision)
    assert answers == [6, 0]


def test_an_engine_is_not_ready_while_a_lost_rank_is_still_being_let_go() -> None:
    """Rank 0 is lost in the middle of a store, rank 1 leaves and comes back meanwhile: the engine
    has one rank only, and nobody may be told otherwise."""
    script = Script()
    made = EngineShape("e", "blue", namespace("model"), LAYOUTS["small"], RANKS["two"])
    first, second = script.engine(made)
    ready = second.namespace
    keys = script.keys(first, TOKENS)
    message = Store("r", keys.data, 0, keys.parent, script.lend(first, 6))
    script.world.request(first.id, message)
    script.world.close(first.id, lambda: None)
    script.world.close(second.id, lambda: None)
    assert first.id not in script.world.model.detached
    again = script.join(made, 1)
    assert again.namespace == b""
    script.rest()
    assert first.id in script.world.model.detached
    assert again.namespace == b""
    script.join(made, 0)
    assert again.namespace == ready != b""


def test_a_cancel_does_not_wait_for_another_sessions_store() -> None:
    """Two engines store one chunk; the second only waits for the first one's Move, and its own
    blocks are free at once when it cancels."""
    script = Script()
    [first] = script.engine(shape("e1"))
    [second] = script.engine(shape("e2"))
    keys = script.keys(first, TOKENS)
    ended: list[str] = []
    numbers = []
    for view in (first, second):
        message = Store("r", keys.data, 0, keys.parent, script.lend(view, 6))
        end = partial(_note, ended, view.shape.engine)
        numbers.append(script.world.request(view.id, message, on_end=end))
    script.world.request(second.id, Cancel(numbers[1]))
    assert ended == ["e2"]
    script.world.run_until(lambda: len(ended) == 2)
    assert script.lookup(first, keys) == 6


@pytest.mark.parametrize("seed", range(4))
def test_a_slab_found_at_start_is_kept_though_its_first_slots_hold_nothing(seed: int) -> None:
    """A start reports empty slots of a slab before the one that holds a chunk; a chunk of another
    size, for which there is no slab left, must not take the slab for an empty one."""
    limits = replace(ROOMY, nvme=TierLimits(1, NVME_SLAB_BYTES))
    script = Script(limits, seed)
    [view] = script.engine(shape())
    keys = script.keys(view, TOKENS[:TOKENS_PER_CHUNK])
    assert script.store(view, keys) == "1"
    script.rest()
    script.world.crash()
    script.world.run_for(1.0)
    [small] = script.engine(shape())
    [large] = script.engine(shape("large", layout="large"))
    check_inside(script.world.service, [small, large])
    assert script.store(large, script.keys(large, TOKENS)) == "111111"
    script.rest()
    check_inside(script.world.service, [small, large])


def _note(ended: list[str], engine: str, outcome: object) -> None:
    ended.append(engine)
