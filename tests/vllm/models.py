"""Tiny models with random weights, written as Hugging Face folders: what no small real model is.

``python -m tests.vllm.models KIND FOLDER TOKENIZER``; KIND is ``hybrid`` (sliding windows of 128
and full attention) or ``mla`` (multi-head latent attention). The tokenizer is another model's.
"""

from __future__ import annotations

import sys
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


def main() -> None:
    """Write a model."""
    import torch
    from transformers import AutoTokenizer

    kind, folder, tokenizer = sys.argv[1:]
    torch.manual_seed(7)
    model = {"hybrid": hybrid, "mla": mla}[kind]()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main()
