"""The reference engine on a real model: SmolLM2-135M-Instruct."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvstore_transformers.engine import Engine
from kvstore_transformers.fetch import fetch
from kvstore_transformers.loading import load_model, load_tokenizer
from kvstore_transformers.model import CausalModel
from kvstore_transformers.prompts import shared_prompts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from tests.connectors.test_transformers_model import logits_of


@pytest.fixture(scope="module")
def model(smollm2: Path) -> CausalModel:
    return load_model(str(smollm2))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(smollm2))


@pytest.fixture
def engine(model: CausalModel) -> Iterator[Engine]:
    with Engine(model) as opened:
        yield opened


def test_logits_equal_transformers_on_a_real_model(smollm2: Path, model: CausalModel) -> None:
    """Thirty layers in float32, paged and cut at odd places, stay within 1e-3."""
    oracle = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokens = [(number * 37) % 49_000 for number in range(300)]
    with torch.inference_mode():
        want = oracle(torch.tensor([tokens])).logits[0]
    got = logits_of(model, tokens, [128, 129, 256])
    assert (got - want).abs().max() < 1e-3
    assert want.abs().max() > 1.0


def test_answer_makes_sense(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    made = engine.generate(list(prompt), 24)
    text = tokenizer.decode(list(made.tokens), skip_special_tokens=True)
    assert "Paris" in text
    assert made.finish == "end"


def test_shared_prompts_are_the_chat_template_with_the_question_last(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Context and question together decode to what the template renders; the context is whole
    chunks, whatever the question."""
    made = shared_prompts(tokenizer, "A text about blocks. ", ["Why?", "How?"], 256, 64)
    assert len(made.context) == 256
    assert all(len(question) <= 64 for question in made.questions)
    text = tokenizer.decode([*made.context, *made.questions[0]])
    assert text.startswith("<|im_start|>system")
    assert "<|im_start|>user\nA text about blocks." in text
    assert text.endswith("\n\nQuestion: Why?<|im_end|>\n<|im_start|>assistant\n")


def test_fetched_folder_is_left_alone(smollm2: Path) -> None:
    """Fetching again does nothing: no download, no new file."""
    before = {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    said: list[str] = []
    assert fetch(smollm2, said.append) == smollm2
    assert said == [f"{smollm2} is there already"]
    assert {file.name: file.stat().st_mtime_ns for file in smollm2.iterdir()} == before
