"""Fleet: a fake remote tier that several worlds share, and what befalls it.

Values are records as on a disk, by tenant, namespace, fleet's epoch, key, shard and part. Each
world reaches it through a Node (node.py), which may see it down while another one doesn't.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvstore.core.keys import KEY_BYTES
from kvstore.core.layout import Part
from kvstore.core.messages import ChunkHeader, Place, TierName
from kvstore.core.remote_messages import Probe, RemoteClear, RemoteEnter
from tests.sim.cells import PartKey
from tests.sim.faults import NONE_OF_FLEET, Fault, FleetFaults
from tests.sim.media import Record
from tests.sim.timeline import Timeline
from tests.sim.views import SpaceKey

FIRST_EPOCH = 1_700_000_000_000_000
Name = tuple[str, bytes, int, bytes, int, Part]
"""(tenant, namespace, fleet's epoch, key, shard, part)."""


def name_of(header: ChunkHeader, place: Place) -> Name:
    """The value that a Move from or to the remote tier names."""
    return (
        header.tenant,
        header.namespace,
        place.slab,
        bytes(header.key),
        header.shard,
        header.part,
    )


@dataclass(slots=True)
class Fleet:
    """What the remote tier holds. ``newest`` is the epoch under which a part was last stored whole;
    it never forgets."""

    timeline: Timeline
    rng: random.Random
    faults: FleetFaults
    values: dict[Name, Record] = field(default_factory=dict)
    epochs: dict[SpaceKey, int] = field(default_factory=dict)
    entered: dict[SpaceKey, RemoteEnter] = field(default_factory=dict)
    newest: dict[PartKey, int] = field(default_factory=dict)
    slow_until: float = 0.0
    full_until: float = 0.0
    pause_s: float = 0.006
    """How long a step takes at most where nothing is slow."""

    def epoch(self, space: SpaceKey) -> int:
        """The fleet's epoch of a namespace."""
        return self.epochs.setdefault(space, FIRST_EPOCH)

    def probe(self, probe: Probe) -> tuple[int, tuple[bytes, ...]]:
        """The epoch, and what is there under it."""
        epoch = self.epoch((probe.tenant, probe.namespace))
        keys = [probe.keys[i : i + KEY_BYTES] for i in range(0, len(probe.keys), KEY_BYTES)]

        def there(key: bytes, part: Part) -> bool:
            names = ((probe.tenant, probe.namespace, epoch, key, s, part) for s in probe.shards)
            return all(name in self.values for name in names)

        return epoch, tuple(bytes(there(key, part) for key in keys) for part in probe.parts)

    def put(self, name: Name, record: Record) -> None:
        """Store a value whole."""
        self.values[name] = record
        part = (name[0], name[1], *name[3:])
        self.newest[part] = max(self.newest.get(part, 0), name[2])

    def clear(self, clear: RemoteClear) -> dict[SpaceKey, int]:
        """Raise the epochs that match; tells what they are now."""
        raised: dict[SpaceKey, int] = {}
        for space, entered in self.entered.items():
            tenant = clear.tenant in (None, entered.tenant)
            if tenant and clear.model in (None, entered.model, entered.alias):
                self.epochs[space] = raised[space] = self.epoch(space) + 1
        return raised

    # ------------------------------------------------------------ bad luck

    def luck(self) -> list[Fault]:
        """What happens to the servers now, if anything."""
        rng, faults, happened = self.rng, self.faults, []
        now = self.timeline.now
        if rng.random() < faults.slow_rate:
            self.slow_until = now + rng.uniform(0.1, 3.0)
        if rng.random() < faults.full_rate:
            self.full_until = now + rng.uniform(0.1, 5.0)
        if rng.random() < faults.lose_rate and self.values:
            for name in rng.sample(list(self.values), min(len(self.values), rng.randint(1, 4))):
                del self.values[name]
            happened.append(Fault.REDIS_LOSES)
        if rng.random() < faults.damage_rate and self.values:
            record = self.values[rng.choice(list(self.values))]
            record.second[rng.randrange(len(record.second))] = "flipped"
            happened.append(Fault.REDIS_DAMAGED)
        if rng.random() < faults.misplace_rate and len(self.values) > 1:
            one, other = rng.sample(list(self.values), 2)
            self.values[one], self.values[other] = self.values[other], self.values[one]
            happened.append(Fault.REDIS_MISPLACED)
        return happened

    def calm(self) -> None:
        """Nothing goes wrong from now on, and nothing damaged is left."""
        self.faults = NONE_OF_FLEET
        self.slow_until = self.full_until = 0.0
        self.pause_s = 0.001
        for name, record in list(self.values.items()):
            if not record.intact() or name != name_of(record.header, _under(name[2])):
                del self.values[name]


def _under(epoch: int) -> Place:
    return Place(TierName.REDIS, epoch, 0, 0)
