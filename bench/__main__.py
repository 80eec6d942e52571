"""``python -m bench``: measure, print a table, and say whether the bars are met."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import codecs, cold, copies, directory, loaded, lookup, nvme, redis
from bench.facts import Watch, describe, facts
from bench.harness import Bench, Question, Row, Size, heading

QUESTIONS: tuple[Question, ...] = (
    lookup.QUESTION,
    loaded.QUESTION,
    copies.QUESTION,
    nvme.QUESTION,
    directory.QUESTION,
    cold.QUESTION,
    codecs.QUESTION,
    redis.QUESTION,
)
NOT_MET = 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or with --gate 1 where a bar isn't met."""
    options = _parse(argv)
    chosen = [q for q in QUESTIONS if not options.only or q.name in options.only]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # to clean up
    out = sys.stderr if options.json else sys.stdout
    watch = Watch.begin()
    started_s = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    bench = Bench(Size(options.size), folder, out)
    try:
        print(describe(watch, folder), file=out)
        heading(out)
        for question in chosen:
            bench.question = question.name
            question.measure(bench)
        document = facts(watch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - started_s:.0f} s", file=out)
    for warning in watch.warnings():
        print(f"warning: {warning}", file=out)
    document |= {"bench": "kvstore", "size": options.size, "warnings": watch.warnings()}
    if options.json:
        print(json.dumps(document | {"rows": [row.document() for row in bench.rows]}))
    return verdict(bench.rows) if options.gate else 0


def verdict(rows: Sequence[Row]) -> int:
    missed = [row for row in rows if not row.met()]
    for row in missed:
        assert row.bar is not None
        print(
            f"bar not met: {row.question}: {row.name}: {row.median():.4g} {row.unit}, "
            f"the bar is {row.bar.sign} {row.bar.limit:g}",
            file=sys.stderr,
        )
    return NOT_MET if missed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [question.name for question in QUESTIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=[],
                        help=f"some of: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a bar isn't met")
    parser.add_argument("--json", action="store_true",
                        help="one JSON line on stdout, the table on stderr")  # fmt: skip
    parser.add_argument("--size", choices=[size.value for size in Size], default="full",
                        help="small: shows in seconds that it works")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=cache / "kvstore",
                        help="for scratch files; its disk is what is measured")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
