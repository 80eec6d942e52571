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
