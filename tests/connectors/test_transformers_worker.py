"""The engine process: whatever line it reads, it answers with one line and reads on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.connectors import tiny


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a tiny model and no daemon."""
    folder = tiny.save(tmp_path_factory.mktemp("model") / "tiny")
    command = [sys.executable, "-m", "kvstore_transformers.worker", "--model", str(folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["ready"]
    yield process
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


def ask(worker: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
    """Its answer to one line."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line + b"\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    assert answer, "the process ended"
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1, 2]", "object"),
        (b"7", "object"),
        (b'"generate"', "object"),
        (b"null", "object"),
        (b"{", "not a JSON line"),
        (b"\xff\xfe", "not a JSON line"),
        (b"[" * 100_000, "not a JSON line"),
        (b"9" * 5_000, "not a JSON line"),
        (b"{}", "valid are prompts, generate"),
        (b'{"op": ["generate"]}', "valid are prompts, generate"),
        (b'{"op": "flush"}', "timeout_s"),
        (b'{"op": "flush", "timeout_s": "soon"}', "timeout_s='soon'"),
        (b'{"op": "flush", "timeout_s": null}', "timeout_s=None"),
        (b'{"op": "flush", "timeout_s": true}', "timeout_s=True"),
        (b'{"op": "flush", "timeout_s": NaN}', "timeout_s=nan"),
        (b'{"op": "connected", "timeout_s": 1e300}', "timeout_s=1e+300"),
        (b'{"op": "connected", "timeout_s": -1}', "timeout_s=-1"),
        (b'{"op": "generate", "tokens": 7, "max_new_tokens": 1}', "tokens"),
        (b'{"op": "generate", "tokens": [1, "a"], "max_new_tokens": 1}', "tokens"),
        (b'{"op": "generate", "tokens": [1e99], "max_new_tokens": 1}', "tokens"),
        (b'{"op": "generate", "tokens": [1], "max_new_tokens": "many"}', "max_new_tokens"),
        (b'{"op": "prompts", "text": 1, "questions": ["a"], "context_tokens": 4, '
         b'"question_tokens_max": 4}', "text"),
        (b'{"op": "prompts", "text": "a", "questions": 3, "context_tokens": 4, '
         b'"question_tokens_max": 4}', "questions"),
        (b'{"op": "prompts", "text": "a", "questions": ["a"], "context_tokens": "x", '
         b'"question_tokens_max": 4}', "context_tokens"),
    ],
    ids=lambda value: value[:60] if isinstance(value, bytes) else "",
)  # fmt: skip
def test_a_bad_line_is_answered_and_the_next_one_served(
    worker: subprocess.Popen[bytes], line: bytes, words: str
) -> None:
    """A line that isn't an object, a timeout that isn't one: one error, naming the value."""
    answer = ask(worker, line)
    assert list(answer) == ["error"]
    assert words in answer["error"]
    assert "\n" not in answer["error"]
    assert ask(worker, b'{"op": "connected", "timeout_s": 0}') == {"connected": False}


def test_a_good_line_is_served(worker: subprocess.Popen[bytes]) -> None:
    """As the demo asks it."""
    answer = ask(worker, b'{"op": "generate", "tokens": [1, 2, 3], "max_new_tokens": 2}')
    assert answer["prompt_tokens"] == 3
    assert len(answer["tokens"]) in (1, 2)
    assert ask(worker, b'{"op": "flush", "timeout_s": 5}') == {"flushed": True}
