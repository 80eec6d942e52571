"""Mutations of bytes and of protobuf messages, all from one random number."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2000"))
"""Frames, and headers at rest, in one run; a tenth of it where an example costs much more."""
AT_A_TIME = 20
NUMBERS = (0, 1, 2, 3, 4, 7, 16, 31, 32, 127, 128, 255, 4095, 4096, 65_535, 65_536, 1 << 20)
LARGE = ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TEXTS = ("", "e1", "r", "uid:0", "\x1b[2J", "a\nb", "\u202e", "x" * 1025, "y" * 70_000, "\x00", "ü")

Test = TypeVar("Test", bound=Callable[..., Any])


def fuzz(examples: int) -> Callable[[Test], Test]:
    """Run a test with that many seeds; a failure names its own. Hypothesis draws the first of
    AT_A_TIME, as it takes longer for each than most tests here."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    chosen = settings(max_examples=-(-examples // AT_A_TIME) or 1, deadline=None, phases=phases)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def several(*arguments: Any, seed: int, **fixtures: Any) -> None:
            for one in range(seed, seed + min(AT_A_TIME, max(examples, 1))):
                try:
                    test(*arguments, seed=one, **fixtures)
                except BaseException as error:
                    error.add_note(f"with seed {one}")
                    raise

        decorated: Test = chosen(given(seed=st.integers(0, (1 << 64) - 1))(several))
        return decorated

    return decorate


def is_line(text: str) -> bool:
    """Whether a text is one line for a person, of bounded length."""
    return text.isprintable() and len(text) < 8192


@contextmanager
def only_lines(*expected: type[Exception]) -> Iterator[None]:
    """These errors may be raised within, each of one line, and no others."""
    text = ""
    try:
        yield
    except expected as error:
        text = str(error)
    assert is_line(text), text


def mangle(rng: random.Random, data: bytes) -> bytes:
    """A few changes of bytes: flips, cuts, doublings, insertions, numbers at the edge."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 9))):
        place = rng.randrange(len(raw) + 1)
        kind = rng.randrange(6)
        if kind == 0 and place < len(raw):
            raw[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[place : place + rng.choice((1, 4, 32, 1000))]
        elif kind == 2:
            raw[place:place] = raw[place : place + rng.choice((1, 4, 32, 300))]
        elif kind == 3:
            raw[place:place] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 4:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS + LARGE) % (1 << (8 * size))
            raw[place : place + size] = number.to_bytes(size, "little")
        else:
            del raw[place:]
    return bytes(raw)


def scramble(rng: random.Random, message: Message, changes: int = 0) -> None:
    """Set some fields, at any depth, to values at the edge of their type or beyond sense."""
    for _ in range(changes or rng.choice((1, 1, 2, 5))):
        target = message
        while True:
            field = rng.choice(target.DESCRIPTOR.fields)
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                break
            target = _below(rng, target, field)
        _set(rng, target, field)


def _below(rng: random.Random, message: Message, field: FieldDescriptor) -> Message:
    child: Any = getattr(message, field.name)
    if not field.is_repeated:
        child.SetInParent()
        found: Message = child
        return found
    if not child or rng.random() < 0.3:
        for _ in range(rng.choice((1, 1, 1, 2, 70))):
            child.add()
    chosen: Message = child[rng.randrange(len(child))]
    return chosen


def _set(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values = [_value(rng, field) for _ in range(rng.choice((0, 1, 2, 70)))]
    if field.is_repeated:
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(values)
    elif values:
        setattr(message, field.name, values[0])
    else:
        message.ClearField(field.name)


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 8, 31, 32, 33, 64, 4096, 100_000)))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice((*field.enum_type.values_by_number, 77))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
    bits = 32 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32) else 64
    unsigned = field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
    return rng.choice(NUMBERS + LARGE) % (1 << (bits if unsigned else bits - 1))
