"""An engine process: loads a model, then answers one JSON line for each on its standard input.

The first line out is ``{"ready": true, ...}``, or ``{"error": "..."}`` before it ends with status
1. Then each line in is ``{"op": NAME, ...}``:

- ``prompts``: text, questions, context_tokens, question_tokens_max -> context, questions (tokens)
- ``generate``: tokens, max_new_tokens -> tokens, text, prompt_tokens, reused_tokens, ttft_s,
  total_s, failures
- ``connected``: timeout_s -> connected: whether the daemon knows this engine by then
- ``flush``: timeout_s -> flushed: whether every store has ended by then

The process ends with its input. An operation that is refused answers ``{"error": "..."}`` and
changes nothing. Everything else that is printed goes to standard error. Run it as
``python -m kvstore_transformers.worker --model ...``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvstore_transformers.config import share_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; returns its exit status."""
    share_cores()
    from kvstore_transformers.operations import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
