"""Tiny models with random weights, written as Hugging Face folders: what no small real model is.

``python -m tests.vllm.models KIND FOLDER MODEL [SEED]``; KIND is ``hybrid`` (sliding windows of
128 and full attention), ``mla`` (multi-head latent attention), ``single`` (one KV head), all with
the tokenizer of MODEL, or ``adapter``: a LoRA adapter for MODEL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WINDOW = 128


def hybrid() -> Any:
    """Gemma 3's architecture, one layer in three of full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=WINDOW,
            layer_types=kinds * 2, max_position_embeddings=8192, query_pre_attn_scalar=32,
            initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def mla() -> Any:
    """DeepSeek V2's architecture without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None,
            qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, first_k_dense_replace=3,
            n_routed_experts=2, moe_intermediate_size=64, max_position_embeddings=8192,
            initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def single() -> Any:
    """Llama's architecture with one KV head, which tensor-parallel ranks must share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=1, head_dim=32, initializer_range=0.1,
            max_position_embeddings=8192, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def write_adapter(folder: Path, model: str) -> None:
    """A LoRA adapter of the query and value projections of every layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config, rank = AutoConfig.from_pretrained(model), 8
    sizes = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, heads in sizes.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(rank, config.hidden_size) * 0.5
            weights[f"{where}.lora_B.weight"] = torch.randn(heads * config.head_dim, rank) * 0.5
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
             "target_modules": list(sizes), "task_type": "CAUSAL_LM",
             "base_model_name_or_path": model}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def main() -> None:
    """Write a model or an adapter."""
    import torch
    from transformers import AutoTokenizer

    kind, folder, base, *seed = sys.argv[1:]
    torch.manual_seed(int(seed[0]) if seed else 7)
    if kind == "adapter":
        write_adapter(Path(folder), base)
        return
    model = {"hybrid": hybrid, "mla": mla, "single": single}[kind]()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


if __name__ == "__main__":
    main()
