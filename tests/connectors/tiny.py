"""Tiny random models of each family, built from configurations: no download, milliseconds a
forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvstore_transformers.loading import model_of
from kvstore_transformers.model import CausalModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 2048, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": LINEAR_ROPE}),
}


def oracle(family: str, **changes: Any) -> PreTrainedModel:
    """A random transformers model, every bias and norm included, the same for the same
    arguments."""
    config_class, model_class, settings = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, **settings, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.5)
    return model


def ours(model: PreTrainedModel, name: str = "tiny") -> CausalModel:
    """The reference engine's model of the same weights."""
    return model_of(name, model.config.to_dict(), model.state_dict())


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token IDs of the tiny vocabulary, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator).tolist()


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A model folder as people have it: configuration, weights and a tokenizer of bytes."""
    oracle(family, **changes).save_pretrained(folder)
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(byte_level)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
