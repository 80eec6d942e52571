"""Every benchmark runs at a small size: it works and compares equal work. Never a time: bars are
for a quiet machine (``make bench GATE=1``)."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import eviction
from bench.__main__ import NOT_MET, QUESTIONS, verdict
from bench.harness import Row, at_least, at_most, interleave
from bench.timeline import parts_of
from kvstore.core.eviction import POLICIES
from tests.conftest import ROOT


def run_small(name: str, folder: Path) -> dict[str, Any]:
    """``python -m bench --only NAME`` at a small size, as its JSON line."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--size", "small", "--only", name, "--json",
         "--folder", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("name", [question.name for question in QUESTIONS])
def test_a_question_is_answered_at_a_small_size(name: str, tmp_path: Path) -> None:
    """The benchmark itself checks that both sides moved the same bytes, and that they are right."""
    document = run_small(name, tmp_path)
    rows = document["rows"]
    assert rows
    assert all(row["question"] == name for row in rows)
    assert all(value > 0 for row in rows for value in row["runs"])
    assert any(row["bar"] for row in rows)
    assert {"cores", "cpu", "memory_gib", "commit", "stolen", "disk"} <= set(document)
    assert not list(tmp_path.iterdir()), "scratch files were left behind"


def test_a_timeline_accounts_for_every_part_of_a_request() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.timeline", "--rounds", "6", "--warm"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["memcpy", "store", "retrieve"]
    assert all(line.endswith("(5 of 5)") for line in lines[1:]), lines


def test_the_parts_of_a_timeline_are_those_of_its_request() -> None:
    copies = [("copy", 30 + n, 40 + n) for n in range(8)]
    noted = [("receive", 2, 3), ("receive", 12, 20), *copies, ("send", 50, 60)]
    parts = parts_of(("store", 10, 75), noted)
    assert parts is not None
    assert {name: round(seconds * 1e9) for name, seconds in parts.items()} == {
        "asked": 2, "decided": 18, "copied": 17, "told": 13, "known": 15, "sum": 80,
    }  # fmt: skip
    assert parts_of(("store", 10, 45), noted) is None


def test_policies_are_compared_on_a_trace(tmp_path: Path) -> None:
    """A recorded trace of three conversations in turn: where all of it fits, every policy hits
    what came before; where hardly anything does, none more."""
    trace = tmp_path / "trace.jsonl"
    turns = [
        [talk * 100 + n for n in range(10 * (turn + 1))] for turn in range(4) for talk in range(3)
    ]
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in turns))
    assert eviction.recorded(trace) == turns
    for make in (*(partial(eviction.in_tree, name) for name in POLICIES), eviction.block_lru):
        assert eviction.hit_share(turns, make(1000)) == pytest.approx(5 / 7)
        assert 0 <= eviction.hit_share(turns, make(2)) < 0.1
    made = eviction.generated(50, seed=1)
    assert made == eviction.generated(50, seed=1)
    assert len(list(eviction.compare(made))) == len(eviction.SIZES)


def test_sides_take_turns() -> None:
    """Each side once a round, and the one that was last goes first in the next."""
    calls: list[tuple[str, int]] = []

    def side(name: str, seconds: float):
        def work(number: int) -> float:
            calls.append((name, number))
            return seconds

        return work

    taken = interleave({"a": side("a", 1.0), "b": side("b", 2.0)}, 2)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert taken == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


def test_a_gate_names_the_bars_that_are_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    """The median counts, in the direction of the bar; a row without one can't fail."""
    met = [
        Row("q", "low enough", "us", (9.0, 10.0, 99.0), at_most(10)),
        Row("q", "high enough", "x", (0.1, 0.9, 0.9), at_least(0.9)),
        Row("q", "no bar", "us", (1e9,)),
    ]
    assert verdict(met) == 0
    assert capsys.readouterr().err == ""
    missed = [
        Row("q", "too high", "us", (9.0, 11.0, 12.0), at_most(10)),
        Row("q", "too low", "x", (0.1, 0.8, 1.0), at_least(0.9)),
    ]
    assert verdict([*met, *missed]) == NOT_MET
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in told] == ["too high", "too low"]
