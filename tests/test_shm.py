"""Engine memory mapped into the daemon: what is refused, and that nothing stays."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import LayoutMismatchError
from kvstore.device.shm import map_memory
from kvstore.memory import OwnedHostMemory, create_host_memory

MIB = 1 << 20
NAME = "kvstore-test-shm"


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def owned() -> Iterator[OwnedHostMemory]:
    with create_host_memory(NAME, 2 * MIB) as memory:
        yield memory


def test_mapping_is_the_engines_memory(owned: OwnedHostMemory) -> None:
    """What the engine writes is seen and the other way round; the descriptor isn't kept."""
    fds = open_fds()
    fd = os.dup(owned.fd)
    mapping = map_memory(fd, 2 * MIB)
    os.close(fd)
    assert open_fds() == fds
    owned.buffer[17] = 5
    assert mapping.array[17] == 5
    mapping.array[18] = 6
    assert owned.buffer[18] == 6
    assert mapping.array.shape == (2 * MIB,)
    mapping.close()


def test_part_of_the_memory_can_be_mapped(owned: OwnedHostMemory) -> None:
    """The registered size may be smaller than the memfd and no multiple of a page."""
    mapping = map_memory(owned.fd, MIB + 1)
    assert mapping.array.nbytes == mapping.nbytes == MIB + 1
    mapping.close()


def test_close_unmaps_whatever_still_points_there(owned: OwnedHostMemory) -> None:
    """Field case 49: a session ends while views of its memory are alive somewhere; its memory is
    unmapped all the same."""
    mine = len(mappings())
    mapping = map_memory(owned.fd, 2 * MIB)
    views = [mapping.array[4096:8192], mapping.array.reshape(-1, 4096)]
    assert len(mappings()) == mine + 1
    mapping.close()
    mapping.close()
    assert len(mappings()) == mine
    assert len(views) == 2
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.array


def test_sessions_come_and_go_and_leave_nothing(owned: OwnedHostMemory) -> None:
    """Field case 49: after 20 sessions, mappings and descriptors are what they were."""
    map_memory(owned.fd, 2 * MIB).close()
    before = (len(Path("/proc/self/maps").read_text().splitlines()), open_fds())
    for _ in range(20):
        mapping = map_memory(owned.fd, 2 * MIB)
        view = mapping.array[:10]
        mapping.close()
        del view
    assert (len(Path("/proc/self/maps").read_text().splitlines()), open_fds()) == before


def test_access_after_close_faults() -> None:
    """A forgotten view can't write into whatever is mapped there next."""
    code = (
        "import resource; from kvstore.memory import create_host_memory;"
        "from kvstore.device.shm import map_memory;"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        "o = create_host_memory('x', 1 << 20); m = map_memory(o.fd, 1 << 20); a = m.array;"
        "m.close(); n = map_memory(o.fd, 1 << 20); a[0] = 1; print('written')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert not done.stdout


def refused(fd: int, nbytes: int) -> str:
    """The one line with which a descriptor is refused; nothing stays mapped."""
    before = len(mappings())
    with pytest.raises(LayoutMismatchError) as caught:
        map_memory(fd, nbytes)
    assert len(mappings()) == before
    line = str(caught.value)
    assert "\n" not in line
    assert "valid" in line
    return line


def test_refuses_what_is_no_memfd(tmp_path: Path) -> None:
    """A file or a pipe, which can be truncated, or has no bytes at all."""
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file:
        assert "no memfd" in refused(file.fileno(), MIB)
    ends = os.pipe()
    assert "no memfd" in refused(ends[0], MIB)
    for end in ends:
        os.close(end)


def test_refuses_memory_that_can_shrink() -> None:
    """A memfd without the seal could be truncated in the middle of a copy: SIGBUS."""
    fd = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    assert "seals=0x0" in refused(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    assert "F_SEAL_SHRINK" in refused(fd, MIB)
    os.close(fd)


def test_refuses_more_than_there_is(owned: OwnedHostMemory) -> None:
    """A registered size beyond the memfd's end would fault."""
    line = refused(owned.fd, 2 * MIB + 1)
    assert f"nbytes={2 * MIB + 1}" in line
    assert f"1..{2 * MIB}" in line
    assert "nbytes=0" in refused(owned.fd, 0)


def test_refuses_memory_that_cannot_be_written(owned: OwnedHostMemory) -> None:
    """A read-only descriptor, or one sealed against writing: a retrieve would fault."""
    fd = os.open(f"/proc/self/fd/{owned.fd}", os.O_RDONLY)
    assert "reading and writing" in refused(fd, MIB)
    os.close(fd)
    fd = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    assert "forbid writing" in refused(fd, MIB)
    os.close(fd)


def test_arrays_of_the_mapping_are_plain_bytes(owned: OwnedHostMemory) -> None:
    mapping = map_memory(owned.fd, 2 * MIB)
    assert mapping.array.dtype == np.uint8
    assert mapping.array.flags.writeable
    assert mapping.array.ctypes.data % 4096 == 0
    mapping.close()
