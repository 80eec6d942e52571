"""Kinds of setting values: how each is parsed from text, printed back, and what is valid."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.units import format_exact_size, parse_duration, parse_share, parse_size

MASK = "********"
"""Stands for what is secret."""

_HOST = r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.%]+\])(:\d+)?"
_SERVERS = re.compile(rf"({_HOST}(,{_HOST})*)?(/[A-Za-z0-9._/%+~-]*)?")
"""What follows the password in a URL of Redis: servers, then a database, a service or a path."""
_SCHEME = re.compile(r"[a-z]{2,8}(\+[a-z]{2,8})?", re.IGNORECASE)
_OPTIONS = re.compile(r"([a-z_]{1,16}=[^&@]*(&|$))*")


@dataclass(frozen=True, slots=True)
class Amount:
    """A size as given: ``nbytes``, or a ``share`` of what the machine has, or neither (auto)."""

    nbytes: int | None = None
    share: float | None = None

    def automatic(self) -> bool:
        """Whether the size is left to the daemon."""
        return self.nbytes is None and self.share is None

    def resolve(self, whole_bytes: int, automatic_bytes: int) -> int:
        """Bytes, given the whole that a share is of and the choice of auto."""
        if self.nbytes is not None:
            return self.nbytes
        if self.share is not None:
            return int(self.share * whole_bytes)
        return automatic_bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: ``parse`` raises ValueError; ``valid`` says in words what it accepts;
    ``mask`` hides what is secret in a text, whether it parses or not."""

    valid: str
    parse: Callable[[str], object]
    show: Callable[[object], str] = str
    mask: Callable[[str], str] = str


def amount(text: str) -> Amount:
    """``auto``, ``off`` or ``0``, a size, or a percentage."""
    word = text.strip().lower()
    if word == "auto":
        return Amount()
    if word == "off":
        return Amount(nbytes=0)
    if word.endswith("%"):
        return Amount(share=parse_share(word))
    return Amount(nbytes=parse_size(word))


def show_amount(value: object) -> str:
    """The text that parses back to an Amount or to bytes."""
    if isinstance(value, Amount):
        if value.share is not None:
            return f"{value.share * 100:g}%"
        return "auto" if value.nbytes is None else format_exact_size(value.nbytes)
    return format_exact_size(int(str(value)))


def integer(least: int, most: int) -> Kind:
    """A whole number in [least, most]."""

    def parse(text: str) -> object:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(f"{value} is out of range")
        return value

    return Kind(f"a whole number from {least} to {most}", parse)


def duration(least_s: float, most_s: float) -> Kind:
    """A duration of [least_s, most_s] seconds."""

    def parse(text: str) -> object:
        value = parse_duration(text)
        if not least_s <= value <= most_s:
            raise ValueError(f"{text} is out of range")
        return value

    valid = f"a duration from {least_s:g}s to {most_s:g}s, in ms, s, min or h"
    return Kind(valid, parse, lambda value: f"{value}s")


def choice(*words: str) -> Kind:
    """One of a few words."""

    def parse(text: str) -> object:
        word = {"true": "on", "false": "off"}.get(text.strip().lower(), text.strip().lower())
        if word not in words:
            raise ValueError(f"{text!r} is none of them")
        return word

    return Kind(" or ".join(words), parse)


def _path(text: str) -> object:
    if not text.strip() or "\0" in text:
        raise ValueError("a path can't be empty")
    return None if text == "auto" else expanded(text)


def expanded(text: str) -> Path:
    """The absolute path that a text names, with or without ``unix:`` before it; ValueError for a
    URL of something else, nothing at all, or the home of a user that there isn't."""
    path = text.removeprefix("unix://").removeprefix("unix:")
    if not path.strip() or "://" in path:
        raise ValueError(f"{text!r} is not a path")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{text!r} is in no home") from error


def _address(text: str) -> object:
    if not text.strip():
        raise ValueError("an address can't be empty")
    return None if text == "auto" else text.strip()


def _bytes(text: str) -> object:
    return 0 if text.strip().lower() == "off" else parse_size(text.removesuffix("/s"))


def _limit(text: str) -> object:
    return 0 if text.strip().lower() == "off" else parse_size(text)


def _name(text: str) -> object:
    if not text.replace("-", "").replace("_", "").isalnum():
        raise ValueError(text)
    return text


def _bytes_above_0(text: str) -> object:
    nbytes = parse_size(text)
    if not nbytes:
        raise ValueError("0 bytes hold nothing")
    return nbytes


