"""The connector's parts against vLLM's own configurations, without an engine: run with the Python
of an environment that has vLLM, by tests/vllm/test_inside.py.

Each function ``check_...`` is one check; each is run and printed as ``name: ok`` or with its error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

import torch
from kvstore_vllm.drafts import Drafting, drafting
from kvstore_vllm.identity import check_engine, check_nodes, config_digest, model_and_revision
from kvstore_vllm.layout import EngineShape, GroupShape, describe, group_shapes, tokens_per_chunk
from kvstore_vllm.ranks import replicas_of
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvstore import (
    Layout,
    LayoutMismatchError,
    Namespace,
    Shard,
)
from kvstore.core.keys import namespace_digest

MODEL = sys.argv[1]
KV: dict[str, Any] = {
    "block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "block_size": 32, "num_kv_heads": 1, "head_size": 576, "dtype": torch.float32,
    "max_tp_shards": 1,
}  # fmt: skip
MEMORY = 64 << 20


def engine(ranks: int = 1, stages: int = 1, **options: Any) -> VllmConfig:
    """vLLM's configuration of an engine of so many ranks. (The model has 9 heads, so the number of
    its ranks is set behind vLLM's check.)"""
    arguments = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True} | options
    config = EngineArgs(model=MODEL, **arguments).create_engine_config()
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.pipeline_parallel_size = stages
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def configs(config: VllmConfig, *ranks: dict[str, KVCacheSpec]) -> list[KVCacheConfig]:
    """What vLLM tells each rank of its KV cache, one entry a worker."""
    found: list[KVCacheConfig] = get_kv_cache_configs(config, list(ranks), [MEMORY] * len(ranks))
    return found


