"""HostPages under the published contract."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.core.layout import Layout
from kvstore.device.pages import HostPages
from kvstore.device.rows import ROWS, NumpyRows, RowCopies
from kvstore.testing import MEMORY_BYTES, PagesContract, pattern


class HostBench:
    """Host memory of a tail that no page size divides."""

    def __init__(self, layout: Layout, copies: RowCopies = ROWS) -> None:
        layout.validate(MEMORY_BYTES + 13)
        self._memory = pattern(0, MEMORY_BYTES + 13)
        self.pages = HostPages(self._memory, layout, copies)

    def image(self) -> NDArray[np.uint8]:
        return self._memory.copy()


class TestHostPages(PagesContract):
    @pytest.fixture
    def make_paged(self) -> Callable[[Layout], HostBench]:
        return HostBench


class TestHostPagesByNumpy(PagesContract):
    """As where there was no C compiler."""

    @pytest.fixture
    def make_paged(self) -> Callable[[Layout], HostBench]:
        return functools.partial(HostBench, copies=NumpyRows())
