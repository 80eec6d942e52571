"""``kvstore serve`` that notes when it does what; for ``python -m bench.timeline``.

What it notes: each read of a socket, each message sent, and each chunk's copy, as [name, begin,
end] in nanoseconds of the monotonic clock, which all processes share. At the end of the process the
list is written as JSON into the file that BENCH_TIMELINE names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from kvstore.cli import main
from kvstore.device.pages import HostPages
from kvstore.server_connections import Connection

POINTS: tuple[tuple[type, str, str], ...] = (
    (Connection, "_readable", "receive"),
    (Connection, "send", "send"),
    (HostPages, "gather", "copy"),
    (HostPages, "scatter", "copy"),
)


def note(owner: type, method: str, name: str, noted: list[tuple[str, int, int]]) -> None:
    """Have every call of a method noted."""
    inner = getattr(owner, method)

    def outer(*arguments: Any) -> Any:
        begin_ns = time.monotonic_ns()
        try:
            return inner(*arguments)
        finally:
            noted.append((name, begin_ns, time.monotonic_ns()))

    setattr(owner, method, outer)


if __name__ == "__main__":
    found: list[tuple[str, int, int]] = []
    for point in POINTS:
        note(*point, found)
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        Path(os.environ["BENCH_TIMELINE"]).write_text(json.dumps(found), encoding="utf-8")
