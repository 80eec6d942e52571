"""The benchmark runs, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.vllm.conftest import PYTHON

pytestmark = pytest.mark.full


def test_time_to_first_token_is_measured_at_a_small_size() -> None:
    """Two rounds of a short prefix: every way gives the same tokens, and the figures and bars are
    there."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "ttft.py"), "--python", PYTHON, "--prefix", "384",
         "--users", "1", "2", "--rounds", "2", "--batch", "256"],
        capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout.splitlines()[-1])
    table = document["table"]
    assert [(line["prefix"], line["users"]) for line in table] == [(384, 1), (384, 2)]
    assert all(line[f"{way}_ttft_s"] > 0 for line in table for way in ("without", "nvme"))
    bars = [row["bar"] for row in document["rows"]]
    assert bars == [None, None, None, "<= 1.5"] * 2 + ["<= 1.03"] * 2
    assert all(value > 0 for row in document["rows"] for value in row["runs"])
