"""Restored: what a start must bring back. Each chunk whose every shard has a legible record of the
durable epoch, and whose parent has too, up to the root."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, SpaceRecord, TierName
from kvstore.core.service import Service
from tests.sim.errors import SimulationError
from tests.sim.views import SpaceKey

Family = tuple[SpaceKey, bytes]
"""A namespace of a tenant, and a chunk key."""


def whole_families(
    headers: Iterable[ChunkHeader], manifest: tuple[SpaceRecord, ...]
) -> set[Family]:
    """The chunks that are there whole, with all that is above them."""
    epochs = {(space.tenant, space.namespace): space.epoch for space in manifest}
    places: dict[Family, tuple[int, Family, int]] = {}
    shards: dict[Family, set[int]] = {}
    for head in headers:
        space = (head.tenant, head.namespace)
        if epochs.get(space) != head.epoch or head.part is not Part.FULL:
            continue
        name = (space, bytes(head.key))
        places[name] = (head.depth, (space, bytes(head.parent)), head.shards)
        shards.setdefault(name, set()).add(head.shard)
    whole: set[Family] = set()
    for name, (depth, parent, count) in sorted(places.items(), key=lambda item: item[1][0]):
        rooted = depth == 0 or (parent in whole and places[parent][0] == depth - 1)
        if rooted and len(shards[name]) == count:
            whole.add(name)
    return whole


def check_restored(service: Service, families: set[Family]) -> int:
    """Raise SimulationError unless each of these chunks can be read; tells how many there are."""
    state = service._state
    tree = state.directory.tree(TierName.NVME)
    for (tenant, namespace), key in families:
        space = state.spaces.find(tenant, namespace)
        copy = None if tree is None or space is None else tree.find(space, key)
        if copy is None or not copy.visible():
            raise SimulationError(
                f"{key.hex()[:6]} is whole on the disk, but wasn't found at start"
            )
    return len(families)
