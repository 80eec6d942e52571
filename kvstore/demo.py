"""``kvstore demo``: the same questions over one long context, with and without the cache.

First an engine without a cache answers every question: that is the time to first token without
reuse, and the answer that every other run must repeat token for token. Then a daemon of the demo's
own and engines with it:

1. one engine: the first question stores the context, the others find it in host memory;
2. the engine is started again: its own memory is gone, the daemon's isn't;
3. the daemon is killed with SIGKILL and started again: the context comes from NVMe.

With ``--redis`` two daemons instead, with folders of their own and one Redis: what an engine stored
at the first, an engine at the second finds.

Everything runs in processes of its own, because only a process that ended has forgotten. The tier
of a step is read from the daemon's counters before and after the request.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.cli_admin import NoDaemonError
from kvstore.cli_status import FAILURE, NO_DAEMON, OK
from kvstore.core.errors import ConfigError
from kvstore.demo_processes import (
    START_S,
    DemoError,
    EngineProcess,
    Fields,
    OwnDaemon,
    daemon_stats,
    module_command,
)
from kvstore.demo_redis import OWN, DemoRedis
from kvstore.demo_render import Progress, render
from kvstore.demo_text import QUESTIONS, shared_text

QUESTION_TOKENS_MAX = 64
MIB = 1 << 20
NEEDED = ("torch", "transformers", "safetensors")
FIRST, ENGINE_RESTARTED, DAEMON_KILLED = "first engine", "engine restarted", "daemon killed"
NODE_A, NODE_B = "node A", "node B"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs: ``model`` empty is the small model, which is fetched where it isn't
    there; ``socket`` empty is a daemon of the demo's own; ``redis`` is an address, demo_redis.OWN,
    or empty: no Redis."""

    model: str = ""
    socket: str = ""
    redis: str = field(default="", repr=False)
    context_tokens: int = 3072
    tokens_per_chunk: int = 128
    new_tokens: int = 24

    def validate(self) -> None:
        """Raise ConfigError for sizes that make no demo."""
        if self.tokens_per_chunk < 16 or self.tokens_per_chunk % 16:
            raise ConfigError(
                f"--tokens-per-chunk={self.tokens_per_chunk}; valid are multiples of 16 from 16"
            )
        if self.context_tokens < 1 or self.context_tokens % self.tokens_per_chunk:
            raise ConfigError(
                f"--context-tokens={self.context_tokens}; valid are multiples of "
                f"--tokens-per-chunk={self.tokens_per_chunk}"
            )
        if self.redis and self.socket:
            raise ConfigError("--redis starts daemons of its own; leave --socket out")
        if self.new_tokens < 1:
            raise ConfigError(f"--new-tokens={self.new_tokens}; valid is 1 or more")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvstore demo``."""
    default = DemoOptions()
    parser.add_argument(
        "--model", default="", help="model folder or Hugging Face ID (default: a small model)"
    )
    parser.add_argument(
        "--socket", default="", help="a running daemon's socket (default: a daemon of its own)"
    )
    parser.add_argument(
        "--redis",
        nargs="?",
        const=OWN,
        default="",
        metavar="URL",
        help="two daemons that share a Redis: this one, or (no URL) one of the demo's own",
    )
    parser.add_argument("--context-tokens", type=int, default=default.context_tokens)
    parser.add_argument("--tokens-per-chunk", type=int, default=default.tokens_per_chunk)
    parser.add_argument("--new-tokens", type=int, default=default.new_tokens)
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(namespace: argparse.Namespace) -> int:
    """Run the demo for the command line; returns its exit status."""
    options = DemoOptions(
        model=namespace.model,
        socket=namespace.socket,
        redis=namespace.redis,
        context_tokens=namespace.context_tokens,
        tokens_per_chunk=namespace.tokens_per_chunk,
        new_tokens=namespace.new_tokens,
    )
    try:
        result = run_demo(options)
    except NoDaemonError as error:
        print(f"kvstore demo: {error}", file=sys.stderr)
        return NO_DAEMON
    print(json.dumps(result) if namespace.json else render(result))
    return FAILURE if result["problems"] else OK


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run the demo and give its document: ``steps``, ``problems`` (empty when all went well) and
    what it ran on. Raises KVStoreError where it can't run, NoDaemonError where ``socket`` names
    no daemon."""
    options.validate()
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"no module named {name}", name=name)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder, ExitStack() as stack:
        phases = 3 if options.socket else 4
        total = 2 * len(QUESTIONS) + 1 if options.redis else phases * len(QUESTIONS)
        progress = Progress(sys.stderr, total)
        stack.callback(progress.close)
        return _Demo(options, Path(folder), progress).run()


