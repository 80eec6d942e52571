"""``kvstore demo`` and the engine process behind it, on a tiny model with real processes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kvstore_transformers.config import share_cores
from redis import Redis
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from kvstore import demo, demo_text
from kvstore.core.errors import ConfigError
from kvstore.demo import DemoOptions, run_demo
from kvstore.demo_processes import DemoError, EngineProcess, OwnDaemon, module_command
from kvstore.demo_redis import OWN, DemoRedis, find_program
from kvstore.demo_render import Progress, render
from tests.connectors import tiny
from tests.redis_rig import standalone

CONTEXT, CHUNK, NEW = 512, 64, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer knows the commonest words of the demo's text."""
    place = tiny.save(tmp_path_factory.mktemp("models") / "tiny")
    split = pre_tokenizers.Whitespace()
    text = " ".join(demo_text.QUESTIONS) * 100 + demo_text.shared_text()
    words = Counter(word for word, _ in split.pre_tokenize_str(text))
    common = [word for word, _ in words.most_common(tiny.SIZES["vocab_size"] - 1)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["?", *common]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = split
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(place)
    return place


def options_of(folder: Path, **changes: Any) -> DemoOptions:
    settings = {"context_tokens": CONTEXT, "tokens_per_chunk": CHUNK, "new_tokens": NEW}
    return DemoOptions(model=str(folder), **{**settings, **changes})


def test_demo_hits_host_then_nvme_and_repeats_every_answer(folder: Path) -> None:
    """The whole demo: a daemon of its own, engines restarted, the daemon killed; every step but
    the first reuses the whole context, and every answer is the one without the cache."""
    result = run_demo(options_of(folder))
    assert result["problems"] == []
    assert result["daemon_killed"]
    steps = result["steps"]
    assert [step["tokens_reused"] for step in steps] == [0] + [CONTEXT] * 11
    assert [step["tier"] for step in steps] == ["-", *["host"] * 7, "nvme", *["host"] * 3]
    assert all(step["output_equal"] for step in steps)
    assert all(CONTEXT < step["prompt_tokens"] <= CONTEXT + 64 for step in steps)
    assert all(step["ttft_s"] > 0 and step["ttft_cold_s"] > 0 for step in steps)
    assert all(step["answer"] for step in steps)
    assert json.loads(json.dumps(result)) == result


def test_demo_leaves_a_running_daemon_alone(folder: Path, own_daemon: OwnDaemon) -> None:
    """With --socket nothing is killed, and the result says so."""
    pid = own_daemon.stats()["process"]["pid"]
    result = run_demo(options_of(folder, socket=str(own_daemon.socket)))
    assert result["problems"] == []
    assert len(result["steps"]) == 8
    assert not result["daemon_killed"]
    assert "wasn't killed" in render(result)
    assert own_daemon.stats()["process"]["pid"] == pid


def test_demo_with_redis_hits_on_the_second_node(folder: Path, private_folder: Path) -> None:
    """Two daemons with folders of their own and one Redis: what an engine stored at A, an engine
    at B reads from Redis, with the answers of an engine without a cache."""
    with standalone(private_folder / "v") as server:
        result = run_demo(options_of(folder, redis=server.url))
        assert result["problems"] == []
        steps = result["steps"]
        assert [step["name"][:6] for step in steps] == ["node A"] + ["node B"] * 4
        assert [step["tokens_reused"] for step in steps] == [0] + [CONTEXT] * 4
        assert [step["tier"] for step in steps] == ["-", "redis", "host", "host", "host"]
        assert all(step["output_equal"] for step in steps)
        assert not result["daemon_killed"]
        assert "Redis: Valkey" in render(result)
        [prefix] = {name.split(b":")[0] for name in server.names()}
        assert prefix.startswith(b"kvstore-demo-")


def test_demo_starts_and_ends_a_redis_of_its_own(private_folder: Path) -> None:
    """Reached by a socket below the demo's folder only."""
    with DemoRedis(OWN, private_folder / "r") as redis:
        assert redis.url == f"unix://{private_folder}/r/redis.sock"
        with Redis.from_url(redis.url) as client:
            assert client.ping()
            assert client.config_get("port") == {"port": "0"}
    assert redis._process is not None
    assert redis._process.returncode is not None


def test_demo_with_redis_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, or how to name one."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"neither valkey-server .*--redis redis://host"):
        find_program()
    with pytest.raises(ConfigError, match="leave --socket out"):
        DemoOptions(redis=OWN, socket="/a").validate()


def test_command_fails_when_an_answer_differs_or_nothing_is_reused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and the table names what went wrong."""
    ran = demo._Demo(DemoOptions(), Path(), Progress(io.StringIO(), 1))
    ran._truth = [{"tokens": [1, 2], "ttft_s": 1.0}] * 2
    made = {"prompt_tokens": 9, "reused_tokens": 0, "ttft_s": 0.5, "text": ""}
    ran._note("stores", 0, {**made, "tokens": [1, 2]}, "-")
    assert ran._problems == []
    ran._note("reuses", 1, {**made, "tokens": [1, 2]}, "-")
    ran._note("differs", 1, {**made, "tokens": [1, 3], "reused_tokens": 8}, "host")
    assert ran._problems == [
        "reuses: nothing was reused",
        "differs: the answer differs from the one without the cache",
    ]
    facts = {"model": "m", "dtype": "float32", "context_tokens": 8, "tokens_per_chunk": 8}
    result = {"steps": ran._steps, "problems": ran._problems, "notes": [], **facts}
    monkeypatch.setattr(demo, "run_demo", lambda options: result)
    arguments = argparse.ArgumentParser()
    demo.add_arguments(arguments)
    assert demo.run(arguments.parse_args([])) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM: reuses: nothing was reused" in shown
    assert "NO" in shown
    assert demo.run(arguments.parse_args(["--json"])) == 1
    assert json.loads(capsys.readouterr().out)["steps"][2]["output_equal"] is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_tokens": 100}, "multiples of --tokens-per-chunk=64"),
        ({"tokens_per_chunk": 24}, "multiples of 16"),
        ({"new_tokens": 0}, "1 or more"),
    ],
    ids=str,
)
def test_sizes_that_make_no_demo_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_demo(options_of(Path("model"), **changes))


def test_socket_without_a_daemon_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 3, as of every command, and before any model is loaded."""
    arguments = argparse.ArgumentParser()
    demo.add_arguments(arguments)
    socket = str(tmp_path / "nowhere.sock")
    assert demo.run(arguments.parse_args(["--socket", socket, "--model", "none"])) == 3
    assert "no daemon answers" in capsys.readouterr().err


def test_unsupported_model_is_one_line(tmp_path: Path) -> None:
    """The engine process says why in its first line and ends with status 1."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    command = module_command("kvstore_transformers.worker", "--model", str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, check=False, input="")
    assert ended.returncode == 1
    [line] = ended.stdout.splitlines()
    assert "model_type='gpt2'" in json.loads(line)["error"]
    assert "LlamaForCausalLM" in json.loads(line)["error"]


def test_engine_process_answers_what_it_refuses(folder: Path, tmp_path: Path) -> None:
    """Wrong operations, fields and requests get one line each, and the process lives on."""
    arguments = ["--model", str(folder), "--cache-tokens", "128"]
    with EngineProcess(arguments, tmp_path / "log") as engine:
        assert engine.ready["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
        refused = [
            ("dance", {}, "op='dance'.*prompts, generate"),
            ("generate", {"tokens": [1]}, "max_new_tokens"),
            ("generate", {"tokens": [1] * 200, "max_new_tokens": 1}, "up to 128"),
            ("generate", {"tokens": "abc", "max_new_tokens": 1}, "."),
        ]
        for operation, fields, said in refused:
            with pytest.raises(DemoError, match=said):
                engine.ask(operation, **fields)
        assert engine.ask("connected", timeout_s=0.0) == {"connected": False}
        assert len(engine.ask("generate", tokens=[1, 2, 3], max_new_tokens=4)["tokens"]) == 4


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = {}
    for out in (io.StringIO(), Terminal()):
        progress = Progress(out, 2)
        progress.begin("first")
        progress.end()
        progress.begin("second")
        progress.close()
        shown[type(out)] = out.getvalue()
    assert shown[io.StringIO] == "[0/2] first\n[1/2] second\n"
    assert "\n" not in shown[Terminal]
    assert "[############............] 1/2 second" in shown[Terminal]


def test_shared_text_is_there_without_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a wheel neither LICENSE nor ARCHITECTURE.md lies beside the package; there is a long
    text all the same."""
    monkeypatch.setattr(demo_text, "DOCUMENTS", ())
    assert len(demo_text.shared_text()) > 20_000


def test_waiting_threads_sleep_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning threads that share cores with others make an engine several times slower; the
    choice must stand before torch is loaded, and the user's own stays."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize("module", ["kvstore.demo", "kvstore_transformers.worker"])
def test_module_imports_no_torch(module: str) -> None:
    """``kvstore demo --help`` works, and starts at once, where torch isn't installed."""
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    command = [part if "runpy" not in part else f"{paths_of(part)}; {probe}"
               for part in module_command(module)]  # fmt: skip
    assert subprocess.run(command, check=False).returncode == 0


def paths_of(code: str) -> str:
    """The part of a command's code that makes the packages importable."""
    return code.partition("; runpy")[0]
