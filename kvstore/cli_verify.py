"""``kvstore verify``: check an NVMe folder that no daemon uses, slot by slot."""

from __future__ import annotations

import argparse
import json
import sys

from kvstore.cli_status import FAILURE, OK
from kvstore.config import Settings
from kvstore.core.errors import ConfigError
from kvstore.units import format_size
from kvstore.verify import FolderCheck, Verdict

NAMES_SHOWN_MAX = 10


def run(settings: Settings, namespace: argparse.Namespace) -> int:
    """Read every header and payload and print the counts; 1 where something is damaged and wasn't
    repaired."""
    folder = settings.nvme_path()
    if not folder.is_dir():
        raise ConfigError(f"nvme.path={folder} is no folder; set it to one that a daemon has used")
    with FolderCheck(folder) as check:
        report = check.run(repair=namespace.repair)
    damaged = sum(report.counts[verdict] for verdict in Verdict if verdict.damaged())
    sound = not damaged or namespace.repair
    if namespace.json:
        print(
            json.dumps(
                {
                    "folder": str(folder),
                    "ok": sound,
                    "clean": report.clean,
                    "slots": sum(report.counts.values()),
                    "bytes": report.read_bytes,
                    "erased": report.erased,
                    "ignored": report.ignored,
                    **{verdict.value: report.counts[verdict] for verdict in Verdict},
                }
            )
        )
    else:
        stop = "cleanly" if report.clean else "not cleanly (a crash, or kill -9)"
        print(f"{folder}: {format_size(report.read_bytes)} read; the last daemon ended {stop}")
        for verdict in Verdict:
            print(f"{report.counts[verdict]:>9}  {verdict.value:<10} {verdict.meaning()}")
        if report.ignored:
            names = ", ".join(ascii(name) for name in report.ignored[:NAMES_SHOWN_MAX])
            print(f"{len(report.ignored)} files are none of the tier's, nothing was read: {names}")
        if report.erased:
            print(f"{report.erased} slots were erased")
    if not sound and not namespace.json:
        print("the daemon drops these slots by itself; --repair erases them now", file=sys.stderr)
    return OK if sound else FAILURE