def layout(config: KVCacheConfig) -> Layout:
    """What the connector registers of it, from views like those of vLLM's layers."""
    size = max(tensor.size + tensor.offset for tensor in config.kv_cache_tensors)
    memory = torch.zeros(size, dtype=torch.int8)
    views = {}
    for group in config.kv_cache_groups:
        for tensor in config.kv_cache_tensors:
            for place, name in enumerate(tensor.layers):
                spec = group.kv_cache_spec
                spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
                if name in group.layer_names:
                    where = tensor.offset + place * tensor.layer_stride
                    shape = (config.num_blocks_of(tensor), spec.page_size_bytes // 4)
                    views[name] = torch.as_strided(
                        memory.view(torch.float32), shape, (tensor.block_stride // 4, 1), where // 4
                    )
    chunk = tokens_per_chunk(group_shapes(config), 0)
    found = describe(config, views, memory.data_ptr(), chunk)
    found.validate(memory.numel())
    return found


def refused(call: Callable[[], object]) -> str:
    """Why a call is refused, which must be one line."""
    said = ""
    try:
        call()
    except LayoutMismatchError as error:
        said = str(error)
    assert said, "it isn't refused"
    assert "\n" not in said
    return said


# ---------------------------------------------------------------- layouts and shards


def check_a_latent_is_one_tensor_a_layer_and_stored_once_for_all_ranks() -> None:
    """MLA keeps one latent a token: no K beside a V, and no share of it for each tensor-parallel
    rank. All ranks name the same shard."""
    config = engine(ranks=2)
    ranks = configs(config, *2 * [{f"layer{n}": MLAAttentionSpec(**LATENT) for n in range(3)}])
    for rank in ranks:
        found = layout(rank)
        assert [len(group.tensors) for group in found.groups] == [3]
        assert {span.block_bytes for span in found.groups[0].tensors} == {32 * 576 * 4}
        assert (found.groups[0].tokens_per_block, found.groups[0].window) == (32, None)
    shards = [Shard(rank, 2, 0, 1, replicas_of(config, ranks[rank])) for rank in range(2)]
    assert [(shard.index(), shard.count(), shard.ranks()) for shard in shards] == [(0, 1, 2)] * 2


def check_a_latent_beside_an_index_cache_is_two_groups_or_one() -> None:
    """Sparse MLA keeps an index of another size beside its latent: all of it is registered."""
    both = {"attn": MLAAttentionSpec(**LATENT),
            "index": MLAAttentionSpec(**(LATENT | {"head_size": 144}))}  # fmt: skip
    (config,) = configs(engine(), both)
    spans = [span.block_bytes for group in layout(config).groups for span in group.tensors]
    assert sorted(spans) == [32 * 144 * 4, 32 * 576 * 4] or spans == [32 * 576 * 4] * 2, spans


def check_replicated_heads_are_stored_once() -> None:
    """A plain model with fewer KV heads than ranks: vLLM repeats them on consecutive ranks, which
    count as one shard. Where the ranks aren't a multiple of the heads, or the layers aren't all
    alike for sure, each rank is a shard."""

    def replicas(heads: int, ranks: int, change: Callable[[VllmConfig], object] = id) -> int:
        config = engine(ranks=ranks, hf_overrides={"num_key_value_heads": heads})
        own = config.model_config.get_num_kv_heads(config.parallel_config)
        spec = FullAttentionSpec(**(KV | {"num_kv_heads": own}))
        found = configs(config, *ranks * [{"layer0": spec, "layer1": spec}])
        change(config)
        assert {rank.kv_tp_replicas for rank in found} == {1}
        assert len({layout(rank).fingerprint() for rank in found}) == 1
        (count,) = {replicas_of(config, rank) for rank in found}
        return count

    def other_architecture(config: VllmConfig) -> None:
        config.model_config._architecture = "TransformersForCausalLM"

    def layers_that_differ(config: VllmConfig) -> None:
        config.model_config.model_arch_config.per_layer_overrides = [{"total_num_kv_heads": 1}]

    assert [replicas(1, 2), replicas(3, 6), replicas(1, 4)] == [2, 2, 4]
    assert [replicas(3, 1), replicas(3, 3), replicas(3, 4), replicas(8, 4)] == [1] * 4
    assert [replicas(1, 2, other_architecture), replicas(1, 2, layers_that_differ)] == [1, 1]
    shards = [Shard(rank, 4, 0, 1, 2) for rank in range(4)]
    assert [shard.index() for shard in shards] == [0, 0, 1, 1]


def check_only_layers_with_one_head_a_rank_are_replicas() -> None:
    """A layer with more heads a rank than the model's number says, and a drafter's layers, of whose
    heads that number says nothing: each rank is a shard. MLA's replicas are vLLM's own."""
    few = {"num_key_value_heads": 1}
    config = engine(ranks=2, hf_overrides=few)
    specs = {f"layer{n}": FullAttentionSpec(**(KV | {"num_kv_heads": n})) for n in (1, 2)}
    (found, _) = configs(config, specs, specs)
    assert replicas_of(config, found) == 1
    model = engine(ranks=2, hf_overrides=few, speculative_config={
        "method": "draft_model", "model": MODEL, "num_speculative_tokens": 2})  # fmt: skip
    model.speculative_config.draft_parallel_config.tensor_parallel_size = 2
    alike = {"layer1": specs["layer1"]}
    (found, _) = configs(config, alike, alike)
    assert (replicas_of(config, found), replicas_of(model, found)) == (2, 1)
    (found, _) = configs(config, *2 * [{"layer": MLAAttentionSpec(**LATENT)}])
    assert replicas_of(config, found) == found.kv_tp_replicas == 2


def check_pipeline_stages_register_their_own_layers() -> None:
    """Two stages with three layers and two: each its own, and a chunk has a part of each. Another
    split is another namespace."""
    config, spec = engine(stages=2), FullAttentionSpec(**KV)

    def digest(first: int) -> tuple[bytes, list[int]]:
        stages = [range(first), range(first, 5)]
        ranks = configs(config, *[{f"layer{n}": spec for n in stage} for stage in stages])
        for rank, stage in zip(ranks, stages, strict=True):
            assert rank.kv_cache_groups[0].layer_names == [f"layer{n}" for n in stage]
        found = [layout(rank) for rank in ranks]
        shards = [Shard(0, 1, rank, 2, ranks[rank].kv_tp_replicas) for rank in range(2)]
        assert [(s.index(), s.count()) for s in shards] == [(0, 2), (1, 2)]
        prints = [each.fingerprint() for each in found]
        space = Namespace("m", "r", "f")
        name = namespace_digest(space, "float32", found[0].tokens_per_chunk, shards[0], prints)
        return name, [len(each.groups[0].tensors) for each in found]

    name, tensors = digest(3)
    assert tensors == [3, 2]
    assert digest(3)[0] == name != digest(2)[0]


def check_a_stage_without_a_kind_of_layer_is_refused() -> None:
    """A stage without sliding windows, while others have some, can't tell whether one is whole."""
    config = engine(stages=2)
    full, window = FullAttentionSpec(**KV), SlidingWindowSpec(**KV, sliding_window=64)
    fulls = [{f"full{n}": full for n in stage} for stage in (range(3), range(3, 6))]
    first, second = configs(config, fulls[0] | {f"w{n}": window for n in range(5)}, fulls[1])
    assert [len(group.tensors) for group in layout(first).groups] == [3, 5]
    said = refused(lambda: layout(second))
    assert said.startswith("layout: this pipeline stage has no layer of KV cache group window1")


def check_engines_across_nodes_are_refused() -> None:
    """By vLLM's configuration, and by what its workers find out about one another."""
    config = engine()
    check_engine(config)
    config.parallel_config.nnodes = 2
    for said in (refused(lambda: check_engine(config)), refused(lambda: check_nodes(2))):
        assert said == "engine: it spans 2 nodes; this version serves engines on one"
    check_nodes(1)


def check_a_layer_that_shares_another_ones_kv_adds_nothing() -> None:
    """Layers without a tensor of their own are known by that of their group which they use."""
    (config,) = configs(engine(), {"a": FullAttentionSpec(**KV)})
    before = layout(config)
    group = config.kv_cache_groups[0]
    shared = KVCacheGroupSpec([*group.layer_names, "b"], group.kv_cache_spec)
    assert layout(replace(config, kv_cache_groups=[shared])) == before


# ---------------------------------------------------------------- speculative decoding


def check_a_drafter_is_part_of_the_namespace_and_leaves_a_block_to_compute() -> None:
    """Drafters without KV change nothing; one with KV is another namespace, as its KV is stored
    with the target's. Where its KV depends on the next token the last block of a hit is computed;
    beside windows, which are whole at a chunk's end only, the last chunk."""
    plain = engine()
    ngram = engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2,
                                       "prompt_lookup_max": 3})  # fmt: skip
    model = engine(speculative_config={"method": "draft_model", "model": MODEL,
                                       "num_speculative_tokens": 2})  # fmt: skip
    assert drafting(plain) == drafting(ngram) == Drafting()
    assert drafting(model) == Drafting(keeps_kv=True, reads_ahead=False)
    assert config_digest(plain) == config_digest(ngram) != config_digest(model)
    model.speculative_config.method = "eagle3"
    assert drafting(model) == Drafting(keeps_kv=True, reads_ahead=True)
    full, window = GroupShape("full", 16, None), GroupShape("window", 16, 64)
    ahead = Drafting(keeps_kv=True, reads_ahead=True)
    assert EngineShape((full,), 128, 1, drafting(plain)).retreat() == 0
    assert EngineShape((full,), 128, 1, ahead).retreat() == 16
    assert EngineShape((full, window), 128, 1, ahead).retreat() == 128
    model.speculative_config.method = "dflash"
    assert "speculative method dflash" in refused(lambda: check_engine(model))
    model.speculative_config.method = "eagle"
    model.speculative_config.draft_parallel_config.tensor_parallel_size = 3
    assert "3 tensor-parallel ranks" in refused(lambda: check_engine(model))


def check_the_same_weights_in_another_folder_are_the_same_model() -> None:
    """Two nodes, or two folders of one. What the user calls them by is believed of one folder only:
    other weights may be called so as well."""
    with tempfile.TemporaryDirectory() as parent:
        names = []
        for folder in (Path(MODEL), Path(parent) / "moved"):
            if folder != Path(MODEL):
                shutil.copytree(MODEL, folder, copy_function=os.symlink)
            config = engine()
            config.model_config.model = str(folder)
            names.append((model_and_revision(config, ""), model_and_revision(config, "mine")))
        (here, called_here), (there, called_there) = names
        assert here == there
        assert called_here != called_there
        assert {called_here[1], called_there[1]} == {"mine"}
        (Path(parent) / "moved" / "more.safetensors").write_bytes(b"other weights")
        assert model_and_revision(config, "") != here


def run(checks: dict[str, Any]) -> None:
    """Run all checks of a module."""
    said = {}
    for name, check in list(checks.items()):
        if name.startswith("check_") and getattr(check, "__module__", "") == "__main__":
            try:
                check()
                said[name] = "ok"
            except Exception:  # noqa: BLE001
                said[name] = traceback.format_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    run(globals())
