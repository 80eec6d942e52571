"""Cold: what kvstore costs an engine that never hits.

The reference engine computes random prompts with a daemon and without one, batches of each in turn.
Both run the same prompts. The side with a daemon looks each up in vain, and what it stores is
copied and written to NVMe while the next prompt of the batch is computed; what is left of it at the
batch's end has ended before the other side's turn. Their answers must be equal.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.daemon import BenchDaemon
from bench.harness import MILLI, Bench, Question, Size, at_most, p50
from kvstore import Client

if TYPE_CHECKING:
    from kvstore_transformers.engine import Engine
    from kvstore_transformers.model import CausalModel

_SETTINGS = {
    "KVSTORE_HOST_SIZE": "512MiB",
    "KVSTORE_NVME_SIZE": "1GiB",
    "KVSTORE_NVME_SLAB_SIZE": "128MiB",
}
_FLUSH_S = 60.0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``tokens`` a prompt; ``prompts`` a batch; ``rounds`` of a batch each in a run."""

    tokens: int
    prompts: int
    rounds: int


_SIZES = {Size.FULL: _Sizes(512, 3, 4), Size.SMALL: _Sizes(160, 2, 2)}


class Sides:
    """Two engines of one model, one of them with a daemon."""

    def __init__(self, daemon: BenchDaemon, with_daemon: Engine, without: Engine) -> None:
        self._daemon = daemon
        self._engines = {"with": with_daemon, "without": without}
        self._answers: dict[str, list[tuple[int, ...]]] = {}
        self._stored = 0

    def batch(self, side: str, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Run prompts back to back; the seconds to each one's first token."""
        engine = self._engines[side]
        done = [engine.generate(prompt, 1, ignore_end=True) for prompt in prompts]
        assert not any(generation.reused_tokens for generation in done), "a prompt was reused"
        assert engine.flush(_FLUSH_S), "a store didn't end"
        self._daemon.drain()
        self._answers[side] = [generation.tokens for generation in done]
        return [generation.ttft_s for generation in done]

    def check(self) -> None:
        """Both gave the same answers, and the one with a daemon stored its prompts."""
        assert self._answers["with"] == self._answers["without"], "the answers differ"
        stored = self._daemon.stats()["traffic"]["stored_chunks"]
        assert stored > self._stored, "nothing was stored"
        self._stored = stored


def measure(bench: Bench) -> None:
    """One row: time to first token with a daemon, by without."""
    from kvstore_transformers.config import share_cores

    share_cores()
    from kvstore_transformers.connect import connect
    from kvstore_transformers.engine import Engine

    sizes = _SIZES[bench.size]
    model = _model(bench.size)
    with ExitStack() as stack:
        daemon = stack.enter_context(BenchDaemon(bench.folder, _SETTINGS))
        client = stack.enter_context(Client(daemon.address))
        joined = stack.enter_context(Engine(model, connect=connect(client, model, "cold")))
        alone = stack.enter_context(Engine(model))
        assert joined.wait_connected(_FLUSH_S), "the daemon doesn't know the engine"
        sides = Sides(daemon, joined, alone)
        chance = random.Random(1)
        _round(sides, _prompts(chance, sizes), 0)
        runs = []
        for _ in range(bench.runs):
            rounds = [_round(sides, _prompts(chance, sizes), n) for n in range(sizes.rounds)]
            runs.append({side: [sum(r[side]) for r in rounds] for side in ("with", "without")})
    ratios = [
        p50([ours / theirs for ours, theirs in zip(run["with"], run["without"], strict=True)])
        for run in runs
    ]
    with_ms, without_ms = (
        ", ".join(f"{p50(run[side]) / sizes.prompts * MILLI:.0f}" for run in runs)
        for side in ("with", "without")
    )
    bench.row(
        f"random prompts of {sizes.tokens:,} tokens: first token, by without kvstore",
        "x", ratios, at_most(1.03),
        f"{model.name.rpartition('/')[2]}: with {with_ms} ms, without {without_ms} ms",
    )  # fmt: skip


def _round(sides: Sides, prompts: Sequence[Sequence[int]], number: int) -> dict[str, list[float]]:
    order = ("with", "without") if number % 2 else ("without", "with")
    taken = {side: sides.batch(side, prompts) for side in order}
    sides.check()
    return taken


def _prompts(chance: random.Random, sizes: _Sizes) -> list[list[int]]:
    return [[chance.randrange(2, 300) for _ in range(sizes.tokens)] for _ in range(sizes.prompts)]


def _model(size: Size) -> CausalModel:
    """SmolLM2-135M, which `make run` fetches as well; a tiny random model at a small size."""
    if size is Size.SMALL:
        from tests.connectors.tiny import oracle, ours

        return ours(oracle("llama"))
    from kvstore_transformers.config import small_model_folder
    from kvstore_transformers.fetch import fetch
    from kvstore_transformers.loading import load_model

    return load_model(str(fetch(small_model_folder(), lambda line: print(line, file=sys.stderr))))


QUESTION = Question("cold", "what does kvstore cost an engine that never hits?", measure)
