"""The engine alone, without a daemon: decoding, sampling, limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kvstore_transformers.engine import Engine, EngineOptions
from kvstore_transformers.errors import RequestError
from kvstore_transformers.sampling import Sampling

from tests.connectors import tiny

OPTIONS = EngineOptions(
    tokens_per_block=16, tokens_per_chunk=32, cache_tokens=512, prefill_tokens=64
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny.ours(tiny.oracle("llama")), OPTIONS) as opened:
        yield opened
        opened.cache.allocator.check_invariants()
        assert opened.cache.allocator.available() == opened.cache.shape.num_blocks


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("length", [1, 15, 64, 65, 129])
def test_greedy_equals_transformers_generate(family: str, length: int) -> None:
    model = tiny.oracle(family)
    prompt = tiny.random_tokens(length)
    with torch.inference_mode():
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    with Engine(tiny.ours(model), OPTIONS) as engine:
        got = engine.generate(prompt, 20)
    assert list(got.tokens) == want[0, length:].tolist()
    assert (got.prompt_tokens, got.reused_tokens, got.finish) == (length, 0, "length")
    assert 0.0 < got.ttft_s <= got.total_s


def test_generation_ends_at_an_end_token_unless_told_otherwise(engine: Engine) -> None:
    prompt = tiny.random_tokens(40)
    free = engine.generate(prompt, 10).tokens
    engine.model.spec = replace(engine.model.spec, end_tokens=(free[4],))
    first = free.index(free[4])
    ended = engine.generate(prompt, 10)
    assert ended.tokens == free[: first + 1]
    assert ended.finish == "end"
    assert engine.generate(prompt, 10, ignore_end=True).tokens == free


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    """The same seed draws the same tokens in a later request, another seed others."""
    prompt = tiny.random_tokens(40)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    first = engine.generate(prompt, 30, sampling).tokens
    assert engine.generate(prompt, 30, sampling).tokens == first
    assert engine.generate(prompt, 30, replace(sampling, seed=6)).tokens != first


def test_top_p_draws_from_the_likely_tokens_only() -> None:
    """0.5, 0.3, 0.2: at top_p 0.6 the first two are drawn, in their proportion; at a tiny top_p
    the first alone."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    generator = Sampling().generator()
    half = Sampling(temperature=1.0, top_p=0.6)
    drawn = [half.choose(logits, generator) for _ in range(400)]
    assert set(drawn) == {1, 2}
    assert 0.5 < drawn.count(1) / 400 < 0.75
    narrow = Sampling(temperature=1.0, top_p=0.01)
    assert {narrow.choose(logits, generator) for _ in range(50)} == {1}
    assert Sampling().choose(logits, generator) == 1


@pytest.mark.parametrize(
    ("tokens", "count", "sampling", "said"),
    [
        ([], 4, Sampling(), "1 or more"),
        ([1], 0, Sampling(), "1 or more"),
        ([300], 4, Sampling(), "0..299"),
        ([-1], 4, Sampling(), "0..299"),
        ([1] * 500, 13, Sampling(), "up to 512"),
        ([1], 4, Sampling(temperature=-1.0), "temperature"),
        ([1], 4, Sampling(top_p=0.0), "top_p"),
    ],
    ids=str,
)
def test_request_that_cant_be_served_is_refused(
    engine: Engine, tokens: list[int], count: int, sampling: Sampling, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        engine.generate(tokens, count, sampling)


def test_request_fills_the_cache_to_its_last_block(engine: Engine) -> None:
    assert len(engine.generate(tiny.random_tokens(500), 12).tokens) == 12


def test_chunks_that_dont_fit_blocks_are_refused() -> None:
    with (
        pytest.raises(RequestError, match=r"tokens_per_chunk=24.*multiples of tokens_per_block=16"),
        Engine(tiny.ours(tiny.oracle("llama")), replace(OPTIONS, tokens_per_chunk=24)),
    ):
        pass


def test_closed_engine_refuses_requests() -> None:
    engine = Engine(tiny.ours(tiny.oracle("llama")), OPTIONS)
    with engine:
        pass
    with pytest.raises(RequestError, match="open"):
        engine.generate([1], 1)
    engine.close()
