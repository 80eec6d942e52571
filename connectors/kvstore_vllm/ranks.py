"""shard_of: this process's place among the engine's ranks, and how many ranks hold the same KV.

vLLM says so for MLA (``kv_tp_replicas``) and not for a plain model with fewer KV heads than ranks,
whose heads it repeats on consecutive ranks all the same (QKVParallelLinear: rank // replicas). The
heads of the whole model and those of a rank are known, but neither tells by itself whether *every*
layer repeats them: where layers differ, one of them may share its heads out while another repeats
them, and taking those ranks for equal would be wrong bytes. So it is done for architectures of
which vLLM's code was read; for all others each rank's copy is kept, which takes more room.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore import Shard
from kvstore_vllm.drafts import drafting

REPEATING = (
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM",
    "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip
"""Architectures in which every layer has QKVParallelLinear with the model's num_key_value_heads."""


def shard_of(config: VllmConfig, kv_config: KVCacheConfig) -> Shard:
    """This process's place."""
    parallel = config.parallel_config
    return Shard(
        tp_rank=get_tp_group().rank_in_group,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
        replicas=replicas_of(config, kv_config),
        nodes=parallel.nnodes_within_dp,
    )


def replicas_of(config: VllmConfig, kv_config: KVCacheConfig) -> int:
    """How many consecutive tensor-parallel ranks hold the same KV in every layer; in doubt 1."""
    if kv_config.kv_tp_replicas > 1:
        return int(kv_config.kv_tp_replicas)
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    heads = int(model.get_total_num_kv_heads())
    plain = (
        model.architecture in REPEATING
        and model.model_arch_config.per_layer_overrides is None
        and model.hf_text_config.num_key_value_heads == heads
        and not drafting(config).keeps_kv
    )
    if not plain or not 0 < heads < ranks or ranks % heads:
        return 1
    specs = [spec for group in kv_config.kv_cache_groups for spec in _layers(group.kv_cache_spec)]
    known = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    return ranks // heads if known and {spec.num_kv_heads for spec in specs} == {1} else 1


def _layers(spec: KVCacheSpec) -> list[KVCacheSpec]:
    return (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
