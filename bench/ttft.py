"""Time to first token and throughput of a real engine, with and without kvstore.

``python bench/ttft.py --engine vllm`` starts two engines of one model, one with the connector and a
daemon beside it, one without, and lets them take turns on the same prompts.

For each prefix length and number of users, round by round:

- ``without``: the engine without the connector computes
- ``cold``: the one with it does; it looks up in vain and stores
- ``local``: a hit in the engine's own prefix cache
- ``host``, ``nvme``: an external hit, after the engine's own cache was dropped; for ``nvme`` the
  daemon was restarted too

A prompt is the shared prefix and a question of 32 tokens of its own; ``memcpy`` is one copy of the
bytes of the hit. Then what no reuse costs: batches of prompts that nobody has seen, back to back,
so that the stores of one prompt go on while the next is computed, with and without, in turn.

All answers to a prompt must be the same tokens, each way must have what it is named after, and the
last lines say which bars are met (``--gate``: exit with 1 where one isn't). Needs the environment
of ``make test-vllm``: its Python is named by --python or VLLM_TEST_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connectors")]

from bench.facts import Watch, describe, facts  # noqa: E402
from bench.harness import (  # noqa: E402
    Bench,
    Size,
    at_least,
    at_most,
    heading,
    interleave,
    p50,
)

if TYPE_CHECKING:
    from tests.vllm.conftest import EngineProcess

WAYS = ("without", "cold", "local", "host", "nvme")
QUESTION = 32
TOKENS_OUT = 8
BATCH_OUT = 16
LOOKUP_S = 5.0
"""A hit that a disturbed machine answered late would end the benchmark otherwise."""
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""KV of a token of SmolLM2-135M in float32."""
BATCH_ROUNDS = 2
"""Rounds of batches for each round of hits: what no reuse costs is less than what a batch's time
varies by, and an even number has each side go first as often."""
FASTER_TOKENS = 4096
"""The bar of a hit's speed is for prefixes from here on."""
SIZES = {
    "KVSTORE_HOST_SIZE": "1GiB",
    "KVSTORE_NVME_SIZE": "6GiB",
    "KVSTORE_NVME_SLAB_SIZE": "64MiB",
}
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc guesses from what a process has freed so far whether a step's temporary memory is given
back to the system, and faulted in again by the next step. Left alone, one engine guesses otherwise
than its twin and is up to a fifth slower for as long as it lives, with kvstore or without."""
Answer = dict[str, Any]


class Pair:
    """A daemon and two engines, one with the connector. A context manager."""

    def __init__(self, folder: Path) -> None:
        from tests.conftest import RunningDaemon, private_environment

        self.daemon = RunningDaemon(folder, private_environment(folder, SIZES), ())
        self.daemon.start()
        extra = {"socket": self.daemon.socket, "lookup_timeout_s": LOOKUP_S}
        self.joined = _engine(folder / "joined.log", extra)
        self.joined.wait()
        self.alone = _engine(folder / "alone.log", None)

    def __enter__(self) -> Pair:
        self.alone.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.alone.close()
        self.joined.close()
        self.daemon.kill()

    def forget(self) -> None:
        """Drop both engines' own prefix caches, when all that they do has ended."""
        for engine in (self.joined, self.alone):
            engine.fresh()

    def restart_daemon(self) -> None:
        """What was stored is on NVMe only."""
        self.daemon.wait_for_stats(
            lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
        )
        self.daemon.kill()
        self.daemon.start()
        self.daemon.wait_for_stats(lambda s: not any(tier["scanning"] for tier in s["tiers"]))
        assert self.joined.call("wait_ready")["ready"]

    def round(self, seed: int, prefix: int, users: int) -> dict[str, dict[str, float]]:
        """Each way once, on prompts that nobody has seen."""
        chance = random.Random(f"{seed}/{prefix}/{users}")
        shared = _tokens(chance, prefix)
        prompts = [shared + _tokens(chance, QUESTION) for _ in range(users)]
        found: dict[str, dict[str, float]] = {}
        tokens: dict[str, Any] = {}
        for way in WAYS if seed % 2 else (*WAYS[1:], WAYS[0]):
            if way != "local":
                self.forget()
            if way == "nvme":
                self.restart_daemon()
            engine = self.alone if way == "without" else self.joined
            found[way], tokens[way] = _measure(engine, prompts, prefix if way in WAYS[2:] else 0)
        for way in WAYS:
            assert tokens[way] == tokens["without"], f"{way} gives other tokens"
        return found

    def batch_s(self, name: str, seed: int, batch: tuple[int, int, int]) -> float:
        """The seconds of a batch (prompts one after the other, users at once, tokens each) that
        nobody has seen, by the engine ``with`` or ``without`` the connector."""
        prompts, users, tokens = batch
        chance = random.Random(f"batch {seed}/{batch}")
        engine = self.joined if name == "with" else self.alone
        engine.fresh()
        taken_s = 0.0
        for _ in range(prompts):
            requests = [
                {"prompt": _tokens(chance, tokens), "max_tokens": BATCH_OUT} for _ in range(users)
            ]
            answer = engine.call("run", requests=requests)
            assert not any(result["cached"] for result in answer["results"])
            taken_s += answer["seconds"]
        return taken_s


def _engine(log: Path, extra: dict[str, Any] | None) -> EngineProcess:
    from tests.vllm.conftest import MODEL, EngineProcess

    arguments = {"model": str(MODEL), "engine": {"max_model_len": 4608}, "extra": extra}
    return EngineProcess(arguments, log)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 40_000) for _ in range(count)]