class _Demo:
    """One run: what it needs, and the steps it has done."""

    def __init__(self, options: DemoOptions, folder: Path, progress: Progress) -> None:
        self._options = options
        self._folder = folder
        self._progress = progress
        self._model = options.model
        self._prompts: list[list[int]] = []
        self._truth: list[Fields] = []
        self._steps: list[dict[str, Any]] = []
        self._problems: list[str] = []

    def run(self) -> dict[str, Any]:
        """All of it, in order."""
        if self._options.socket:
            daemon_stats(Path(self._options.socket))
        self._model = self._model or self._small_model()
        facts = self._run_cold()
        if self._options.socket:
            self._run_with_running_daemon()
            last = "the daemon wasn't killed, as it isn't the demo's own"
        elif self._options.redis:
            last = self._run_with_redis(facts["kv_bytes_per_token"])
        else:
            last = f"NVMe: {self._run_with_own_daemon(facts['kv_bytes_per_token'])}"
        return {
            "steps": self._steps,
            "problems": self._problems,
            "notes": ["tier: by the daemon's counters before and after each request", last],
            "model": self._model,
            "dtype": facts["dtype"],
            "threads": facts["threads"],
            "context_tokens": self._options.context_tokens,
            "tokens_per_chunk": self._options.tokens_per_chunk,
            "daemon_killed": not (self._options.socket or self._options.redis),
        }

    def _small_model(self) -> str:
        """The small model's folder; fetched first where it isn't there."""
        from kvstore_transformers.config import small_model_folder

        folder = small_model_folder()
        if not (folder / "config.json").is_file():
            self._progress.begin(f"fetching a small model into {folder} (93 MB)")
            command = module_command("kvstore_transformers.fetch", "--into", str(folder))
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise DemoError((ended.stderr.strip().splitlines() or ["fetch failed"])[-1])
        return str(folder)

    def _run_cold(self) -> Fields:
        """Every question without a cache: times to compare with, and the right answers."""
        self._progress.begin("loading the model")
        with self._engine("") as engine:
            made = engine.ask(
                "prompts",
                text=shared_text(),
                questions=QUESTIONS,
                context_tokens=self._options.context_tokens,
                question_tokens_max=QUESTION_TOKENS_MAX,
            )
            self._prompts = [made["context"] + question for question in made["questions"]]
            self._generate(engine, self._prompts[0][: self._options.tokens_per_chunk])
            for number, prompt in enumerate(self._prompts, 1):
                self._progress.begin(f"without the cache, question {number}")
                self._truth.append(self._generate(engine, prompt))
                self._progress.end()
            return engine.ready

    def _run_with_own_daemon(self, kv_bytes_per_token: int) -> str:
        """The steps with a daemon that the demo starts, kills and stops; tells where its NVMe tier
        is and how it works."""
        host_bytes = self._host_bytes(kv_bytes_per_token)
        sizes = ["--host-size", str(host_bytes), "--nvme-size", str(4 * host_bytes)]
        daemon = OwnDaemon(self._folder, sizes)
        try:
            self._progress.begin("starting a daemon")
            daemon.start()
            address = f"unix:{daemon.socket}"
            with self._engine(address) as first:
                self._run_questions(first, FIRST, daemon.stats)
            with self._engine(address) as second:
                self._run_questions(second, ENGINE_RESTARTED, daemon.stats)
                self._progress.begin("waiting for the writes to NVMe, then killing the daemon")
                daemon.await_writes()
                daemon.kill()
                daemon.start()
                self._run_questions(second, DAEMON_KILLED, daemon.stats)
            modes = {tier["name"]: tier["mode"] for tier in daemon.stats()["tiers"]}
            return f"{modes['nvme']}, below {self._folder.parent}"
        finally:
            daemon.stop()

    def _host_bytes(self, kv_bytes_per_token: int) -> int:
        prompt_bytes = kv_bytes_per_token * max(len(prompt) for prompt in self._prompts)
        return max(512 * MIB, 2 * prompt_bytes)

    def _run_with_redis(self, kv_bytes_per_token: int) -> str:
        """The steps of two nodes that share a Redis; tells which."""
        sizes = ["--host-size", str(self._host_bytes(kv_bytes_per_token)), "--nvme-size", "off"]
        prefix = f"kvstore-demo-{self._folder.name.rpartition('-')[2]}"
        with DemoRedis(self._options.redis, self._folder / "redis") as redis, ExitStack() as stack:
            nodes = {}
            for name, folder in ((NODE_A, "a"), (NODE_B, "b")):
                self._progress.begin(f"starting the daemon of {name}")
                daemon = OwnDaemon(self._folder / folder, sizes, redis.settings(prefix))
                stack.callback(daemon.stop)
                daemon.start()
                daemon.await_redis()
                nodes[name] = daemon
            first, second = nodes[NODE_A], nodes[NODE_B]
            with self._engine(f"unix:{first.socket}") as engine:
                self._run_questions(engine, NODE_A, first.stats, 1)
                self._progress.begin("waiting for the writes to Redis")
                first.await_shared()
            with self._engine(f"unix:{second.socket}") as engine:
                self._run_questions(engine, NODE_B, second.stats)
            server = second.stats()["redis"]
            return f"Redis: {server['server']}, {server['mode']}; the daemons share nothing else"

    def _run_with_running_daemon(self) -> None:
        """The steps that leave a daemon alone that others may use."""
        socket = Path(self._options.socket)
        for phase in (FIRST, ENGINE_RESTARTED):
            with self._engine(f"unix:{socket}") as engine:
                self._run_questions(engine, phase, lambda: daemon_stats(socket))

    def _run_questions(
        self,
        engine: EngineProcess,
        phase: str,
        stats: Callable[[], Fields],
        questions: int = len(QUESTIONS),
    ) -> None:
        """Ask the first questions of one engine and note a step for each."""
        if not engine.ask("connected", timeout_s=START_S)["connected"]:
            raise DemoError(f"{phase}: the engine isn't registered after {START_S:.0f} s")
        for number, prompt in enumerate(self._prompts[:questions], 1):
            self._progress.begin(f"{phase}, question {number}")
            before = stats()
            made = self._generate(engine, prompt)
            engine.ask("flush", timeout_s=START_S)
            tier = _tier(made["reused_tokens"] // self._options.tokens_per_chunk, before, stats())
            self._note(f"{phase}, question {number}", number - 1, made, tier)
            self._progress.end()

    def _note(self, name: str, question: int, made: Fields, tier: str) -> None:
        """Add a step, and what is wrong with it."""
        truth = self._truth[question]
        equal = made["tokens"] == truth["tokens"]
        stores = not self._steps
        if not equal:
            self._problems.append(f"{name}: the answer differs from the one without the cache")
        if not made["reused_tokens"] and not stores:
            self._problems.append(f"{name}: nothing was reused")
        self._steps.append(
            {
                "name": name,
                "prompt_tokens": made["prompt_tokens"],
                "tokens_reused": made["reused_tokens"],
                "tier": tier,
                "ttft_s": made["ttft_s"],
                "ttft_cold_s": truth["ttft_s"],
                "speedup": truth["ttft_s"] / made["ttft_s"],
                "output_equal": equal,
                "answer": made["text"],
            }
        )

    def _generate(self, engine: EngineProcess, prompt: list[int]) -> Fields:
        return engine.ask("generate", tokens=prompt, max_new_tokens=self._options.new_tokens)

    def _engine(self, address: str) -> EngineProcess:
        """An engine process that isn't started yet, with room for two prompts: one whose chunks
        are still being stored and the next."""
        options = self._options
        longest = options.context_tokens + QUESTION_TOKENS_MAX + options.new_tokens
        arguments = [
            "--model", self._model, "--daemon", address, "--tokens-per-block", "16",
            "--tokens-per-chunk", str(options.tokens_per_chunk), "--cache-tokens", str(2 * longest),
        ]  # fmt: skip
        return EngineProcess(arguments, self._folder / "engine.log")


def _tier(reused_chunks: int, before: Fields, after: Fields) -> str:
    """Where reused chunks came from: what the daemon read from NVMe and Redis meanwhile, the rest
    from host memory."""
    if not reused_chunks:
        return "-"
    counts, left = [], reused_chunks
    for name in ("nvme", "redis"):
        count = min(_reads(after, name) - _reads(before, name), left)
        left -= count
        if count:
            counts.append((name, count))
    if left:
        counts.append(("host", left))
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{name} {count}/{reused_chunks}" for name, count in counts)


def _reads(stats: Fields, name: str) -> int:
    return sum(tier["io"]["reads"] for tier in stats["tiers"] if tier["name"] == name)
