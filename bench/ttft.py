"""Time to first token and throughput of a real engine, with and without kvstore.

``python bench/ttft.py --engine vllm`` measures, for each prefix length and number of users, in one
engine process and interleaved round by round:

- ``plain``: nothing is cached, the connector left out of it (the request opts out)
- ``cold``: nothing is cached, the connector looks up and stores: what no reuse costs
- ``local``: a hit in the engine's own prefix cache
- ``host``, ``nvme``: an external hit, after the engine's own cache was dropped; for ``nvme`` the
  daemon was restarted too

Every answer's tokens must be those of ``plain``. A prompt is the shared prefix and a question of 32
tokens of its own; ``memcpy`` is one copy of the bytes of the hit. Prints a table and one JSON line.
Needs the environment of ``make test-vllm``: its Python is named by --python or VLLM_TEST_PYTHON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "connectors")]

WAYS = ("plain", "cold", "local", "host", "nvme")
QUESTION = 32
TOKENS_OUT = 8
OPTED_OUT = {"kvstore.read": False, "kvstore.write": False}
SIZES = {
    "KVSTORE_HOST_SIZE": "2GiB",
    "KVSTORE_NVME_SIZE": "6GiB",
    "KVSTORE_NVME_SLAB_SIZE": "64MiB",
}


class Bench:
    """A daemon and an engine, and the rounds that are measured on them. A context manager."""

    def __init__(self, folder: Path) -> None:
        from tests.conftest import RunningDaemon, private_environment
        from tests.vllm.conftest import MODEL, EngineProcess

        self.daemon = RunningDaemon(folder, private_environment(folder, SIZES), ())
        self.daemon.start()
        arguments = {
            "model": str(MODEL),
            "engine": {"max_model_len": 4608},
            "extra": {"socket": self.daemon.socket},
        }
        self.engine = EngineProcess(arguments, folder / "engine.log")

    def __enter__(self) -> Bench:
        self.engine.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()
        self.daemon.kill()

    def round(self, seed: int, prefix: int, users: int) -> dict[str, dict[str, float]]:
        """Each way once, on prompts that nobody has seen; seconds to the first token, on average
        over the users, and tokens a second, prompts included."""
        chance = random.Random(f"{seed}/{prefix}/{users}")
        shared = [chance.randrange(1000, 40_000) for _ in range(prefix)]
        prompts = [
            shared + [chance.randrange(1000, 40_000) for _ in range(QUESTION)] for _ in range(users)
        ]
        found: dict[str, dict[str, float]] = {}
        tokens: dict[str, Any] = {}
        ways = WAYS if seed % 2 else ("cold", "plain", *WAYS[2:])
        for way in ways:
            if way != "local":
                self._forget(way)
            found[way], tokens[way] = self._measure(prompts, way)
        for way in WAYS:
            assert tokens[way] == tokens["plain"], f"{way} gives other tokens"
        return found

    def _forget(self, way: str) -> None:
        self.engine.fresh()
        if way == "nvme":
            self.daemon.wait_for_stats(
                lambda s: not s["traffic"]["moves_in_flight"] and not s["traffic"]["write_backlog"]
            )
            self.daemon.stop()
            self.daemon.start()
            assert self.engine.call("wait_ready")["ready"]

    def _measure(self, prompts: list[list[int]], way: str) -> tuple[dict[str, float], Any]:
        requests = [{"prompt": tokens, "max_tokens": TOKENS_OUT} for tokens in prompts]
        if way == "plain":
            requests = [request | {"params": OPTED_OUT} for request in requests]
        answer = self.engine.call("run", requests=requests)
        results = answer["results"]
        if way in ("host", "nvme", "local"):
            assert all(r["cached"] >= len(prompts[0]) - QUESTION - 127 for r in results), results
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


def summary(rounds: list[dict[str, dict[str, float]]], prefix: int) -> dict[str, Any]:
    """Medians of each way, and the ratios that matter, each the median over the rounds."""
    token_bytes = 30 * 2 * 3 * 64 * 4
    copy_s = memcpy_s(prefix * token_bytes)
    found: dict[str, Any] = {"memcpy_s": copy_s}
    for way in WAYS:
        for what in ("ttft_s", "tokens_s"):
            found[f"{way}_{what}"] = statistics.median(r[way][what] for r in rounds)
    ratios = {
        "host_faster": [r["plain"]["ttft_s"] / r["host"]["ttft_s"] for r in rounds],
        "nvme_faster": [r["plain"]["ttft_s"] / r["nvme"]["ttft_s"] for r in rounds],
        "host_by_local": [r["host"]["ttft_s"] / (r["local"]["ttft_s"] + copy_s) for r in rounds],
        "cold_by_plain": [r["cold"]["ttft_s"] / r["plain"]["ttft_s"] for r in rounds],
    }
    for name, values in ratios.items():
        found[name] = statistics.median(values)
        found[f"{name}_spread"] = [min(values), max(values)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=["vllm"], default="vllm")
    parser.add_argument("--python", default=os.environ.get("VLLM_TEST_PYTHON", ""))
    parser.add_argument("--prefix", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    if not Path(options.python).is_file():
        print("ttft: name the Python of an environment with vLLM by --python", file=sys.stderr)
        return 2
    os.environ["VLLM_TEST_PYTHON"] = options.python
    folder = Path(tempfile.mkdtemp(prefix="kvb-"))
    measured: list[dict[str, Any]] = []
    try:
        with Bench(folder) as bench:
            bench.round(0, 256, 1)
            for prefix in options.prefix:
                for users in options.users:
                    rounds = [bench.round(1 + n, prefix, users) for n in range(options.rounds)]
                    row = {"prefix": prefix, "users": users} | summary(rounds, prefix)
                    measured.append(row)
                    show(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    from kvstore_vllm.environment import VLLM

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    ).stdout.strip()  # fmt: skip
    facts = {"bench": "ttft", "engine": options.engine, "rounds": options.rounds,
             "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
             "python": platform.python_version(), "vllm": VLLM,
             "load": os.getloadavg()[0], "commit": commit, "rows": measured}  # fmt: skip
    print(json.dumps(facts))
    return 0


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    times = " ".join(f"{way} {row[f'{way}_ttft_s']:7.3f}" for way in WAYS)
    print(f"prefix {row['prefix']:5} users {row['users']:2}: {times} s", end=" | ")
    print(f"host {row['host_faster']:.1f}x nvme {row['nvme_faster']:.1f}x", end=" | ")
    print(f"host by local and memcpy {row['host_by_local']:.2f}", end=" | ")
    print(f"cold by plain {row['cold_by_plain']:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
