"""Row copies: the compiled ones and numpy's do the same, to the byte, and touch nothing else."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.device.rows import COMPILED, NumpyRows, RowCopies, compiled
from kvstore.testing import pattern

Bytes = NDArray[np.uint8]
COPIES = [NumpyRows(), *([COMPILED] if COMPILED else [])]
SIZES = st.one_of(
    st.integers(1, 300), st.integers(900, 1400), st.sampled_from([4096, 16_384, 70_001])
)


def test_compiled_copies_are_there_where_a_compiler_is() -> None:
    """An installation that quietly falls back to numpy is slower than it says."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler, so rows are copied by numpy")
    assert COMPILED is not None, "run: python setup.py build_ext --inplace"


@pytest.mark.skipif(COMPILED is None, reason="no C compiler when this was installed")
def test_a_module_of_another_source_is_not_used(tmp_path: Path) -> None:
    """A checkout's source has changed since its module was compiled."""
    source = tmp_path / "_rows.c"
    assert compiled(source) is COMPILED
    source.write_text("int changed;")
    assert compiled(source) is None


class Guarded:
    """``nbytes`` zeros that begin ``shift`` bytes behind a line's start, between sevens."""

    def __init__(self, nbytes: int, shift: int) -> None:
        self._whole = np.full(nbytes + 256, 7, np.uint8)
        start = 64 - self._whole.ctypes.data % 64 + shift
        self._place = slice(start, start + nbytes)
        self.inside = self._whole[self._place]
        self.inside[:] = 0

    def check(self) -> None:
        """The sevens are what they were."""
        assert (self._whole[: self._place.start] == 7).all()
        assert (self._whole[self._place.stop :] == 7).all()


@pytest.mark.parametrize("copies", COPIES, ids=lambda c: type(c).__name__)
@settings(deadline=None)
@given(data=st.data(), row_bytes=SIZES, shift=st.integers(0, 63))
def test_rows_are_copied_exactly(
    copies: RowCopies, data: st.DataObject, row_bytes: int, shift: int
) -> None:
    """Any size of row, order and alignment; bytes before, between and behind stay as they are."""
    rows = pattern(1, 9 * row_bytes).reshape(9, row_bytes)
    index = np.array(data.draw(st.lists(st.integers(0, 8), max_size=9, unique=True)), np.intp)
    out = Guarded(len(index) * row_bytes, shift)
    copies.gather(rows, index, out.inside)
    np.testing.assert_array_equal(out.inside.reshape(len(index), row_bytes), rows[index])
    target, expected = Guarded(9 * row_bytes, shift), np.zeros_like(rows)
    copies.scatter(target.inside.reshape(9, row_bytes), index, out.inside)
    expected[index] = rows[index]
    np.testing.assert_array_equal(target.inside.reshape(9, row_bytes), expected)
    out.check()
    target.check()


@pytest.mark.skipif(COMPILED is None, reason="no C compiler when this was installed")
class TestCompiled:
    """What compiled code must refuse itself, before the first byte moves."""

    copies: RowCopies = COMPILED or NumpyRows()

    @pytest.mark.parametrize("row", [-1, 4, 2**40, -(2**63)])
    def test_row_that_does_not_exist_is_refused(self, row: int) -> None:
        rows, flat = np.zeros((4, 4096), np.uint8), np.ones(8192, np.uint8)
        index = np.array([0, row], np.intp)
        with pytest.raises(IndexError, match=rf"no row {row}; valid are 0\.\.3"):
            self.copies.scatter(rows, index, flat)
        with pytest.raises(IndexError):
            self.copies.gather(rows, index, flat)
        assert not rows.any()
        assert flat.all()

    def test_sizes_that_do_not_match_are_refused(self) -> None:
        rows = np.zeros((4, 4096), np.uint8)
        for nbytes in (0, 4095, 4097, 8192):
            with pytest.raises(ValueError, match="rows: "):
                self.copies.gather(rows, np.array([1], np.intp), np.zeros(nbytes, np.uint8))

    def test_sizes_whose_product_overflows_are_refused(self) -> None:
        """A million rows of 16 TiB, mapped and never touched, are 2^64 bytes: not 0."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapped = mmap.mmap(-1, 1 << 44, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:
            pytest.skip(f"16 TiB of addresses can't be had: {error}")
        rows = np.frombuffer(mapped, np.uint8).reshape(1, -1)
        with pytest.raises(ValueError, match="rows: 0 bytes for 1048576 rows of 17592186044416"):
            self.copies.gather(rows, np.zeros(1 << 20, np.intp), np.zeros(0, np.uint8))
        with pytest.raises(ValueError, match="rows: "):
            self.copies.gather(rows[:0], np.zeros(0, np.intp), np.zeros(1, np.uint8))

    def test_nothing_is_copied_where_there_is_nothing(self) -> None:
        """No rows, none chosen, or rows of no bytes."""
        none, some = np.zeros(0, np.intp), np.zeros(3, np.intp)
        for rows, index in (((0, 64), none), ((4, 64), none), ((4, 0), none), ((4, 0), some)):
            self.copies.gather(np.zeros(rows, np.uint8), index, np.zeros(0, np.uint8))
            self.copies.scatter(np.zeros(rows, np.uint8), index, np.zeros(0, np.uint8))
        with pytest.raises(IndexError):
            self.copies.gather(np.zeros((0, 0), np.uint8), some, np.zeros(0, np.uint8))

    def test_arrays_of_another_kind_are_refused(self) -> None:
        rows, index, flat = (
            np.zeros((4, 64), np.uint8),
            np.array([1], np.intp),
            np.zeros(64, np.uint8),
        )
        wrong: list[tuple[Any, Any, Any]] = [
            (rows[0], index, flat),
            (rows, index.astype(np.int32), flat),
            (rows, index.reshape(1, 1), flat),
            (rows[:, ::2], index, flat[:32]),
            (np.zeros((4, 8), np.float64), index, flat),
            (rows, "01234567", flat),
            (rows, index.astype(np.float64), flat),
            (rows, index.byteswap().view(index.dtype.newbyteorder()), flat),
        ]
        for arguments in wrong:
            with pytest.raises((ValueError, BufferError, TypeError)):
                self.copies.gather(*arguments)

    def test_memory_that_may_not_be_written_is_refused(self) -> None:
        rows, index, flat = (
            np.zeros((4, 64), np.uint8),
            np.array([1], np.intp),
            np.ones(64, np.uint8),
        )
        flat.flags.writeable = False
        with pytest.raises((ValueError, BufferError)):
            self.copies.gather(rows, index, flat)
        self.copies.scatter(rows, index, flat)
        assert rows[1].all()
