"""The forward pass gives transformers' logits, through any block table and any cut into blocks."""

from __future__ import annotations

import random

import pytest
import torch
from kvstore_transformers.loading import model_of
from kvstore_transformers.model import CausalModel
from kvstore_transformers.paged import CacheShape, PagedCache
from transformers import PreTrainedModel

from kvstore.memory import OwnedHostMemory, create_host_memory
from tests.connectors import tiny

TOKENS = 150
TOLERANCE = 1e-3


def logits_of(model: CausalModel, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of all tokens, computed in blocks that end at ``cuts``, over blocks of 16 in random
    order."""
    spec = model.spec
    shape = CacheShape(spec.layers, spec.kv_heads, spec.head_dim, model.weights.dtype, 16, 40)
    table = random.Random(3).sample(range(shape.num_blocks), shape.blocks_for(len(tokens)))
    rows = []
    with create_host_memory("test", shape.memory_bytes()) as memory:
        pages = PagedCache(shape, memory).pages(table)
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            states = model.forward(torch.tensor(tokens[start:end]), start, pages)
            rows.append(model.logits(states))
    return torch.cat(rows)


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("cuts", [[], [1], [16, 32], [64, 65, 127], [TOKENS - 1]], ids=str)
def test_logits_equal_transformers(family: str, cuts: list[int]) -> None:
    """Each family (grouped queries, biases, norms of q and k, llama3 and linear rope), cut into
    blocks anywhere, block boundaries or not."""
    model = tiny.oracle(family)
    tokens = tiny.random_tokens(TOKENS)
    got = logits_of(tiny.ours(model), tokens, cuts)
    assert (got - expected(model, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": tiny.LINEAR_ROPE},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=str,
)
def test_variants_of_llama_equal_transformers(changes: dict[str, object]) -> None:
    """What configurations of the family vary: rope, biases, tied embeddings, heads."""
    model = tiny.oracle("llama", **changes)
    tokens = tiny.random_tokens(TOKENS)
    got = logits_of(tiny.ours(model), tokens, [100])
    assert (got - expected(model, tokens)).abs().max() < TOLERANCE


def test_bfloat16_stays_near_transformers() -> None:
    """A model in bfloat16 keeps its KV in bfloat16; logits agree within the type's precision."""
    model = tiny.oracle("llama").to(torch.bfloat16)
    tokens = tiny.random_tokens(40)
    got, want = logits_of(tiny.ours(model), tokens, [16]), expected(model, tokens)
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize(
    ("family", "dropped"),
    [("qwen2", "k_proj.bias"), ("qwen2", "v_proj.bias"), ("llama", "rope"), ("qwen3", "norms")],
)
def test_comparison_sees_what_is_left_out(family: str, dropped: str) -> None:
    """Without a bias, the rope scaling or the norms of q and k the logits are far off: the tests
    above can fail."""
    model = tiny.oracle(family)
    config, state = model.config.to_dict(), dict(model.state_dict())
    if dropped == "rope":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    elif dropped == "norms":
        config.update(model_type="qwen2", architectures=None)
        state = {
            name: t
            for name, t in state.items()
            if not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
    else:
        state = {name: t for name, t in state.items() if not name.endswith(dropped)}
    tokens = tiny.random_tokens(TOKENS)
    got = logits_of(model_of("tiny", config, state), tokens, [])
    assert (got - expected(model, tokens)).abs().max() > 100 * TOLERANCE


def test_causal_mask_of_a_later_block_is_aligned_to_its_end() -> None:
    """A later block's first token sees all of the past: tokens behind it don't change its logits,
    tokens before it do."""
    model = tiny.ours(tiny.oracle("llama"))
    tokens = tiny.random_tokens(64)
    other_tail = tokens[:33] + tiny.random_tokens(31, seed=1)
    other_head = [(tokens[0] + 1) % 300, *tokens[1:]]
    base = logits_of(model, tokens, [32])
    assert torch.equal(logits_of(model, other_tail, [32])[:33], base[:33])
    assert (logits_of(model, other_head, [32])[32] - base[32]).abs().max() > TOLERANCE


def test_digests_name_weights_and_configuration() -> None:
    """Another weight is another revision, another rope another configuration; another longest
    context or end token is neither."""
    model = tiny.oracle("llama")
    config, state = model.config.to_dict(), dict(model.state_dict())
    base = model_of("tiny", config, state)
    longer = model_of("tiny", {**config, "max_position_embeddings": 99, "eos_token_id": 3}, state)
    assert (longer.revision, longer.spec.config_digest()) == (
        base.revision,
        base.spec.config_digest(),
    )
    rope = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert model_of("tiny", rope, state).spec.config_digest() != base.spec.config_digest()
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {**state, name: state[name].clone()}
    changed[name][0, 0] += 1e-6
    assert model_of("tiny", config, changed).revision != base.revision


def test_pages_keep_blocks_of_others_untouched() -> None:
    """Writing a sequence changes its own rows and nothing else, the tail of its last block
    included."""
    shape = CacheShape(2, 2, 8, torch.float32, 16, 6)
    memory: OwnedHostMemory
    with create_host_memory("test", shape.memory_bytes()) as memory:
        cache = PagedCache(shape, memory)
        cache.kv.fill_(7.0)
        cache.pages([4, 1]).write(1, 14, torch.zeros(5, 2, 8), torch.ones(5, 2, 8))
        for part, value in ((0, 0.0), (1, 1.0)):
            want = torch.full((2, 2, 6, 16, 2, 8), 7.0)[:, part]
            want[1, 4, 14:] = value
            want[1, 1, :3] = value
            assert torch.equal(cache.kv[:, part], want)
