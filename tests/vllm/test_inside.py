"""The connector's parts against vLLM's own objects, without an engine."""

from __future__ import annotations

import json
import os
import subprocess

from tests.conftest import ROOT
from tests.vllm.conftest import MODEL, PYTHON


def test_parts_fit_vllms_own_objects() -> None:
    """Layouts and shards of MLA, replicated heads, pipeline stages and shared layers; drafters; KV
    events: each check of tests/vllm/inside.py holds."""
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.inside", str(MODEL)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'connectors'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) >= 10
    assert not {name: text for name, text in said.items() if text != "ok"}