def _measure(
    engine: EngineProcess, prompts: list[list[int]], cached: int
) -> tuple[dict[str, float], Any]:
    """Seconds to the first token, on average over the users, and tokens a second, prompts
    included."""
    requests = [{"prompt": tokens, "max_tokens": TOKENS_OUT} for tokens in prompts]
    answer = engine.call("run", requests=requests)
    results = answer["results"]
    hits = [result["cached"] for result in results]
    assert min(hits) >= cached - 127 if cached else min(hits) == 0, hits
    moved = sum(len(tokens) + TOKENS_OUT for tokens in prompts)
    return {
        "ttft_s": statistics.fmean(r["first_s"] for r in results),
        "tokens_s": moved / answer["seconds"],
    }, [r["tokens"] for r in results]


def memcpy_s(nbytes: int) -> float:
    """The median time of one copy of so many bytes."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def hits(bench: Bench, pair: Pair, prefix: int, users: int, rounds: int) -> dict[str, Any]:
    """One line of the table; its bars go to ``bench``."""
    made = [pair.round(1 + n, prefix, users) for n in range(rounds)]
    copy_s = memcpy_s(prefix * TOKEN_BYTES)
    found: dict[str, Any] = {"prefix": prefix, "users": users, "memcpy_s": copy_s}
    for way in WAYS:
        for what in ("ttft_s", "tokens_s"):
            found[f"{way}_{what}"] = statistics.median(r[way][what] for r in made)
    line = " ".join(f"{way} {found[f'{way}_ttft_s']:.3f}" for way in WAYS)
    print(f"prefix {prefix}, users {users}: TTFT {line} s", file=bench.out, flush=True)
    ttft = [{way: r[way]["ttft_s"] for way in WAYS} for r in made]
    bar = at_least(10) if prefix >= FASTER_TOKENS else None
    where = f"{prefix:,} tokens, {users} user{'s' if users > 1 else ''}"
    ratios = [r["without"] / r["local"] for r in ttft]
    bench.row(f"{where}: vLLM's own hit, faster than computed", "x", ratios)
    for way in ("host", "nvme"):
        ratios = [r["without"] / r[way] for r in ttft]
        bench.row(f"{where}: hit in {way}, faster than computed", "x", ratios, bar)
    ratios = [r["host"] / (r["local"] + copy_s) for r in ttft]
    bench.row(f"{where}: host by own hit and memcpy", "x", ratios, at_most(1.5))
    return found


def no_reuse(bench: Bench, pair: Pair, batch: tuple[int, int, int], rounds: int) -> None:
    """One row: the time of batches with kvstore, by without."""

    def side(name: str, run: int) -> Any:
        return lambda number: pair.batch_s(name, run * rounds + number, batch)

    ratios, times = [], []
    for run in range(bench.runs):
        taken = interleave({name: side(name, run) for name in ("without", "with")}, rounds)
        ratios.append(p50(taken["with"]) / p50(taken["without"]))
        times += taken["without"]
    prompts, users, tokens = batch
    what = f"{prompts} x {users} prompts of {tokens:,} tokens, nothing reused"
    beside = f"a batch takes {p50(times):.2f} s without; {rounds} batches a side in each run"
    bench.row(what, "x", ratios, at_most(1.03), beside)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _parse(argv)
    if not Path(options.python).is_file():
        print("ttft: name the Python of an environment with vLLM by --python", file=sys.stderr)
        return 2
    os.environ |= MALLOC | {"VLLM_TEST_PYTHON": options.python}
    watch = Watch.begin()
    started_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvb-"))
    bench = Bench(Size.FULL, folder, question="ttft")
    lines: list[dict[str, Any]] = []
    try:
        print(describe(watch, folder))
        with Pair(folder) as pair:
            pair.round(0, 256, 1)
            heading(bench.out)
            for prefix in options.prefix:
                for users in options.users:
                    lines.append(hits(bench, pair, prefix, users, options.rounds))
            for batch in ((2, 1, options.batch), (1, 4, options.batch // 2)):
                no_reuse(bench, pair, batch, BATCH_ROUNDS * options.rounds)
        document = facts(watch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _conclude(bench, watch, document | {"rounds": options.rounds, "table": lines}, options,
                     time.monotonic() - started_s)  # fmt: skip


def _conclude(
    bench: Bench,
    watch: Watch,
    document: dict[str, Any],
    options: argparse.Namespace,
    taken_s: float,
) -> int:
    """Print the bars that aren't met, warnings and the JSON line; the exit status."""
    from kvstore_vllm.environment import VLLM

    missed = [row for row in bench.rows if not row.met()]
    for row in missed:
        print(f"bar not met: {row.name}: {row.median():.3g} {row.unit}")
    for warning in watch.warnings():
        print(f"warning: {warning}")
    bars = sum(row.bar is not None for row in bench.rows)
    print(f"{bars - len(missed)} of {bars} bars met, {taken_s:.0f} s")
    rows = [row.document() for row in bench.rows]
    known = {"bench": "ttft", "engine": options.engine, "vllm": VLLM, "rows": rows}
    print(json.dumps(known | document | {"warnings": watch.warnings()}))
    return 1 if options.gate and missed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=["vllm"], default="vllm")
    parser.add_argument("--python", default=os.environ.get("VLLM_TEST_PYTHON", ""))
    parser.add_argument("--prefix", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1024,
                        help="tokens of a prompt where nothing is reused")  # fmt: skip
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a bar isn't met")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