def _url(text: str) -> object:
    """Servers of Redis. What the address means is settled where it is used."""
    words = text.strip()
    if words.lower() in ("", "off"):
        return ""
    if "://" not in words or not words.isprintable() or " " in words:
        raise ValueError("not a URL")
    return words


def mask_url(text: str) -> str:
    """A URL without what may be secret: name and password, and the values of its options. Where
    there is no telling what is what, all of it is hidden but the scheme."""
    words = text.strip()
    scheme, mark, rest = words.partition("://")
    if not (mark and _SCHEME.fullmatch(scheme)):
        return MASK if words.lower() not in ("", "off") else words
    place, question, options = rest.partition("?")
    given, at, servers = place.rpartition("@")
    if not (_SERVERS.fullmatch(servers) and _OPTIONS.fullmatch(options)):
        return f"{scheme}://{MASK}"
    names = "&".join(
        f"{option.partition('=')[0]}={MASK}" for option in options.split("&") if option
    )
    return f"{scheme}://{f'{MASK}@' if at and given else ''}{servers}{question}{names}"


def _text(text: str) -> object:
    if any(ord(character) < 32 for character in text):
        raise ValueError("control characters")
    return text.strip()


def _file(text: str) -> object:
    return None if not text.strip() else _path(text)


def _key_prefix(text: str) -> object:
    if not re.fullmatch(r"[A-Za-z0-9._/-]{1,64}", text):
        raise ValueError(text)
    return text


def _quotas(text: str) -> object:
    """(tenant, share) pairs of ``50%``, for every tenant, or of shares by tenant; the tenant ``*``
    is every other one."""
    words = text.strip()
    shares: dict[str, float] = {}
    for entry in words.split(",") if words.lower() != "off" else ():
        tenant, mark, share = entry.rpartition("=")
        tenant = tenant.strip() if mark else "*"
        if not tenant or tenant in shares:
            raise ValueError(f"{entry!r} names no tenant, or one that was named before")
        shares[tenant] = parse_share(share.strip())
    return tuple(shares.items())


def _show_quotas(value: object) -> str:
    assert isinstance(value, tuple), value
    return ",".join(f"{tenant}={share * 100:g}%" for tenant, share in value) or "off"


def bounded_size(least: int, most: int) -> Kind:
    """A size of [least, most] bytes."""

    def parse(text: str) -> object:
        nbytes = parse_size(text)
        if not least <= nbytes <= most:
            raise ValueError(f"{text} is out of range")
        return nbytes

    valid = f"a size from {format_exact_size(least)} to {format_exact_size(most)}"
    return Kind(valid, parse, show_amount)


def duration_or_off(most_s: float) -> Kind:
    """A duration of up to ``most_s`` seconds; off is 0."""

    def parse(text: str) -> object:
        value = 0.0 if text.strip().lower() == "off" else parse_duration(text)
        if not 0 <= value <= most_s:
            raise ValueError(f"{text} is out of range")
        return value

    return Kind(f"off, or a duration up to {most_s:g}s, such as 7d", parse, _show_duration_or_off)


def _show_duration_or_off(value: object) -> str:
    return f"{value}s" if value else "off"


def _show_optional(value: object) -> str:
    return "auto" if value is None else str(value)


AMOUNT = Kind(
    "auto, off, a size such as 64MiB or 1.5TiB, or a share such as 20%", amount, show_amount
)
SHARE = Kind("auto, a size such as 64MiB, or a share such as 20%", amount, show_amount)
SLAB = Kind("auto or a size such as 64MiB", amount, show_amount)
BYTES = Kind("a size such as 64MiB", _bytes_above_0, show_amount)
RATE = Kind("bytes a second such as 200MiB/s, or 0 for no limit", _bytes, show_amount)
LIMIT = Kind("a size such as 10GiB, or 0 for no limit", _limit, show_amount)
NAME = Kind("a name of letters, digits, - and _", _name)
PATH = Kind("auto or a path", _path, _show_optional)
QUOTAS = Kind(
    "off, a percentage for every tenant, or percentages by tenant such as uid:1001=20%,*=50%",
    _quotas,
    _show_quotas,
)
TEXT = Kind("text without control characters", _text)
FILE = Kind("a file's path, or nothing", _file, lambda value: "" if value is None else str(value))
REDIS_URL = Kind(
    "off, or redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// and servers, "
    "such as redis://user:password@host:6379/0",
    _url,
    lambda value: mask_url(str(value)) or "off",
    mask_url,
)
KEY_PREFIX = Kind("1 to 64 letters, digits, '.', '_', '-' and '/'", _key_prefix)
ADDRESS = Kind(
    "auto, unix:/path, or a loopback host:port such as 127.0.0.1:7411", _address, _show_optional
)
