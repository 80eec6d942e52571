"""A real vLLM engine in one process, driven by JSON lines: what tests/vllm starts as a child.

It runs with the Python of an environment that has vLLM; the tests themselves run without. The first
argument is a JSON object: ``model``, ``engine`` (vLLM's arguments), ``extra`` (the connector's
settings; null: no connector). The first line out is ``{"ready": true}``. Each line in is an
operation, each answered by one line; everything that is printed goes to standard error.

- ``run``: requests [{prompt (text or tokens), max_tokens, salt, params, adapter, abort_at}] ->
  texts, tokens, cached, preemptions; all at once, steps until all have ended; ``abort_at`` counts
  steps; ``signals`` are those of tests/vllm/signals.py
- ``settle``: steps until nothing is in flight -> steps
- ``reset``: drop vLLM's own prefix cache -> done
- ``status``: what the connector and vLLM hold
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tests.vllm.signals import Signals

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="2",
)  # fmt: skip
RUN_S = 400.0
"""No run takes so long: a request hangs."""


class Engine:
    """vLLM's engine and its connector's two sides."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        transfer = None
        if arguments["extra"] is not None:
            transfer = {
                "kv_connector": "KVStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvstore_vllm.connector",
                "kv_connector_extra_config": arguments["extra"],
            }
        options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
        self.llm = LLM(
            arguments["model"], kv_transfer_config=transfer, **(options | arguments["engine"])
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.number = 0
        self.broken: list[tuple[Any, str]] = []
        self.pending = 0

    def run(self, line: dict[str, Any]) -> dict[str, Any]:
        """Requests from their start to their end, side by side."""
        names = [self._add(request) for request in line["requests"]]
        ended: dict[str, Any] = {}
        aborts = {n: r["abort_at"] for n, r in zip(names, line["requests"], strict=True)
                  if "abort_at" in r}  # fmt: skip
        preemptions = used = step = decoded = 0
        started_s = time.monotonic()
        first_s: dict[str, float] = {}
        signals = Signals(line.get("signals", ()), self._worker_session())
        while len(ended) < len(names):
            passed_s = time.monotonic() - started_s
            assert passed_s < RUN_S, f"{len(names) - len(ended)} requests hang"
            signals.send(step, passed_s, [name in ended for name in names])
            for name in [n for n, at in aborts.items() if at == step and n not in ended]:
                self.engine.abort_request([name])
                ended[name] = {"text": None, "tokens": [], "cached": None}
            if len(ended) == len(names):
                break
            outputs = self.engine.step()
            decoded += bool(outputs)
            for output in outputs:
                first_s.setdefault(output.request_id, time.monotonic() - started_s)
                if output.finished:
                    ended[output.request_id] = {
                        "text": output.outputs[0].text,
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "reason": output.outputs[0].finish_reason,
                    }
            running = self.scheduler.requests.values()
            preemptions = max(preemptions, sum(r.num_preemptions for r in running))
            used = max(used, self._blocks_used())
            step += 1
        signals.close()
        found = [ended[name] | {"first_s": first_s.get(name)} for name in names]
        seconds = time.monotonic() - started_s
        return {"results": found, "preemptions": preemptions, "steps": step, "decoded": decoded,
                "seconds": seconds, "unsent": len(signals.waiting),
                "blocks_used_max": used}  # fmt: skip

    def settle(self, line: dict[str, Any]) -> dict[str, Any]:
        """Step until nothing is left to do."""
        until_s = time.monotonic() + line.get("timeout_s", 180.0)
        steps = 0
        while self.scheduler.has_requests() and time.monotonic() < until_s:
            self.engine.step()
            steps += 1
        return {"steps": steps, "settled": not self.scheduler.has_requests()}

    def tokens(self, line: dict[str, Any]) -> dict[str, Any]:
        """How many tokens a prompt has."""
        return {"count": len(self.llm.get_tokenizer()(line["prompt"])["input_ids"])}

    def encode(self, line: dict[str, Any]) -> dict[str, Any]:
        """The tokens of a prompt."""
        return {"tokens": self.llm.get_tokenizer()(line["prompt"])["input_ids"]}

    def keys(self, line: dict[str, Any]) -> dict[str, Any]:
        """The chunk keys of a prompt, in hexadecimal."""
        tokens = self.llm.get_tokenizer()(line["prompt"])["input_ids"]
        keys = self.scheduler.connector._scheduler._session.keys(tokens)
        return {"keys": [key.hex() for key in keys]}

    def lookups(self, line: dict[str, Any]) -> dict[str, Any]:
        """A request for which vLLM asks again and again, without ever loading, and which is then
        aborted: how many of its lookups hit."""
        known = set(self.scheduler.requests)
        name = self._add(line)
        (number,) = set(self.scheduler.requests) - known
        request = self.scheduler.requests[number]
        connector = self.scheduler.connector
        tracked = connector._scheduler._requests[number]
        hits = 0
        for _ in range(line["times"]):
            tracked.offer = None  # as if the last answer were too old to be given again
            hits += connector.get_num_new_matched_tokens(request, 0)[0] > 0
        self.engine.abort_request([name])
        return {"hits": hits}

    def reset(self, line: dict[str, Any]) -> dict[str, Any]:
        """Drop vLLM's own prefix cache."""
        return {"done": bool(self.llm.reset_prefix_cache())}

    def read_adapter(self, line: dict[str, Any]) -> dict[str, Any]:
        """Let vLLM read an adapter before a request wants it, as ``vllm serve`` does at start."""
        from vllm.lora.request import LoRARequest

        return {"done": bool(self.engine.add_lora(LoRARequest(*line["adapter"])))}

    def forget(self, line: dict[str, Any]) -> dict[str, Any]:
        """Drop vLLM's own cache and the connector's, as after a change of weights."""
        return {"done": bool(self.scheduler.reset_prefix_cache(reset_connector=True))}

    def sabotage(self, line: dict[str, Any]) -> dict[str, Any]:
        """Let a method of the ``scheduler``'s or ``worker``'s ``session`` or ``side`` raise;
        without ``method`` all is as it was."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for broken, method in self.broken:
            delattr(broken, method)
        self.broken.clear()
        if "method" not in line:
            return {}
        connectors = {"scheduler": self.scheduler.connector, "worker": get_kv_transfer_group()}
        side = getattr(connectors[line["side"]], "_" + line["side"])
        target = side._session if line["of"] == "session" else side

        def fail(*arguments: Any, **more: Any) -> Any:
            raise RuntimeError(f"sabotage of {line['method']}")

        setattr(target, line["method"], fail)
        self.broken.append((target, line["method"]))
        return {}

    def pend(self, line: dict[str, Any]) -> dict[str, Any]:
        """Let the next ``times`` lookups be answered as while the daemon asks a remote tier; how
        many of those that were to be before weren't."""
        from kvstore import HitStatus, LookupResult

        session = self.scheduler.connector._scheduler._session
        left, self.pending = self.pending, line["times"]

        def lookup(*arguments: Any) -> Any:
            if not self.pending:
                return type(session).lookup(session, *arguments)
            self.pending -= 1
            return LookupResult(HitStatus.PENDING, 0, 0)

        session.lookup = lookup
        return {"left": left}

    def status(self, line: dict[str, Any]) -> dict[str, Any]:
        """What is held, where."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        pool = self.scheduler.kv_cache_manager.block_pool
        side = self.scheduler.connector._scheduler
        worker = get_kv_transfer_group()._worker
        session = worker._session
        return {
            "blocks_used": self._blocks_used(),
            "blocks": pool.num_gpu_blocks,
            "requests": len(self.scheduler.requests),
            "tracked": len(side._requests),
            "held": len(side.held),
            "held_blocks": side.held.blocks,
            "wanted": len(side._wanted),
            "loads": len(worker._loads),
            "stores": len(worker._stores),
            "errors": self.scheduler.connector._errors.totals.get("errors", 0)
            + get_kv_transfer_group()._errors.totals.get("errors", 0),
            "ready": session is not None and session.state().ready,
            "counts": worker.counts.totals | side.counts.totals,
        }

    def wait_ready(self, line: dict[str, Any]) -> dict[str, Any]:
        """Wait until the daemon knows the engine, on both sides."""
        sessions = [self.scheduler.connector._scheduler._session]
        if (worker := self._worker_session()) is not None:  # ranks may be processes of their own
            sessions.append(worker)
        timeout_s = line.get("timeout_s", 90.0)
        return {"ready": all(session.wait_ready(timeout_s) for session in sessions)}

    def _blocks_used(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1)

    def _worker_session(self) -> Any:
        """The connector's, where there is one in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = get_kv_transfer_group()._worker if has_kv_transfer_group() else None
        return None if worker is None else worker._session

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        self.number += 1
        extra = {"kv_transfer_params": request["params"]} if "params" in request else None
        sampling = SamplingParams(
            temperature=0, max_tokens=request.get("max_tokens", 16), ignore_eos=True,
            extra_args=extra,
        )  # fmt: skip
        prompt = request["prompt"]
        body: dict[str, Any] = (
            {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        )
        if "salt" in request:
            body["cache_salt"] = request["salt"]
        name = f"r{self.number}"
        adapter = None
        if "adapter" in request:
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest(*request["adapter"])
        self.engine.add_request(name, body, sampling, lora_request=adapter)
        return name


def serve(kind: type[Engine]) -> None:
    """Run the child."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = kind(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for text in sys.stdin:
        line = json.loads(text)
        answer = getattr(engine, line["op"])(line)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    serve(Engine)
