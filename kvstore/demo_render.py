"""What the demo shows: progress on standard error while it runs, the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, TextIO

from kvstore.report import table
from kvstore.units import format_duration

BAR_CELLS = 24


class Progress:
    """Steps done out of ``total``: a bar that moves on a terminal, else one line a step."""

    def __init__(self, out: TextIO, total: int) -> None:
        self._out = out
        self._total = total
        self._done = 0

    def begin(self, what: str) -> None:
        """Say what is under way now."""
        if not self._out.isatty():
            print(f"[{self._done}/{self._total}] {what}", file=self._out, flush=True)
            return
        filled = BAR_CELLS * self._done // self._total
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        print(f"\r\x1b[K[{bar}] {self._done}/{self._total} {what}", end="", file=self._out)
        self._out.flush()

    def end(self) -> None:
        """What was under way is done."""
        self._done += 1

    def close(self) -> None:
        """Leave the terminal's line as it was."""
        if self._out.isatty():
            print("\r\x1b[K", end="", file=self._out, flush=True)


def render(result: dict[str, Any]) -> str:
    """The demo's result for a person."""
    head = ("step", "prompt tokens", "tokens reused", "tier", "TTFT with", "TTFT without",
            "speed-up", "output equal")  # fmt: skip
    rows = [_row(step) for step in result["steps"]]
    lines = [
        f"model {result['model']} ({result['dtype']}), shared context of "
        f"{result['context_tokens']} tokens, {result['tokens_per_chunk']} tokens a chunk",
        "",
        table(head, rows),
        "",
    ]
    speedups = [step["speedup"] for step in result["steps"] if step["tokens_reused"]]
    if speedups:
        lines.append(
            f"with reuse the first token came {min(speedups):.1f} to {max(speedups):.1f} times "
            f"sooner (median {median(speedups):.1f})"
        )
    return "\n".join([*lines, *result["notes"], *_problems(result["problems"])])


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    return (
        step["name"],
        str(step["prompt_tokens"]),
        str(step["tokens_reused"]),
        step["tier"],
        format_duration(step["ttft_s"]),
        format_duration(step["ttft_cold_s"]),
        f"{step['speedup']:.1f}x" if step["tokens_reused"] else "-",
        "yes" if step["output_equal"] else "NO",
    )


def _problems(problems: Sequence[str]) -> list[str]:
    return [f"PROBLEM: {problem}" for problem in problems]
