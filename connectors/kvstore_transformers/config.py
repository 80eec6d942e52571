"""Where the connector keeps files: the only place of it that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

SMALL_MODEL = "smollm2-135m"
"""The folder name of the model that ``fetch`` gets."""


def small_model_folder() -> Path:
    """Where the small model goes: $XDG_CACHE_HOME/kvstore/models/smollm2-135m, below ~/.cache
    where that variable isn't set to a full path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = base if base.is_absolute() else Path.home() / ".cache"
    return root / "kvstore" / "models" / SMALL_MODEL


def share_cores() -> None:
    """Let compute threads that wait for one another sleep instead of spin, unless the user chose
    (OMP_WAIT_POLICY). To be called before torch is imported.

    On two cores that others use as well, a prefill of 1,024 tokens of SmolLM2 took 3.4 s this way
    and 14.8 s spinning (medians of six, interleaved); on quiet cores it costs nothing visible.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
