"""What a check of the doctor found, and how findings are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from kvstore.cli_status import FAILURE, OK


class Status(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, how it stands, and what to do (empty where there is nothing)."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def show(findings: Sequence[Finding], as_json: bool) -> int:
    """Print them; FAILURE if one failed."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        lines = [asdict(finding) | {"status": finding.status.value} for finding in findings]
        print(json.dumps({"ok": not failed, "checks": lines}))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            advice = f"; {finding.advice}" if finding.advice else ""
            print(f"{finding.status.value:<4}  {finding.name:<{width}}  {finding.detail}{advice}")
    return FAILURE if failed else OK
