"""MoverBench: a mover over a real arena and a real disk that fails on demand."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.core.layout import LayerGroup, Layout, TensorSpan
from kvstore.core.messages import (
    Move,
    Moved,
    MoveID,
    MoveKind,
    MoveStatus,
    Place,
    SessionID,
    TierName,
)
from kvstore.device.pages import HostPages
from kvstore.mover import Mover, MoverThreads
from kvstore.testing import FaultyTier, SlabBytes, packed, pattern, sample_header
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier

LAYOUT = Layout(
    "bfloat16", 32,
    (LayerGroup("full", 16, None, (
        TensorSpan(0, 4096, 4096, 16), TensorSpan(65_536, 1500, 1500, 16))),),
)  # fmt: skip
PAYLOAD_BYTES = 2 * (4096 + 1500)
HOST_SLOT_BYTES = 12_288
NVME_SLOT_BYTES = 16_384
SESSION = SessionID(7)


class MoverBench:
    """A mover over a real arena and a real disk that fails on demand."""

    def __init__(self, folder: Path) -> None:
        self.memory = pattern(0, 65_536 + 16 * 1500)
        self.host = HostTier(2, 8 * HOST_SLOT_BYTES)
        self.nvme = FaultyTier(NvmeTier(folder, 2, 8 * NVME_SLOT_BYTES), SlabBytes(folder))
        self.reports: queue.Queue[Moved] = queue.Queue()
        self.hooks: list[Callable[[str, Move], None]] = []
        self.mover = self.make_mover(MoverThreads(2, 2, 1))
        self._numbers = iter(range(1, 10_000))

    def make_mover(self, threads: MoverThreads) -> Mover:
        return Mover(self.host, {TierName.NVME: self.nvme}, self.report, threads, self._at)

    def report(self, ended: Sequence[Moved]) -> None:
        for moved in ended:
            self.reports.put(moved)

    def open(self) -> None:
        self.host.open()
        self.nvme.open()
        self.mover.open()
        self.mover.attach(SESSION, HostPages(self.memory, LAYOUT))

    def close(self) -> None:
        self.mover.close()
        self.nvme.close()
        self.host.close()

    def move(self, kind: MoveKind, seed: int = 1, *, slot: int = 0, at: int = 0) -> Move:
        """A Move of chunk ``seed`` between host slot ``slot``, NVMe slot ``at`` and blocks."""
        host = Place(TierName.HOST, 1, slot, HOST_SLOT_BYTES)
        nvme = Place(TierName.NVME, 0, at, NVME_SLOT_BYTES)
        source, target = {
            MoveKind.STORE: (None, host), MoveKind.LOAD: (host, None),
            MoveKind.READ: (nvme, host), MoveKind.WRITE: (host, nvme), MoveKind.ERASE: (None, nvme),
        }[kind]  # fmt: skip
        copies = kind in (MoveKind.STORE, MoveKind.LOAD)
        return Move(
            id=MoveID(next(self._numbers)), kind=kind, header=sample_header(seed, PAYLOAD_BYTES),
            source=source, target=target, session=SESSION if copies else None,
            blocks=((0, packed(3, 9)),) if copies else (),
        )  # fmt: skip

    def run(self, move: Move) -> MoveStatus:
        self.mover.submit(move)
        moved = self.reports.get(timeout=60)
        assert moved.move == move.id
        return moved.status

    def slot(self, slot: int = 0) -> np.ndarray:
        return self.host.view(Place(TierName.HOST, 1, slot, HOST_SLOT_BYTES), PAYLOAD_BYTES)

    def image(self) -> np.ndarray:
        """The chunk in blocks 3 and 9, in canonical order."""
        parts = [self.memory[b * 4096 : (b + 1) * 4096] for b in (3, 9)]
        parts += [self.memory[65_536 + b * 1500 : 65_536 + (b + 1) * 1500] for b in (3, 9)]
        return np.concatenate(parts)

    def _at(self, point: str, move: Move) -> None:
        for hook in self.hooks:
            hook(point, move)
