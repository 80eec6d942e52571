"""RotaryPosition: the rotary position embedding that a model's configuration asks for.

Three ways to scale are computed here: none ("default"), positions divided by a factor ("linear")
and Llama 3.1's, which divides slow frequencies, keeps fast ones and blends between ("llama3").
Pairs lie in halves (element i with i + head_dim / 2), as in all families of this engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore_transformers.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3")
_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True, slots=True)
class RotaryPosition:
    """A rotary embedding: its type, base wavelength ``theta`` and the type's factors, by name."""

    rope_type: str
    theta: float
    factors: tuple[tuple[str, float], ...] = ()

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position for each pair, [head_dim / 2] in float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        plain = 1.0 / (self.theta**exponents)
        factors = dict(self.factors)
        if self.rope_type == "linear":
            return plain / factors["factor"]
        if self.rope_type == "llama3":
            return _llama3(plain, factors)
        return plain


def rotary_of(parameters: Mapping[str, object]) -> RotaryPosition:
    """The embedding that ``rope_parameters`` of a configuration describe.

    Raises UnsupportedModelError, naming the value and the valid ones, for any other type, for
    missing factors and for partial rotation.
    """
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"model: rope_type={rope_type!r}; this engine computes {', '.join(ROPE_TYPES)}"
        )
    if parameters.get("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        raise UnsupportedModelError(
            f"model: partial_rotary_factor={parameters['partial_rotary_factor']}; this engine "
            "rotates whole heads only (1.0)"
        )
    names = ("rope_theta", *_FACTORS[rope_type])
    missing = [name for name in names if not isinstance(parameters.get(name), int | float)]
    if missing:
        raise UnsupportedModelError(
            f"model: rope_parameters of type {rope_type!r} lack {', '.join(missing)}"
        )
    values = {name: float(str(parameters[name])) for name in names}
    theta = values.pop("rope_theta")
    return RotaryPosition(rope_type, theta, tuple(sorted(values.items())))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``states`` [tokens, heads, head_dim] by angles given as cos and sin [tokens,
    head_dim / 2]; returns new memory."""
    first, second = states.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _llama3(plain: Tensor, factors: Mapping[str, float]) -> Tensor:
    """Llama 3.1's scaling (Llama 3 report, and the reference code of its release): wavelengths
    beyond original / low are divided by ``factor``, below original / high kept, blended linearly
    in between."""
    low, high = factors["low_freq_factor"], factors["high_freq_factor"]
    turns = factors["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - share) * plain / factors["factor"] + share * plain
