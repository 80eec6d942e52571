"""What each kind of change says: the tier, the part of the chunk, and whether it was gained."""

from __future__ import annotations

from kvstore.core.changes import ChangeKind
from kvstore.core.layout import Part
from kvstore.core.messages import TierName

MEANING: dict[ChangeKind, tuple[TierName, Part, bool]] = {
    ChangeKind.HOST_LOST: (TierName.HOST, Part.FULL, False),
    ChangeKind.HOST_GAINED: (TierName.HOST, Part.FULL, True),
    ChangeKind.NVME_LOST: (TierName.NVME, Part.FULL, False),
    ChangeKind.NVME_GAINED: (TierName.NVME, Part.FULL, True),
    ChangeKind.HOST_WINDOW_LOST: (TierName.HOST, Part.WINDOW, False),
    ChangeKind.HOST_WINDOW_GAINED: (TierName.HOST, Part.WINDOW, True),
    ChangeKind.NVME_WINDOW_LOST: (TierName.NVME, Part.WINDOW, False),
    ChangeKind.NVME_WINDOW_GAINED: (TierName.NVME, Part.WINDOW, True),
}
