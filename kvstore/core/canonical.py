"""Encoder: a canonical, typed byte string. Equal fields give equal bytes, different fields never
do.

Each field is tag length (u32) and tag, type (one byte), value length (u64) and value, all
little-endian; so no field can run into the next, and a missing field differs from an empty one.
"""

from __future__ import annotations

import struct

_HEAD = struct.Struct("<I")
_BODY = struct.Struct("<cQ")


class Encoder:
    """Collects tagged fields; ``encoded()`` gives what to hash."""

    def __init__(self, domain: str) -> None:
        self._parts: list[bytes] = []
        self.text("domain", domain)

    def text(self, tag: str, value: str) -> None:
        """Add a string as UTF-8; lone surrogates, which UTF-8 has no code for, are kept apart from
        all else."""
        self._field(tag, b"t", value.encode("utf-8", "surrogatepass"))

    def number(self, tag: str, value: int) -> None:
        """Add an integer of at most 64 bits, signed."""
        self._field(tag, b"n", value.to_bytes(8, "little", signed=True))

    def raw(self, tag: str, value: bytes) -> None:
        """Add bytes as they are."""
        self._field(tag, b"b", value)

    def encoded(self) -> bytes:
        """All fields so far, in the order they were added."""
        return b"".join(self._parts)

    def _field(self, tag: str, kind: bytes, value: bytes) -> None:
        name = tag.encode("ascii")
        self._parts += (_HEAD.pack(len(name)), name, _BODY.pack(kind, len(value)), value)
