"""SlabFile: which files of an NVMe folder are slabs.

Slab *n* cut into slots of *s* bytes is the regular file ``slab_<n>_<s>.kv``; of two files of one
slab the newer one counts. A spare (spares.py) is ``spare_<n>.kv``. The tier, a check without a
daemon and the sizing before a start all go by this.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.limits import ALIGN_BYTES, HEADER_BYTES
from kvstore.tiers import lock, manifest

UNFINISHED_SPARE_NAME = "spare.part"
_SPARE = re.compile(r"spare_(0|[1-9][0-9]{0,8})\.kv")
_NAME = re.compile(r"slab_(0|[1-9][0-9]{0,8})_([1-9][0-9]{0,15})\.kv")
_OTHERS = {
    lock.FILE_NAME,
    manifest.FILE_NAME,
    manifest.TEMPORARY_NAME,
    manifest.RESERVE_NAME,
    UNFINISHED_SPARE_NAME,
}


@dataclass(frozen=True, slots=True)
class SlabFile:
    """A slab's file, and when it was last written."""

    slab: int
    slot_bytes: int
    written_ns: int

    def name(self) -> str:
        """Its name in the folder."""
        return slab_name(self.slab, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class SlabFiles:
    """What is in a folder: the file of each slab, in slab order, older files of the same slabs, the
    names of spares, and the names of what isn't the tier's."""

    current: dict[int, SlabFile]
    replaced: list[SlabFile]
    spares: list[str]
    strange: list[str]


def slab_name(slab: int, slot_bytes: int) -> str:
    """The name of a slab's file."""
    return f"slab_{slab}_{slot_bytes}.kv"


def spare_name(number: int) -> str:
    """The name of a finished spare."""
    return f"spare_{number}.kv"


def is_slot_size(slot_bytes: int, slab_bytes: int) -> bool:
    """Whether a slab can be cut into slots of this size."""
    return slot_bytes % ALIGN_BYTES == 0 and HEADER_BYTES < slot_bytes <= slab_bytes


def slab_files(folder: Path, slab_bytes: int) -> SlabFiles:
    """Look into a folder whose slabs have ``slab_bytes``. Raises OSError."""
    files, spares, strange = [], [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _SPARE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                spares.append(entry.name)
                continue
            match = _NAME.fullmatch(entry.name)
            if match is None or not _is_slab(entry, int(match[2]), slab_bytes):
                strange.append(entry.name)
                continue
            written_ns = entry.stat(follow_symlinks=False).st_mtime_ns
            files.append(SlabFile(int(match[1]), int(match[2]), written_ns))
    files.sort(key=lambda file: (file.slab, file.written_ns, file.slot_bytes))
    current = {file.slab: file for file in files}
    replaced = [file for file in files if current[file.slab] is not file]
    return SlabFiles(current, replaced, sorted(spares), sorted(set(strange) - _OTHERS))


def _is_slab(entry: os.DirEntry[str], slot_bytes: int, slab_bytes: int) -> bool:
    return is_slot_size(slot_bytes, slab_bytes) and entry.is_file(follow_symlinks=False)
