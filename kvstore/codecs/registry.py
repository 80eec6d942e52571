"""Which codecs there are: ours by name and ID, others' by entry points of ``kvstore.codecs``.

An entry point names something that is called with the bytes of an element (1, 2 or 4) and gives a
Codec, whose ID is 32768 or more. Packages that a codec needs are imported when it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points

from kvstore.codecs.base import OTHERS_ID_MIN, Codec
from kvstore.codecs.identity import IdentityCodec
from kvstore.core.errors import ConfigError

Make = Callable[[int], Codec]

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element where it has more than one."""


def names() -> tuple[str, ...]:
    """What ``codec`` knows here."""
    return (*_OURS, *_others())


@functools.cache
def codec(name: str, dtype: str) -> Codec:
    """The codec of this name for chunks of a dtype (layout.DTYPES).

    Raises ConfigError, naming what to do, where there is none or it can't be had.
    """
    others = _others()
    if name not in _OURS and name not in others:
        valid = ", ".join(names())
        raise ConfigError(f"codec={name}: no such codec is installed; valid are {valid}")
    try:
        make: Make = _OURS[name] if name in _OURS else others[name].load()
        found = make(_ITEM_BYTES.get(dtype, 1))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"codec={name}: {error}; ours need: pip install 'kvstore[redis]'"
        ) from error
    if name not in _OURS and found.id < OTHERS_ID_MIN:
        raise ConfigError(f"codec={name}: ID {found.id} is ours; valid are {OTHERS_ID_MIN} or more")
    return found


@functools.lru_cache(maxsize=64)
def codec_of(codec_id: int, version: int) -> Codec | None:
    """The codec that decodes what a header names, whatever the dtype; None where none that is
    installed here does. Another node may have more: its chunks are a miss here, and nothing is
    wrong with them."""
    for name in names():
        try:
            found = codec(name, "uint8")
        except ConfigError:
            continue
        if (found.id, found.version) == (codec_id, version):
            return found
    return None


@functools.cache
def _others() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="kvstore.codecs")}


def _identity(item_bytes: int) -> Codec:
    return IdentityCodec()


def _lz4(item_bytes: int) -> Codec:
    from kvstore.codecs.lz4 import Lz4Codec

    return Lz4Codec(item_bytes)


def _zstd(item_bytes: int) -> Codec:
    from kvstore.codecs.zstd import ZstdCodec

    return ZstdCodec(item_bytes)


_OURS: Mapping[str, Make] = {"identity": _identity, "lz4": _lz4, "zstd": _zstd}
