"""Prompts over one long shared context: the same leading tokens, whole chunks of them, then a
question.

The context stands before the question, inside the model's chat template where it has one, so that
every prompt starts with the same tokens. It is cut to a given number of tokens, not characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvstore_transformers.errors import RequestError

_CONTEXT, _QUESTION = "kvstore-context-here", "kvstore-question-here"


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """``context`` tokens, shared by all, and the tokens of each question that follow it."""

    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


def shared_prompts(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    questions: Sequence[str],
    context_tokens: int,
    question_tokens_max: int,
) -> SharedPrompts:
    """Cut ``text``, repeated where it is too short, to ``context_tokens`` tokens and put each
    question behind it. Raises RequestError for a question that takes more than its share."""
    before, between, after = _frame(tokenizer)
    lead = tuple(tokenizer.encode(before, add_special_tokens=not before)) if before else ()
    body = tuple(tokenizer.encode(text + "\n\n", add_special_tokens=not before))
    if not body:
        raise RequestError("prompts: the context has no text")
    repeats = -(-context_tokens // len(body))
    context = (lead + body * repeats)[:context_tokens]
    cut = [
        tuple(tokenizer.encode(between + question + after, add_special_tokens=False))
        for question in questions
    ]
    for question, tokens in zip(questions, cut, strict=True):
        if len(tokens) > question_tokens_max:
            raise RequestError(
                f"prompts: {question!r} takes {len(tokens)} tokens; valid are up to "
                f"{question_tokens_max}"
            )
    return SharedPrompts(context, tuple(cut))


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """The text before the context, between it and the question, and after the question."""
    between = "\n\nQuestion: "
    plain = ("", between, "\nAnswer:")
    if not tokenizer.chat_template:
        return plain
    content = _CONTEXT + between + _QUESTION
    rendered = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    )
    before, found, after = rendered.partition(content)
    return (before, between, after) if found else plain
