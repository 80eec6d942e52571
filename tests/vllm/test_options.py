"""Settings of the connector and options of vLLM, each on an engine of its own."""

from __future__ import annotations

from pathlib import Path

from kvstore.wire import PROTOCOL, hello
from kvstore.wire_messages import write_hello
from tests.client_rig import BareDaemon
from tests.conftest import StartDaemon
from tests.vllm.conftest import BIG, CHUNK, StartEngine, nothing_is_pinned, prompt, whole


def test_least_hit_and_prompts_only(start_daemon: StartDaemon, start_engine: StartEngine) -> None:
    """With ``min_hit_tokens`` of 300 two stored chunks are no hit and three are. Without
    ``store_decoded`` a second turn finds the first one's prompt, not its reply."""
    daemon = start_daemon(**BIG)
    extra = {"socket": daemon.socket, "min_hit_tokens": 300, "store_decoded": False}
    engine = start_engine(extra)
    tokens = engine.call("encode", prompt=prompt("least", 60))["tokens"]
    short, long = tokens[: 2 * CHUNK + 60], tokens[: 3 * CHUNK + 60]
    engine.run({"prompt": short})
    engine.fresh()
    assert engine.run({"prompt": short})[0]["cached"] == 0
    engine.fresh()
    first = engine.run({"prompt": long, "max_tokens": 2 * CHUNK})[0]
    engine.fresh()
    second = engine.run({"prompt": [*long, *first["tokens"], 42]})[0]
    assert second["cached"] == 3 * CHUNK
    nothing_is_pinned(daemon)


def test_engine_that_only_reads_or_only_writes(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """``write`` off: an engine hits and leaves nothing. ``read`` off: it stores and hits nothing
    but its own prefix cache."""
    daemon = start_daemon(**BIG)
    text, other = prompt("writer", 20), prompt("reader", 20)
    writer = start_engine({"socket": daemon.socket, "read": False})
    cold = writer.run({"prompt": text})[0]
    writer.fresh()
    assert writer.run({"prompt": text})[0]["cached"] == 0
    full = whole(writer, text)
    writer.close()
    reader = start_engine({"socket": daemon.socket, "write": False})
    hit = reader.run({"prompt": text})[0]
    assert (hit["tokens"], hit["cached"]) == (cold["tokens"], full)
    reader.run({"prompt": other})
    reader.fresh()
    assert reader.run({"prompt": other})[0]["cached"] == 0


def test_daemon_that_comes_late_or_in_another_version(
    start_engine: StartEngine, start_daemon: StartDaemon, private_folder: Path
) -> None:
    """The engine starts without a daemon, meets one whose protocol is another, which it says in one
    line that names both versions, and then one that it can use: it serves all the time, and hits at
    last. Field case 59."""
    path = private_folder / "run" / "kvstore" / "kvstore.sock"
    path.parent.mkdir(mode=0o700, parents=True)
    path.parent.parent.chmod(0o700)
    engine = start_engine({"socket": f"unix:{path}"})
    text = prompt("late", 20)
    cold = engine.run({"prompt": text})[0]
    engine.fresh()
    with BareDaemon(str(path)) as bare:
        for _ in ("scheduler", "worker"):
            bare.accept()
            newer = hello()
            newer.protocol += 1
            bare.send(write_hello(bare.receive().id, newer))
        again = engine.run({"prompt": text})[0]
        engine.fresh()
    path.unlink()
    daemon = start_daemon(**BIG)
    assert engine.call("wait_ready")["ready"]
    stored = engine.run({"prompt": text})[0]
    engine.fresh()
    found = engine.run({"prompt": text})[0]
    assert [r["cached"] for r in (cold, again, stored, found)] == [0, 0, 0, whole(engine, text)]
    assert len({str(r["tokens"]) for r in (cold, again, stored, found)}) == 1
    said = engine.lines(f"differ in protocol: client {PROTOCOL}, daemon {PROTOCOL + 1}")
    assert len(said) == 2, said
    nothing_is_pinned(daemon)


def test_speculative_decoding_from_the_prompt(
    start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """Tokens guessed from the prompt are verified in the step that also completes chunks: whole
    chunks of the reply are stored all the same, and both turns give the text of a request without
    the cache."""
    daemon = start_daemon(**BIG)
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = start_engine({"socket": daemon.socket}, engine={"speculative_config": guess})
    tokens = engine.call("encode", prompt=prompt("guess", 30))["tokens"]
    deaf = {"kvstore.read": False, "kvstore.write": False}
    cold = engine.run({"prompt": tokens, "max_tokens": 200, "params": deaf})[0]
    engine.fresh()
    stored = engine.run({"prompt": tokens, "max_tokens": 200})[0]
    assert stored["tokens"] == cold["tokens"]
    turn = [*tokens, *cold["tokens"], 42]
    engine.fresh()
    wanted = engine.run({"prompt": turn, "params": deaf})[0]
    engine.fresh()
    found = engine.run({"prompt": turn})[0]
    assert (wanted["cached"], found["cached"]) == (0, (len(turn) - 2) // CHUNK * CHUNK)
    assert found["tokens"] == wanted["tokens"]
    nothing_is_pinned(daemon)
