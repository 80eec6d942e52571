"""Which vLLM this connector was made for: checked when vLLM imports it."""

from __future__ import annotations

import logging
import re

from kvstore.core.errors import ConfigError

OLDEST, NEWEST = (0, 32), (0, 32)
"""The first and the last minor version that were tried."""
_log = logging.getLogger("vllm.kvstore")


def check_version(version: str) -> None:
    """Raise ConfigError, in one line, for a vLLM without the calls that the connector needs; warn
    of one that wasn't tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        _log.warning("kvstore: vLLM calls itself %r; tried was %s", version, _text(NEWEST))
        return
    minor = int(found[1]), int(found[2])
    if minor < OLDEST:
        raise ConfigError(
            f"kvstore needs vLLM {_text(OLDEST)} or newer; this is {version}. Upgrade vLLM, or "
            "leave the connector out"
        )
    if minor > NEWEST:
        _log.warning("kvstore: vLLM %s wasn't tried; the newest that was is %s", version,
                     _text(NEWEST))  # fmt: skip


def _text(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
