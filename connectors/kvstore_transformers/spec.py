"""ModelSpec: what this engine must know of a model's configuration to compute it, and the refusal
of everything that it doesn't compute.

A configuration is read as the dictionary of its values. A value that would change the result and
isn't implemented here is refused by name: silently ignoring it would give wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvstore_transformers.errors import UnsupportedModelError
from kvstore_transformers.rope import RotaryPosition, rotary_of

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Model types that this engine computes, and their architectures."""

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention, RMS norms and a gated SiLU MLP.

    ``query_key_norm`` says that queries and keys are normed a head (Qwen3). Biases are where the
    weights have them. ``end_tokens`` end a generation.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions_max: int
    norm_epsilon: float
    query_key_norm: bool
    tied_embeddings: bool
    rotary: RotaryPosition
    end_tokens: tuple[int, ...] = ()

    def config_digest(self) -> str:
        """A digest of everything in the configuration that the KV depends on beside the weights;
        the longest context and the end tokens are left out."""
        fields = asdict(self)
        del fields["positions_max"], fields["end_tokens"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def spec_of(config: Config) -> ModelSpec:
    """Read a configuration (``config.to_dict()``); raises UnsupportedModelError in one line for
    what this engine doesn't compute."""
    family = _family(config)
    _refuse_unsupported(config)
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"model: num_key_value_heads={kv_heads} doesn't divide num_attention_heads={heads}"
        )
    head_dim = _count(config, "head_dim", _count(config, "hidden_size") // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"model: head_dim={head_dim}; rotary pairs need an even one")
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise UnsupportedModelError("model: its configuration has no rope_parameters")
    return ModelSpec(
        family=family,
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_count(config, "vocab_size"),
        positions_max=_count(config, "max_position_embeddings"),
        norm_epsilon=float(str(config["rms_norm_eps"])),
        query_key_norm=family == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        rotary=rotary_of(parameters),
        end_tokens=_end_tokens(config.get("eos_token_id")),
    )


def _family(config: Config) -> str:
    """The model's family, once type and architecture are known to this engine."""
    family = str(config.get("model_type"))
    valid = ", ".join(FAMILIES.values())
    if family not in FAMILIES:
        raise UnsupportedModelError(f"model: model_type={family!r}; this engine computes {valid}")
    named = config.get("architectures") or [FAMILIES[family]]
    if not isinstance(named, list) or named != [FAMILIES[family]]:
        raise UnsupportedModelError(f"model: architectures={named}; this engine computes {valid}")
    return family


def _refuse_unsupported(config: Config) -> None:
    """Raise for values that would change the result and aren't implemented."""
    if config.get("quantization_config") is not None:
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedModelError(
            f"model: quantised weights (quant_method={method!r}); this engine computes plain "
            "float32, bfloat16 or float16 weights"
        )
    if config.get("hidden_act") != "silu":
        raise UnsupportedModelError(
            f"model: hidden_act={config.get('hidden_act')!r}; this engine computes 'silu'"
        )
    kinds = config.get("layer_types") or []
    sliding = (
        [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else []
    )
    if sliding:
        raise UnsupportedModelError(
            f"model: layer type {sliding[0]!r} in {len(sliding)} layers; this engine computes "
            "'full_attention' only"
        )
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise UnsupportedModelError(
            f"model: sliding_window={config['sliding_window']}; this engine computes full "
            "attention only"
        )


def _count(config: Config, name: str, default: int | None = None) -> int:
    """A positive whole number of the configuration; ``default`` where it is absent or None."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"model: {name}={value!r}; valid is 1 or more")
    return value


def _end_tokens(value: object) -> tuple[int, ...]:
    """The end tokens as a tuple: a configuration has none, one or a list."""
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()
