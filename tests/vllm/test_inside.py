"""The connector's parts against vLLM's own objects, without an engine."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.vllm.conftest import MODEL, PYTHON


@pytest.mark.parametrize("module", ["inside", "inside_requests"])
def test_parts_fit_vllms_own_objects(module: str) -> None:
    """Layouts and shards of MLA, replicated heads, pipeline stages and shared layers; drafters;
    keys of images, KV events: each check of the module holds."""
    done = subprocess.run(
        [PYTHON, "-m", f"tests.vllm.{module}", str(MODEL)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'connectors'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) >= 3
    assert not {name: text for name, text in said.items() if text != "ok"}
