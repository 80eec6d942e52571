"""Shared memory of an engine, and mappings that end for certain."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvstore import memory
from kvstore.core.errors import CapacityError, LayoutMismatchError

MIB = 1 << 20


def mappings(name: str) -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return [line for line in file if name in line]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def runs_beside(work: threading.Thread, started: threading.Event) -> bool:
    """Whether this thread ran while ``work`` was at it, though nobody takes the interpreter lock
    away: then ``work`` gave it up by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        work.start()
        started.wait()
        return work.is_alive()
    finally:
        sys.setswitchinterval(before)
        work.join()


def test_created_memory_is_zeroed_shared_and_sealed() -> None:
    """An engine creates memory; whoever has the descriptor sees the same bytes and can't cut it."""
    with memory.create_host_memory("kvstore-test-a", 3 * MIB + 5) as owned:
        assert owned.describe() == memory.HostMemory(owned.fd, 3 * MIB + 5)
        assert owned.nbytes == len(owned.buffer) == 3 * MIB + 5
        assert not any(owned.buffer[::4096])
        owned.buffer[-1] = 7
        assert os.pread(owned.fd, 1, 3 * MIB + 4) == b"\x07"
        assert fcntl.fcntl(owned.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(owned.fd, 0)


def test_created_memory_is_all_there() -> None:
    """Pages are faulted in at creation, not one by one under the engine's first step."""
    with memory.create_host_memory("kvstore-test-b", 20 * MIB):
        assert os.path.exists("/proc/self/smaps")
        with open("/proc/self/smaps", encoding="utf-8") as file:
            text = file.read()
        behind = text[text.index("kvstore-test-b") :]
        rss = next(line for line in behind.splitlines() if line.startswith("Rss:"))
        assert rss.split()[1] == str(20 * 1024)


def test_owner_closes_but_arrays_stay_valid() -> None:
    """A tensor made over the memory outlives its owner; the memory goes with the last one."""
    fds = open_fds()
    owned = memory.create_host_memory("kvstore-test-c", MIB)
    array = np.frombuffer(owned.buffer, np.uint8)
    owned.close()
    owned.close()
    array[5] = 9
    assert array[5] == 9
    assert open_fds() == fds
    assert mappings("kvstore-test-c")
    del array
    assert not mappings("kvstore-test-c")
    with pytest.raises(ValueError, match="closed"):
        _ = owned.buffer


def test_impossible_sizes_leave_nothing_behind() -> None:
    """A size below 1 and one beyond every address space are refused in one line each."""
    fds = open_fds()
    with pytest.raises(LayoutMismatchError, match="nbytes=0"):
        memory.create_host_memory("kvstore-test-d", 0)
    with pytest.raises(CapacityError, match="1152921504606846976"):
        memory.create_host_memory("kvstore-test-d", 1 << 60)
    assert open_fds() == fds
    assert not mappings("kvstore-test-d")


def test_failed_populate_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine runs out of pages half-way through creation."""

    def refuse(address: int, nbytes: int) -> None:
        raise CapacityError("no pages")

    monkeypatch.setattr(memory, "populate", refuse)
    fds = open_fds()
    with pytest.raises(CapacityError):
        memory.create_host_memory("kvstore-test-e", MIB)
    assert open_fds() == fds
    assert not mappings("kvstore-test-e")


def test_closed_range_gives_its_pages_back_at_once() -> None:
    """An array still points into a closed range: the pages are gone all the same, the addresses
    stay taken until the array is gone, so nothing else can be mapped where it points."""
    range_ = memory.map_anonymous(4 * MIB)
    array = np.frombuffer(range_.buffer, np.uint8)
    array[:] = 1
    start = f"{range_.address:x}"
    range_.close()
    range_.close()
    with open("/proc/self/smaps", encoding="utf-8") as file:
        blocks = file.read().split("VmFlags")
    (block,) = [b for b in blocks if covers(b, range_.address)]
    assert "---p" in block
    assert "Rss:                   0 kB" in block
    del array, start
    with open("/proc/self/smaps", encoding="utf-8") as file:
        blocks = file.read().split("VmFlags")
    assert not [b for b in blocks if covers(b, range_.address) and "---p" in b]


def covers(block: str, address: int) -> bool:
    head = next((line for line in block.splitlines() if "-" in line.split(" ")[0]), "0-0 ")
    low, high = (int(text, 16) for text in head.split(" ")[0].split("-"))
    return low <= address < high


def test_stale_array_faults_instead_of_reading_another_mapping() -> None:
    """Reading through an array of a closed range ends the process, never returns bytes."""
    code = (
        "import numpy, resource; from kvstore import memory;"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        "r = memory.map_anonymous(1 << 20); a = numpy.frombuffer(r.buffer, numpy.uint8);"
        "r.close(); others = [memory.map_anonymous(1 << 20) for _ in range(50)]; print(a[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert not done.stdout


def test_populate_changes_nothing_and_gives_up_the_interpreter_lock() -> None:
    """Pages of a live mapping are faulted in beside other threads, which keep running."""
    range_ = memory.map_anonymous(64 * MIB)
    array = np.frombuffer(range_.buffer, np.uint8)
    array[::MIB] = 3
    started = threading.Event()

    def work() -> None:
        started.set()
        memory.populate_in_steps(range_.address, range_.nbytes)

    assert any(runs_beside(threading.Thread(target=work), started) for _ in range(5))
    assert (array[::MIB] == 3).all()
    assert array.sum() == 3 * 64


def test_anonymous_range_is_aligned_for_huge_pages() -> None:
    range_ = memory.map_anonymous(5 * MIB)
    assert range_.address % (2 * MIB) == 0
    assert memory.advise_huge_pages(range_.address, range_.nbytes) in (True, False)
