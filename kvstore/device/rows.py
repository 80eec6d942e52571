"""Rows: copies of equal rows between memory and a slot, compiled where it could be.

``COMPILED`` is the module that a C compiler made at installation (_rows.c), None where there was
none; numpy then copies, more slowly. So it does in a checkout whose module was
compiled from another _rows.c than lies there. Both drop the interpreter lock throughout.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_Index = NDArray[np.intp]


class RowCopies(Protocol):
    """Copies between ``rows`` uint8 [rows, row bytes] and ``flat`` uint8 [copied rows * row bytes],
    both contiguous; ``index`` intp [copied rows] names the rows. Works from several threads."""

    def gather(self, rows: _Bytes, index: _Index, out: _Bytes) -> None:
        """Copy ``rows[index]`` to ``out``. The indices are valid: numpy's clips others."""

    def scatter(self, rows: _Bytes, index: _Index, source: _Bytes) -> None:
        """Copy ``source`` to ``rows[index]``. Raises IndexError where a row doesn't exist."""


class NumpyRows:
    """RowCopies by numpy."""

    def gather(self, rows: _Bytes, index: _Index, out: _Bytes) -> None:
        np.take(rows, index, axis=0, out=out.reshape(len(index), rows.shape[1]), mode="clip")

    def scatter(self, rows: _Bytes, index: _Index, source: _Bytes) -> None:
        rows[index] = source.reshape(len(index), rows.shape[1])


def compiled(source: Path) -> RowCopies | None:
    """The compiled module, if there is one and it was made from ``source``, where that is there."""
    try:
        module = importlib.import_module("kvstore.device._rows")
    except ImportError:
        return None
    made_from = vars(module).get("SOURCE")
    if source.exists() and hashlib.sha256(source.read_bytes()).hexdigest() != made_from:
        return None
    return cast(RowCopies, module)


COMPILED = compiled(Path(__file__).with_name("_rows.c"))
ROWS: RowCopies = COMPILED or NumpyRows()
"""What the daemon uses."""
