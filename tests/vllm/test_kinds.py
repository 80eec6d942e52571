"""Models of other kinds, tiny and with random weights."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.conftest import ROOT, StartDaemon
from tests.vllm.conftest import BIG, CHUNK, MODEL, PYTHON, StartEngine, prompt, whole

LONG = {"max_model_len": 8192, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 160}


def tiny(kind: str, folder: Path, seed: int = 7) -> str:
    """Write a model or an adapter; its folder."""
    target = folder / f"{kind}-{seed}"
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.models", kind, str(target), str(MODEL), str(seed)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(target)


def test_sliding_windows_beside_full_attention(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """Prefill goes in chunks of 2,048 tokens with a window of 128, in little memory, while the
    daemon is stopped in the middle of stores: blocks that slide out of the window are wanted by
    other requests, and none that a store still reads is given to them. Texts are those of an engine
    without the cache, cold and with external hits."""
    daemon = start_daemon(**BIG)
    model = tiny("hybrid", private_folder)
    texts = [prompt(f"hybrid {number}", 190 + 10 * number) for number in range(6)]
    requests = [{"prompt": text, "max_tokens": 24} for text in texts]
    plain = start_engine(None, model=model, engine=LONG)
    wanted = [plain.run(request)[0]["tokens"] for request in requests]
    full = [whole(plain, text) for text in texts]
    assert len({str(tokens) for tokens in wanted}) == len(texts)
    plain.close()
    engine = start_engine({"socket": daemon.socket}, model=model, engine=LONG)
    assert engine.call("wait_ready")["ready"]
    stops = [(2, signal.SIGSTOP), (14, signal.SIGCONT), (16, signal.SIGSTOP), (60, signal.SIGCONT)]
    signals = [{"at": at, "pid": daemon.pid, "number": int(number)} for at, number in stops]
    cold = engine.run(*requests, signals=signals)
    daemon.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
    assert [r["tokens"] for r in cold] == wanted
    hits = 0
    for _ in range(2):
        engine.fresh()
        for request, tokens, most in zip(requests, wanted, full, strict=True):
            found = engine.run(request)[0]
            assert found["tokens"] == tokens
            assert found["cached"] <= most
            hits += found["cached"] == most
            engine.fresh()
    assert hits >= len(texts)
    status = engine.call("status")
    assert (status["errors"], status["held"], status["blocks_used"]) == (0, 0, 0)
    assert status["counts"].get("load_failures", 0) == 0
    assert status["counts"]["loaded_chunks"] * CHUNK >= sum(full)


def test_latent_attention_that_vllm_cannot_continue_is_refused(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """vLLM's CPU backend for MLA can't compute behind a prefix, so vLLM turns prefix caching off.
    The connector says so at start, and the engine runs on without the cache."""
    daemon = start_daemon()
    model = tiny("mla", private_folder)
    text = prompt("mla", 30)
    plain = start_engine(None, model=model)
    wanted = plain.run({"prompt": text})[0]["tokens"]
    plain.close()
    engine = start_engine({"socket": daemon.socket}, model=model)
    for _ in range(2):
        found = engine.run({"prompt": text})[0]
        assert (found["tokens"], found["cached"]) == (wanted, 0)
    assert len(engine.lines("prefix caching is off")) == 2
    assert daemon.stats()["spaces"] == []


def test_adapters_are_their_name_and_their_weights(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """What is stored with an adapter, by its first request too, is hit with it alone, in another
    engine as soon as vLLM has read it there, whatever number it has; not without it, and not with
    other weights under its name. Once its files have changed under a running engine, nothing of it
    is reused or stored there: vLLM has the former weights, and once it has read the new ones, its
    own prefix cache takes both for the same. Field cases 7 and 8."""
    daemon = start_daemon(**BIG)
    first, second, third = (tiny("adapter", private_folder, seed) for seed in (1, 2, 3))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    engine = start_engine({"socket": daemon.socket}, engine=options)
    assert engine.call("wait_ready")["ready"]
    text = prompt("adapters", 15)
    full = whole(engine, text)
    cold = engine.run({"prompt": text, "adapter": ["a", 1, first]})[0]
    engine.fresh()
    again = engine.run({"prompt": text, "adapter": ["a", 1, first]})[0]
    engine.fresh()
    base = engine.run({"prompt": text})[0]
    assert base["tokens"] != cold["tokens"] == again["tokens"]
    assert [r["cached"] for r in (cold, again, base)] == [0, full, 0]
    engine.close()
    engine = start_engine({"socket": daemon.socket}, engine=options)
    assert engine.call("wait_ready")["ready"]
    other = engine.run({"prompt": text, "adapter": ["a", 6, second]})[0]
    assert engine.call("read_adapter", adapter=["a", 5, first])["done"]
    engine.run({"prompt": prompt("another", 3)})
    same = engine.run({"prompt": text, "adapter": ["a", 5, first]})[0]
    assert (other["cached"], same["cached"]) == (0, full)
    assert same["tokens"] == cold["tokens"] != other["tokens"]
    engine.fresh()
    weights = Path(first) / "adapter_model.safetensors"
    weights.write_bytes((Path(third) / weights.name).read_bytes())
    for _ in range(2):
        engine.fresh()
        changed = engine.run({"prompt": text, "adapter": ["a", 5, first]})[0]
        assert (changed["cached"], changed["tokens"]) == (0, cold["tokens"])
    assert len(engine.lines("nothing of adapter a is reused: its files have changed")) == 1
    engine.run({"prompt": text, "adapter": ["a", 7, first]})
    assert len(engine.lines("vLLM has had other weights from its folder before")) == 1
    engine.fresh()
    new = engine.run({"prompt": text, "adapter": ["a", 8, third]})[0]
    assert new["cached"] == 0
    status = engine.call("status")
    assert (status["errors"], status["held"]) == (0, 0)


def test_adapter_whose_files_are_replaced_behind_vllms_back_is_not_cached(
    start_daemon: StartDaemon, start_engine: StartEngine, private_folder: Path
) -> None:
    """vLLM reads an adapter at its start; then other weights are put in its place, and only then
    comes the first request, with which the files are looked at: vLLM computes with the former ones.
    What another engine has stored with the new ones isn't hit, and nothing is stored as theirs."""
    daemon = start_daemon(**BIG)
    former, new = (tiny("adapter", private_folder, seed) for seed in (1, 2))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    plain = start_engine(None, engine=options)
    text, other = prompt("replaced", 15), prompt("replaced too", 15)
    wanted = [plain.run({"prompt": t, "adapter": ["a", 1, former]})[0] for t in (text, other)]
    plain.close()
    engines = [start_engine({"socket": daemon.socket}, engine=options) for _ in range(2)]
    assert all(engine.call("wait_ready")["ready"] for engine in engines)
    right, wrong = engines
    stored = right.run({"prompt": text, "adapter": ["a", 1, new]})[0]
    assert stored["tokens"] != wanted[0]["tokens"]
    folder = Path(former)
    assert wrong.call("read_adapter", adapter=["a", 1, former])["done"]
    for path in Path(new).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for _ in range(2):
        found = [wrong.run({"prompt": t, "adapter": ["a", 1, former]})[0] for t in (text, other)]
        assert [r["tokens"] for r in found] == [r["tokens"] for r in wanted]
        assert [r["cached"] for r in found] == [0, 0]
        wrong.fresh()
    right.fresh()
    found = [right.run({"prompt": t, "adapter": ["a", 1, new]})[0] for t in (text, other)]
    assert [r["cached"] for r in found] == [whole(right, text), 0]
    assert found[0]["tokens"] == stored["tokens"]
    assert len(wrong.lines("vLLM has read other files of it")) == 1


def test_kinds_that_are_not_known_are_refused_by_name() -> None:
    """Recurrent state, quantised KV and local attention aren't guessed at, nor is memory that isn't
    as vLLM describes it: each is refused in one line that says why. Field case 35."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.judge"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'connectors'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["hybrid"] == "[(16, None), (16, 64)]"
    assert said["drafts"] == "[(16, None)]"
    assert "group 0 is quantised (INT8_PER_TOKEN_HEAD)" in said["quantised"]
    assert "vLLM's own" in said["ephemeral"]
    assert "group 1 is MambaSpec; supported are" in said["recurrent"]
    assert "ChunkedLocalAttentionSpec" in said["local"]
    assert "no KV cache" in said["none"]
    span = "TensorSpan(offset_bytes=0, block_stride_bytes=2048, block_bytes=2048, num_blocks=4"
    assert said["as described"].startswith(span)
    assert said["split in two"] == said["as described"]
    assert "at byte 64 of the allocation, not at 0" in said["elsewhere"]
    assert "4 blocks 1024 bytes apart" in said["closer"]
    assert "spreads a block over" in said["heads apart"]
