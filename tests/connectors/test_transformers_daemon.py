"""The engine with a real daemon: outputs with reuse equal outputs without it, token for token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore_transformers.engine import Engine, EngineOptions, Generation
from kvstore_transformers.loading import load_model
from kvstore_transformers.model import CausalModel

from kvstore.demo_processes import OwnDaemon
from tests.connectors import tiny
from tests.connectors.conftest import StartEngine

CHUNK = 32
NEW = 12
OPTIONS = EngineOptions(
    tokens_per_block=16, tokens_per_chunk=CHUNK, cache_tokens=512, prefill_tokens=64
)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return tiny.ours(tiny.oracle("llama"))


def cold(model: CausalModel, prompt: list[int], new: int = NEW) -> Generation:
    """The truth: an engine without a daemon."""
    with Engine(model, OPTIONS) as engine:
        return engine.generate(prompt, new)


def check_sound(engine: Engine) -> None:
    """No call to the client failed, and every block has come back."""
    assert engine.flush(20.0)
    assert engine.failures == {}
    engine.cache.allocator.check_invariants()
    assert engine.cache.allocator.available() == engine.cache.shape.num_blocks


def whole_chunks(tokens: int) -> int:
    return (tokens - 1) // CHUNK * CHUNK


@pytest.mark.parametrize(
    "length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK, 5 * CHUNK + 7, 11 * CHUNK + 1]
)
def test_reuse_gives_the_same_tokens(
    daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine, length: int
) -> None:
    """Shorter than a chunk, around one, whole chunks (fully cached), several and a tail; the second
    engine is a new one, which finds what the first stored."""
    prompt = tiny.random_tokens(length, seed=length)
    truth = cold(model, prompt)
    first = start_engine(daemon, model, OPTIONS)
    stored = first.generate(prompt, NEW)
    check_sound(first)
    second = start_engine(daemon, model, OPTIONS)
    warm = second.generate(prompt, NEW)
    check_sound(second)
    assert (stored.tokens, stored.reused_tokens) == (truth.tokens, 0)
    assert (warm.tokens, warm.reused_tokens) == (truth.tokens, whole_chunks(length))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_family_reuses(daemon: OwnDaemon, start_engine: StartEngine, family: str) -> None:
    model = tiny.ours(tiny.oracle(family))
    prompt = tiny.random_tokens(3 * CHUNK + 5)
    truth = cold(model, prompt)
    for reused in (0, 3 * CHUNK):
        engine = start_engine(daemon, model, OPTIONS)
        made = engine.generate(prompt, NEW)
        assert (made.tokens, made.reused_tokens) == (truth.tokens, reused)
        check_sound(engine)


def test_next_turn_reuses_decoded_tokens(
    daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """A conversation: the second turn's prompt holds the first turn's answer, whose full chunks
    were stored as they were decoded."""
    prompt = tiny.random_tokens(CHUNK + 3, seed=70)
    engine = start_engine(daemon, model, OPTIONS)
    answer = engine.generate(prompt, 2 * CHUNK).tokens
    check_sound(engine)
    turn = [*prompt, *answer, *tiny.random_tokens(9, seed=71)]
    made = start_engine(daemon, model, OPTIONS).generate(turn, NEW)
    assert made.reused_tokens == 3 * CHUNK
    assert made.tokens == cold(model, turn).tokens


def test_the_same_weights_in_another_folder_hit(
    daemon: OwnDaemon, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Two nodes, or two folders of one: the KV is the weights', wherever their files lie."""
    prompt = tiny.random_tokens(4 * CHUNK, seed=79)
    for folder, reused in (("here", 0), ("there", 3 * CHUNK)):
        model = load_model(str(tiny.save(tmp_path / folder)))
        engine = start_engine(daemon, model, OPTIONS)
        assert engine.generate(prompt, NEW).reused_tokens == reused
        check_sound(engine)


def test_other_weights_or_types_never_hit(
    daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """field case 12: the same tokens under other weights, another rope, another element type or
    another block size than they were stored with are misses, and right."""
    prompt = tiny.random_tokens(4 * CHUNK, seed=80)
    engine = start_engine(daemon, model, OPTIONS)
    engine.generate(prompt, NEW)
    check_sound(engine)
    other = tiny.oracle("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[3, 3] += 1.0
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    strangers = [
        (tiny.ours(other), OPTIONS),
        (tiny.ours(tiny.oracle("llama", **rope)), OPTIONS),
        (tiny.ours(tiny.oracle("llama").to(torch.bfloat16)), OPTIONS),
        (model, replace(OPTIONS, tokens_per_block=32)),
    ]
    for stranger, options in strangers:
        made = start_engine(daemon, stranger, options).generate(prompt, NEW)
        assert (made.reused_tokens, made.tokens) == (0, cold(stranger, prompt).tokens)
    again = start_engine(daemon, model, OPTIONS).generate(prompt, NEW)
    assert again.reused_tokens == 3 * CHUNK


def test_load_never_writes_what_it_doesnt_own(
    daemon: OwnDaemon, model: CausalModel, start_engine: StartEngine
) -> None:
    """field case 18: block 16, chunk 256 and every prompt length from 240 to 530, each with what
    the daemon holds by then. Canaries in every block of others stay, and the final KV equals what
    was computed without a cache; free blocks hold NaN, so nothing old passes for new."""
    options = EngineOptions(16, 256, cache_tokens=1024, prefill_tokens=256)
    tokens = tiny.random_tokens(530, seed=2)
    engine = start_engine(daemon, model, options)
    allocator, kv = engine.cache.allocator, engine.cache.kv
    foreign = list(allocator.allocate(-1, 28) or ())
    ours = [block for block in range(engine.cache.shape.num_blocks) if block not in foreign]
    kv[:, :, foreign] = canary = torch.full_like(kv[:, :, foreign], 3.25)
    with Engine(model, options) as plain:
        plain.generate(tokens, 1)
        truth = kv_of(plain, len(tokens))
    reused = set()
    for length in range(240, 531):
        assert engine.flush(20.0)
        kv[:, :, ours] = torch.nan
        warm = engine.generate(tokens[:length], 1)
        reused.add((warm.reused_tokens, (length - 1) // 256 * 256))
        assert engine.flush(20.0)
        assert torch.equal(kv[:, :, foreign], canary), length
        assert torch.allclose(kv_of(engine, length), truth[:, :, :length], atol=1e-5), length
    assert reused == {(0, 0), (256, 256), (512, 512)}
    allocator.free(-1, foreign)
    check_sound(engine)


def kv_of(engine: Engine, length: int) -> torch.Tensor:
    """The KV that the engine's last request left: [layers, 2, length, heads, head_dim]. The
    allocator gives out what was freed last, so a request of the same size names its blocks."""
    blocks = engine.cache.allocator.allocate(-2, engine.cache.shape.blocks_for(length + 1))
    assert blocks is not None
    engine.cache.allocator.free(-2, blocks[::-1])
    return engine.cache.kv[:, :, list(blocks[::-1])].flatten(2, 3)[:, :, :length].clone()
