"""CausalModel: the forward pass of Llama, Qwen2 and Qwen3, written over paged KV.

One function serves the three families: a bias is added where the weights have one (Qwen2's q, k and
v), queries and keys are normed where the spec says so (Qwen3). The forward is this engine's own so
that keys and values are written to, and read from, pages that the daemon shares; the tests hold its
logits against transformers'.

A block of tokens attends to everything before it and, causally, to itself. PyTorch's ``is_causal``
aligns its triangle to the top left corner, which is right for a first block only: with a past, row
0 would see key 0 alone. So every block of more than one token carries its mask, aligned to the
bottom right. Merging an unmasked past and a causal block by their log-sum-exp gives the same result
and, measured at 512 tokens on 0 to 2,560, the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvstore_transformers.errors import UnsupportedModelError
from kvstore_transformers.rope import rotate
from kvstore_transformers.spec import ModelSpec


class KVPages(Protocol):
    """Where a sequence's keys and values lie: [tokens, kv_heads, head_dim] a layer, K and V."""

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put the KV of tokens [start, start + len(keys)) of a layer."""

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """The KV of tokens [0, end) of a layer, as new memory or a view."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, in] and, where the model has one, a bias [out]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; the norms of queries and keys are None but in Qwen3."""

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, shared with whoever loaded them."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The element type, of weights and KV alike."""
        return self.embedding.dtype


class CausalModel:
    """A model ready to compute. ``name`` is its path or repository, ``revision`` the digest of its
    weights (see loading.py). Holds no KV and no state between calls."""

    def __init__(self, name: str, revision: str, spec: ModelSpec, weights: Weights) -> None:
        self.name = name
        self.revision = revision
        self.spec = spec
        self.weights = weights
        self._frequencies = spec.rotary.frequencies(spec.head_dim)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int, pages: KVPages) -> Tensor:
        """Hidden states [tokens, hidden] of ``tokens`` at positions from ``start``, whose KV is
        written to ``pages``; the KV of [0, start) must be there."""
        end = start + len(tokens)
        angles = torch.arange(start, end, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos().to(self.weights.dtype), angles.sin().to(self.weights.dtype)
        mask = _mask(start, end, self.weights.dtype)
        states = functional.embedding(tokens, self.weights.embedding)
        for number, layer in enumerate(self.weights.layers):
            normed = self._norm(states, layer.input_norm)
            query, key, value = self._project(layer, normed)
            pages.write(number, start, rotate(key, cos, sin), value)
            mixed = _attend(rotate(query, cos, sin), *pages.read(number, end), mask)
            states = states + layer.output(mixed)
            normed = self._norm(states, layer.mlp_norm)
            states = states + layer.down(functional.silu(layer.gate(normed)) * layer.up(normed))
        return states

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits [tokens, vocabulary] in float32 of hidden states [tokens, hidden]."""
        normed = self._norm(states, self.weights.norm)
        return functional.linear(normed, self.weights.head).float()

    def _project(self, layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer, [tokens, heads, head_dim], not yet rotated."""
        count, head_dim = len(normed), self.spec.head_dim
        query = layer.query(normed).view(count, self.spec.heads, head_dim)
        key = layer.key(normed).view(count, self.spec.kv_heads, head_dim)
        value = layer.value(normed).view(count, self.spec.kv_heads, head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(query, layer.query_norm)
            key = self._norm(key, layer.key_norm)
        return query, key, value

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in float32."""
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.norm_epsilon)
        return weight * (wide * scale).to(states.dtype)


def weights_of(spec: ModelSpec, state: Mapping[str, Tensor]) -> Weights:
    """Sort a state dictionary (names as in transformers) into Weights, without copying.

    Raises UnsupportedModelError when a tensor is missing or one is left over: a weight that isn't
    used means a model that isn't computed right.
    """
    left = dict(state)
    for name in [name for name in left if name.endswith("rotary_emb.inv_freq")]:
        del left[name]

    def take(name: str) -> Tensor:
        if name not in left:
            raise UnsupportedModelError(f"model: weights lack {name!r} of the {spec.family} family")
        return left.pop(name).detach()

    def linear(name: str) -> Linear:
        bias = left.pop(name + ".bias", None)
        return Linear(take(name + ".weight"), None if bias is None else bias.detach())

    def layer(prefix: str) -> Layer:
        normed = spec.query_key_norm
        return Layer(
            input_norm=take(prefix + "input_layernorm.weight"),
            query=linear(prefix + "self_attn.q_proj"),
            key=linear(prefix + "self_attn.k_proj"),
            value=linear(prefix + "self_attn.v_proj"),
            output=linear(prefix + "self_attn.o_proj"),
            query_norm=take(prefix + "self_attn.q_norm.weight") if normed else None,
            key_norm=take(prefix + "self_attn.k_norm.weight") if normed else None,
            mlp_norm=take(prefix + "post_attention_layernorm.weight"),
            gate=linear(prefix + "mlp.gate_proj"),
            up=linear(prefix + "mlp.up_proj"),
            down=linear(prefix + "mlp.down_proj"),
        )

    embedding = take("model.embed_tokens.weight")
    layers = tuple(layer(f"model.layers.{number}.") for number in range(spec.layers))
    norm = take("model.norm.weight")
    head = left.pop("lm_head.weight", embedding) if spec.tied_embeddings else take("lm_head.weight")
    if left:
        raise UnsupportedModelError(
            f"model: weights hold {next(iter(left))!r}, which this engine wouldn't use"
        )
    return Weights(embedding, layers, norm, head.detach())


def _mask(start: int, end: int, dtype: torch.dtype) -> Tensor | None:
    """Added to the scores of tokens [start, end) against [0, end): 0 where a token may look, minus
    infinity behind it; None for a single token, which sees everything."""
    if end - start == 1:
        return None
    hidden = torch.full((end - start, end), float("-inf"), dtype=dtype)
    return hidden.triu(start + 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention: query [tokens, heads, head_dim], key and value [context, kv_heads,
    head_dim] to [tokens, heads * head_dim]."""
    mixed = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).reshape(len(query), -1)
