"""Space: one namespace of one tenant, its epoch and its index in each tier; Spaces: all of them.

A clear doesn't walk chunks: it replaces the Space by a new one of a higher epoch and drops the old
one's indices, which the trees sweep in steps. Whatever still refers to the old Space sees that it
is not ``alive``. The reply waits until the new epochs are durable, and nothing of a namespace is
written to a durable tier before its record is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

from kvstore.core.errors import CapacityError
from kvstore.core.messages import LOCAL_TIERS, Persist, SpaceRecord, TierName
from kvstore.core.tree_nodes import Index

SPACES_MAX = 65_536
_FORGET_SPACES = 256
"""Unused namespaces forgotten at a time, to make room for new ones."""


class Space:
    """A namespace of a tenant in its current epoch. ``shards`` is 0 until something tells it;
    ``entered_at`` counts how often the remote tier had come up when it was made known there.

    ``fleet_epoch`` is the remote tier's highest that was told (0: none yet), ``age`` how often one
    was, ``told_at`` the age when this one was first. Where it has risen some other node has cleared
    the namespace: what was here when an older one was told, stored at an age below ``shared_from``,
    must not be shared again.
    """

    __slots__ = (
        "age",
        "alias",
        "alive",
        "dtype",
        "entered_at",
        "epoch",
        "fleet_epoch",
        "index",
        "model",
        "namespace",
        "persisted",
        "shards",
        "shared_from",
        "tenant",
        "tokens",
        "told_at",
    )

    def __init__(self, record: SpaceRecord, shards: int, persisted: bool) -> None:
        self.tenant = record.tenant
        self.namespace = record.namespace
        self.model = record.model
        self.alias = record.alias
        self.epoch = record.epoch
        self.shards = shards
        self.dtype = ""
        self.tokens = 0
        self.persisted = persisted
        self.alive = True
        self.entered_at = 0
        self.fleet_epoch = self.age = self.told_at = self.shared_from = 0
        self.index: dict[TierName, Index] = {tier: Index() for tier in LOCAL_TIERS}

    def saw_fleet_epoch(self, epoch: int) -> None:
        """The remote tier told its epoch of this namespace."""
        if epoch > self.fleet_epoch:
            self.shared_from = self.age if self.fleet_epoch else 0
            self.fleet_epoch, self.told_at = epoch, self.age + 1
        elif epoch < self.fleet_epoch:  # an answer that came late: there was a clear in between
            self.shared_from = max(self.shared_from, self.told_at)
        self.age += 1

    def record(self) -> SpaceRecord:
        """As the manifest keeps it."""
        return SpaceRecord(self.tenant, self.namespace, self.model, self.alias, self.epoch)

    def matches(self, tenant: str | None, model: str | None) -> bool:
        """Whether a clear of this tenant and model (None: any) means it."""
        return (tenant is None or tenant == self.tenant) and (
            model is None or model in (self.model, self.alias)
        )

    def chunks(self) -> int:
        """Chunks in the tier that has most of them."""
        return max(map(len, self.index.values()))


@dataclass(slots=True)
class Spaces:
    """All spaces by (tenant, namespace digest), and the numbered Persist effects that are under
    way. ``_unpersisted`` has the number of the first Persist that holds a space's record, in the
    order in which they came."""

    _spaces: dict[tuple[str, bytes], Space] = field(default_factory=dict)
    _records: dict[tuple[str, bytes], SpaceRecord] = field(default_factory=dict)
    _unpersisted: dict[Space, int] = field(default_factory=dict)
    _number: int = 0
    _durable: int = 0

    def restore(self, records: tuple[SpaceRecord, ...]) -> None:
        """Take over what the manifest kept."""
        for record in records:
            self._keep(Space(record, shards=0, persisted=True), record)

    def find(self, tenant: str, namespace: bytes) -> Space | None:
        """The current space, if there is one."""
        return self._spaces.get((tenant, namespace))

    def enter(
        self, record: SpaceRecord, shards: int, used: Callable[[], set[Space]]
    ) -> tuple[Space, Persist | None]:
        """The space of a ready engine, made where it is new; then its record is to be persisted.
        ``used`` tells which spaces engines are ready under.

        Raises CapacityError beyond SPACES_MAX.
        """
        space = self.find(record.tenant, record.namespace)
        if space is not None:
            space.shards = shards
            changed = (space.model, space.alias) != (record.model, record.alias)
            space.model, space.alias = record.model, record.alias
            self._records[record.tenant, record.namespace] = space.record()
            return space, self.persist() if changed else None
        if len(self._spaces) >= SPACES_MAX:
            self._forget_unused(used())
        if len(self._spaces) >= SPACES_MAX:
            raise CapacityError(
                f"namespaces: {SPACES_MAX} are known, which is the limit; "
                "start with an empty nvme.path to forget those that are no longer used"
            )
        space = Space(record, shards, persisted=False)
        self._keep(space, record)
        return space, self.persist()

    def _forget_unused(self, used: set[Space]) -> None:
        """Make room: forget namespaces that no engine uses, that keep no chunk, and that were never
        cleared (what an epoch ended may still lie on disk, so that epoch is kept)."""
        unused = (
            (key, space)
            for key, space in self._spaces.items()
            if not space.epoch and not space.chunks() and space not in used
        )
        for key, space in list(islice(unused, _FORGET_SPACES)):
            space.alive = False
            del self._spaces[key], self._records[key]
            self._unpersisted.pop(space, None)

    def raise_epoch(self, space: Space) -> Space:
        """Replace a space by an empty one of the next epoch; the old one is dead at once."""
        space.alive = False
        self._unpersisted.pop(space, None)
        record = replace(space.record(), epoch=space.epoch + 1)
        after = Space(record, space.shards, persisted=False)
        after.dtype, after.tokens = space.dtype, space.tokens
        self._keep(after, record)
        return after

    def persist(self) -> Persist:
        """The effect that makes all records durable."""
        self._number += 1
        return Persist(self._number, tuple(self._records.values()))

    def persisted(self, number: int) -> None:
        """A Persist is durable; with it are all before it, as each replaces the whole. A space that
        came after the Persist was made, as in the steps of a clear, waits for its own."""
        self._durable = max(self._durable, number)
        for space, held_by in list(self._unpersisted.items()):
            if held_by > self._durable:
                break
            space.persisted = True
            del self._unpersisted[space]

    def all(self) -> list[Space]:
        """All current spaces."""
        return list(self._spaces.values())

    def some(self, first: int, most: int) -> list[Space]:
        """Up to ``most`` current spaces from the ``first`` on, in the order in which they came."""
        return list(islice(self._spaces.values(), first, first + most))

    def __len__(self) -> int:
        return len(self._spaces)

    def _keep(self, space: Space, record: SpaceRecord) -> None:
        key = record.tenant, record.namespace
        self._spaces[key] = space
        self._records[key] = record
        if not space.persisted:
            self._unpersisted[space] = self._number + 1
