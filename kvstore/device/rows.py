"""Rows: copies of equal rows between memory and a slot, compiled where it could be.

``COMPILED`` is the module that a C compiler made at installation (_rows.c), None where there was
none; numpy then copies, at 0.6 to 0.9 of its speed. Both drop the interpreter lock throughout.
"""

from __future__ import annotations

import importlib
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


def _compiled() -> RowCopies | None:
    try:
        return cast(RowCopies, importlib.import_module("kvstore.device._rows"))
    except ImportError:
        return None


COMPILED = _compiled()
ROWS: RowCopies = COMPILED or NumpyRows()
"""What the daemon uses."""
