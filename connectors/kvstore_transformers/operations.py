"""The operations of an engine process, and the loop that answers them; worker.py says what they
are."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Any, TextIO, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from kvstore import Client
from kvstore.core.errors import KVStoreError
from kvstore_transformers.connect import connect
from kvstore_transformers.engine import Engine, EngineOptions
from kvstore_transformers.errors import RequestError
from kvstore_transformers.loading import DTYPES, load_model, load_tokenizer
from kvstore_transformers.prompts import shared_prompts

Fields = dict[str, Any]
Value = TypeVar("Value")
TIMEOUT_MAX_S = 86_400.0


class Operations:
    """The operations, over one open engine."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._operations: dict[str, Callable[[Fields], Fields]] = {
            "prompts": self._prompts,
            "generate": self._generate,
            "connected": self._connected,
            "flush": self._flush,
        }

    def answer(self, line: bytes) -> Fields:
        """One line's answer."""
        try:
            fields = _object(line)
            operation = self._operations.get(str(fields.get("op")))
            if operation is None:
                valid = ", ".join(self._operations)
                raise RequestError(f"worker: op={fields.get('op')!r}; valid are {valid}")
            return operation(fields)
        except KVStoreError as error:
            return {"error": str(error)}

    def _prompts(self, fields: Fields) -> Fields:
        made = shared_prompts(
            self._tokenizer,
            _field(fields, "text", str),
            _fields(fields, "questions", str),
            _field(fields, "context_tokens", int),
            _field(fields, "question_tokens_max", int),
        )
        return {"context": made.context, "questions": made.questions}

    def _generate(self, fields: Fields) -> Fields:
        tokens = _fields(fields, "tokens", int)
        made = self._engine.generate(tokens, _field(fields, "max_new_tokens", int))
        return {
            "tokens": made.tokens,
            "text": self._tokenizer.decode(list(made.tokens), skip_special_tokens=True),
            "prompt_tokens": made.prompt_tokens,
            "reused_tokens": made.reused_tokens,
            "ttft_s": made.ttft_s,
            "total_s": made.total_s,
            "failures": self._engine.failures,
        }

    def _connected(self, fields: Fields) -> Fields:
        return {"connected": self._engine.wait_connected(_timeout_s(fields))}

    def _flush(self, fields: Fields) -> Fields:
        return {"flushed": self._engine.flush(_timeout_s(fields))}


def run(argv: Sequence[str] | None) -> int:
    """Load a model and answer lines; returns the exit status."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    with contextlib.redirect_stdout(sys.stderr):
        return _serve(options, sys.__stdout__ or sys.stdout)


def _serve(options: argparse.Namespace, out: TextIO) -> int:
    """Load, say ready, and answer lines until the input ends."""
    started = time.perf_counter()
    try:
        with _engine(options) as engine:
            operations = Operations(engine, load_tokenizer(options.model))
            _say(
                out,
                {
                    "ready": True,
                    "load_s": time.perf_counter() - started,
                    "dtype": options.dtype,
                    "threads": torch.get_num_threads(),
                    "kv_bytes_per_token": engine.cache.shape.token_bytes(),
                },
            )
            for line in sys.stdin.buffer:
                if line.strip():
                    _say(out, operations.answer(line))
    except KVStoreError as error:
        _say(out, {"error": str(error)})
        return 1
    return 0


def _object(line: bytes) -> Fields:
    """The JSON object that a line is; raises RequestError for anything else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"worker: not a JSON line: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"worker: a line is one JSON object, not {type(fields).__name__}")
    return fields


def _field(fields: Fields, name: str, kind: type[Value]) -> Value:
    value = fields.get(name)
    if not _is(value, kind):
        raise RequestError(f"worker: {name}={value!r:.80}; valid is one {kind.__name__}")
    return cast(Value, value)


def _fields(fields: Fields, name: str, kind: type[Value]) -> list[Value]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(_is(value, kind) for value in values):
        raise RequestError(f"worker: {name}={values!r:.80}; valid is a list of {kind.__name__}")
    return values


def _timeout_s(fields: Fields) -> float:
    value = fields.get("timeout_s")
    if not (_is(value, int | float) and 0 <= cast(float, value) <= TIMEOUT_MAX_S):
        raise RequestError(
            f"worker: timeout_s={value!r:.80}; valid are 0 to {TIMEOUT_MAX_S:g} seconds"
        )
    return cast(float, value)


def _is(value: object, kind: type | UnionType) -> bool:
    """Of the kind, and not true or false, which Python takes for numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


@contextlib.contextmanager
def _engine(options: argparse.Namespace) -> Iterator[Engine]:
    """An open engine, registered with the daemon where an address is given."""
    model = load_model(options.model, options.dtype)
    sizes = EngineOptions(
        tokens_per_block=options.tokens_per_block,
        tokens_per_chunk=options.tokens_per_chunk,
        cache_tokens=options.cache_tokens,
    )
    with contextlib.ExitStack() as stack:
        link = None
        if options.daemon:
            client = stack.enter_context(contextlib.closing(Client(options.daemon)))
            link = connect(client, model, f"transformers-{uuid.uuid4().hex[:12]}")
        yield stack.enter_context(Engine(model, sizes, link))


def _say(out: TextIO, fields: Fields) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()


def _parser() -> argparse.ArgumentParser:
    sizes = EngineOptions()
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_transformers.worker",
        description="An engine process that answers JSON lines.",
    )
    parser.add_argument("--model", required=True, help="model folder or hub ID")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="element type")
    parser.add_argument("--daemon", default="", help="address (unix:/path); empty: no cache")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one a core")
    parser.add_argument("--tokens-per-block", type=int, default=sizes.tokens_per_block)
    parser.add_argument("--tokens-per-chunk", type=int, default=sizes.tokens_per_chunk)
    parser.add_argument("--cache-tokens", type=int, default=sizes.cache_tokens)
    return parser
