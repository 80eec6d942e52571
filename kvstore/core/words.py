"""Word: the base of the core's enumerations."""

from __future__ import annotations

from enum import Enum


class Word(Enum):
    """An enumeration whose members hash by identity. Enum's own hashes the name, in Python code, at
    each look-up in a dictionary: a tenth of an event's time."""

    __hash__ = object.__hash__
