"""RedisNames: what the tier's values are called.

======================================================  =========================================
``PREFIX:TENANT:NAMESPACE:EPOCH:KEY:SHARD:PART``        one chunk part of one shard
the same ``:N``                                         piece N of a value that was split
``PREFIX:epoch:TENANT:NAMESPACE[:COPY]``                a namespace's epoch
``PREFIX:spaces``                                       hash: which namespaces there are
``PREFIX:usage:{TENANT:NAMESPACE:EPOCH}:names, :bytes`` what a namespace occupies, if limited
======================================================  =========================================

Tenants are percent-encoded, so that no colon or brace in one makes another's name; namespaces and
keys are hexadecimal. Chunks have no hash tag: they spread over a Cluster. The two names of a usage
have one, as they change together.
"""

from __future__ import annotations

from urllib.parse import quote

from kvstore.core.messages import ChunkHeader


class RedisNames:
    """The names below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self.spaces = b"%s:spaces" % self._prefix

    def chunk(self, header: ChunkHeader) -> bytes:
        """Where a chunk part lies; its epoch is the header's."""
        start, end = self.around_key(
            (header.tenant, header.namespace), header.epoch, header.shard, header.part
        )
        return b"%s%s%s" % (start, header.key.hex().encode(), end)

    def around_key(
        self, space: tuple[str, bytes], epoch: int, shard: int, part: int
    ) -> tuple[bytes, bytes]:
        """What stands before and behind the key's 64 hexadecimal digits."""
        return (
            b"%s:%s:%d:" % (self._prefix, _space(space), epoch),
            b":%d:%d" % (shard, part),
        )

    def space(self, space: tuple[str, bytes]) -> bytes:
        """What the names of all chunks of a namespace begin with, whatever their epoch."""
        return b"%s:%s:" % (self._prefix, _space(space))

    @staticmethod
    def piece(name: bytes, number: int) -> bytes:
        """Piece ``number`` of a split value."""
        return b"%s:%d" % (name, number)

    def epoch(self, space: tuple[str, bytes]) -> bytes:
        """A namespace's epoch."""
        return b"%s:epoch:%s" % (self._prefix, _space(space))

    def usage(self, space: tuple[str, bytes], epoch: int) -> tuple[bytes, bytes]:
        """The names that occupy space, by age, and the sum of their bytes."""
        start = b"%s:usage:{%s:%d}:" % (self._prefix, _space(space), epoch)
        return start + b"names", start + b"bytes"


def _space(space: tuple[str, bytes]) -> bytes:
    tenant, namespace = space
    quoted = quote(tenant.encode("utf-8", "surrogatepass"), safe="")
    return b"%s:%s" % (quoted.encode(), namespace.hex().encode())
