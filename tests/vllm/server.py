"""A ``vllm serve`` process with its engine and worker processes, and how tests talk to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.vllm.conftest import MODEL, PYTHON

START_S = 600.0
ANSWER_S = 400.0
HIT_S = 120.0
METADATA = "Metadata-Version: 2.1\nName: kvstore\nVersion: 0\n"
ENTRY_POINTS = "[vllm.general_plugins]\nkvstore = kvstore_vllm:register\n"


class Server:
    """Started with the settings that a user gives: the connector's name and role, no module path.

    The entry point is that of a distribution which only this process sees. ``extra`` are settings
    of the connector beside none, as ``kvstore serve`` is found below ``runtime``.
    """

    def __init__(self, folder: Path, runtime: Path, arguments: tuple[str, ...] = ()) -> None:
        packages = folder / "packages"
        described = packages / "kvstore-0.dist-info"
        described.mkdir(parents=True, exist_ok=True)
        (described / "METADATA").write_text(METADATA)
        (described / "entry_points.txt").write_text(ENTRY_POINTS)
        self.log = folder / "vllm.log"
        self.port = _free_port()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")} | {
            "PYTHONPATH": os.pathsep.join(map(str, (packages, ROOT, ROOT / "connectors"))),
            "XDG_RUNTIME_DIR": str(runtime),
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2",
        }  # fmt: skip
        transfer = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}
        command = [
            str(Path(PYTHON).with_name("vllm")), "serve", str(MODEL), "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
            "--served-model-name", "m", "--enable-prompt-tokens-details",
            "--kv-transfer-config", json.dumps(transfer), *arguments,
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it serves."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-8000:]
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text(errors="replace")[-8000:])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One HTTP request: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body or {}), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, text: str, max_tokens: int = 16) -> tuple[str, int]:
        """Complete a prompt greedily: the text, and how many prompt tokens were cached."""
        body = {"model": "m", "prompt": text, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        document = json.loads(answer)
        return (
            document["choices"][0]["text"],
            document["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def complete_from_daemon(self, text: str, wanted: str, cached: int) -> None:
        """Complete a prompt until its cached tokens are those and came from the daemon; each time
        its text is right. (The connector may give up a lookup that a slow machine answers late.)"""
        until_s = time.monotonic() + HIT_S
        while True:
            self.reset()
            before = self.metrics().get("loaded_chunks", 0)
            found = self.complete(text)
            assert found[0] == wanted
            if found[1] == cached and self.metrics().get("loaded_chunks", 0) > before:
                return
            assert time.monotonic() < until_s, (found, self.metrics())

    def begin_and_leave(self, text: str) -> None:
        """Ask for a long completion as a stream, and hang up after its first bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        body = {"model": "m", "prompt": text, "max_tokens": 400, "temperature": 0, "stream": True,
                "ignore_eos": True}  # fmt: skip
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read(10)
        answer.close()
        connection.close()

    def reset(self) -> None:
        """Drop vLLM's own prefix cache, as soon as no block is in use."""
        until_s = time.monotonic() + HIT_S
        while time.monotonic() < until_s:
            if json.loads(self.request("POST", "/reset_prefix_cache")[1]).get("success"):
                return
            time.sleep(0.05)
        raise AssertionError("blocks stay in use:\n" + self.log.read_text()[-4000:])

    def metrics(self) -> dict[str, float]:
        """The connector's counters, by name."""
        prefix, end = "vllm:kvstore_", "_total"
        return {
            name.removeprefix(prefix).removesuffix(end): value
            for name, value in self._counters().items()
            if name.startswith(prefix) and name.endswith(end)
        }

    def counter(self, name: str) -> float:
        """One of vLLM's own counters."""
        return self._counters()[name]

    def _counters(self) -> dict[str, float]:
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        parts = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in parts}

    def close(self) -> None:
        """End it with all its processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
