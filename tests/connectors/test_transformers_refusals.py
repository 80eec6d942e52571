"""What the engine doesn't compute it refuses in one line that names the value and what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_transformers.errors import ModelError, UnsupportedModelError
from kvstore_transformers.loading import load_model, load_tokenizer, model_of
from kvstore_transformers.spec import spec_of
from transformers import GPT2Config, GPT2LMHeadModel

from tests.connectors import tiny

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "named", "valid"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'", "LlamaForCausalLM"),
        ({"architectures": ["LlamaForTokenClassification"]}, "TokenClass", "LlamaForCausalLM"),
        ({"rope_parameters": YARN}, "rope_type='yarn'", "default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor", "linear"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "0.5", "1.0"),
        ({"rope_parameters": None}, "rope_parameters", "no"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq", "float32"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'", "silu"),
        ({"sliding_window": 4096}, "sliding_window=4096", "full"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding", "full_attention"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4", "num_attention_heads=6"),
        ({"head_dim": 7}, "head_dim=7", "even"),
        ({"vocab_size": 0}, "vocab_size=0", "1 or more"),
    ],
    ids=str,
)
def test_configuration_is_refused_in_one_line(
    changes: dict[str, Any], named: str, valid: str
) -> None:
    config = {**tiny.oracle("llama").config.to_dict(), **changes}
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(config)
    assert named in str(caught.value)
    assert valid in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sliding_window_that_is_switched_off_is_no_sliding_window() -> None:
    """Qwen2's configuration names a window that it doesn't use."""
    config = tiny.oracle("qwen2").config.to_dict()
    assert spec_of({**config, "sliding_window": 4096, "use_sliding_window": False})


def test_weights_left_over_or_missing_are_refused() -> None:
    """A tensor that the forward wouldn't use means another model than the configuration says."""
    model = tiny.oracle("llama")
    config, state = model.config.to_dict(), dict(model.state_dict())
    extra = {**state, "model.layers.0.self_attn.sinks": torch.zeros(6)}
    with pytest.raises(UnsupportedModelError, match=r"sinks.*wouldn't use"):
        model_of("tiny", config, extra)
    del state["model.layers.1.mlp.gate_proj.weight"]
    with pytest.raises(UnsupportedModelError, match=r"lack 'model.layers.1.mlp.gate_proj.weight'"):
        model_of("tiny", config, state)


def test_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """A GPT-2 folder: one line with the folder, the value and the valid architectures."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "model_type='gpt2'" in str(caught.value)
    assert "Qwen3ForCausalLM" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"no folder '.*nowhere'; name a model's folder"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_element_type_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"dtype='int4'.*float32, bfloat16, float16"):
        load_model("anything", "int4")


def test_saved_folder_loads_with_its_tokenizer(tmp_path: Path) -> None:
    """A folder as ``save_pretrained`` writes it gives the weights' revision and a tokenizer."""
    folder = tiny.save(tmp_path / "tiny")
    model = load_model(str(folder))
    assert model.name == str(folder.resolve())
    assert model.revision == tiny.ours(tiny.oracle("llama")).revision
    tokens = load_tokenizer(str(folder)).encode("kv")
    assert len(tokens) == 2
