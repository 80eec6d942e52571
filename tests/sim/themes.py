"""Themes: what a world is about. Most mix everything; some press one thing hard.

* mixed: one to three models of any layout, one or two engines each.
* turns: two models whose chunks differ in size take turns in a small arena.
* hybrid: layouts with windows only, with room for all windows or for hardly any.
* ranks: engines of several ranks, some of which lag, fail, or don't take part.
* tenants: two tenants serve the same models, and each may have a share of each tier only.
* long: prompts and bursts larger than the host tier; the daemon restarts with a host tier smaller
  than what NVMe holds of one prompt, and several engines retrieve it at a time.
* disk: the same, on a disk that is damaged all the time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvstore.core.limits import Limits, TierLimits
from kvstore.core.quotas import Quotas
from tests.sim.faults import Faults
from tests.sim.shapes import (
    HOST_SLAB_BYTES,
    LAYOUTS,
    NVME_SLAB_BYTES,
    RANKS,
    TENANTS,
    EngineShape,
    draw_engines,
    draw_limits,
    namespace,
)

HYBRIDS = ("hybrid", "hybrid-narrow", "hybrid-wide", "windows")
PAIRS = (("small", "large"), ("hybrid-narrow", "large"), ("small", "groups"))
SEVERAL = ("two", "replicas", "four", "four-replicas")
DAMAGE = {
    "move_fails": 0.08,
    "disk_full": 0.03,
    "erase_fails": 0.4,
    "spell_rate": 0.05,
    "flip_rate": 0.04,
    "misplace_rate": 0.03,
    "crash_rate": 0.008,
}


QUOTA_SLABS_MIN = 5
"""Of the host tier, so that each tenant's share has room for two chunks of any layout."""


@dataclass(frozen=True, slots=True)
class Theme:
    """One kind of world. ``turns``: actions until the next model's turn, 0 for no turns.
    ``shrinks``: the daemon restarts with a tiny host tier. ``weight``: how often it is drawn."""

    name: str
    weight: int
    tokens_max: int = 26
    turns: int = 0
    shrinks: bool = False


MIXED = Theme("mixed", 8)
TURNS = Theme("turns", 2, turns=40)
HYBRID = Theme("hybrid", 2)
SEVERAL_RANKS = Theme("ranks", 2)
TENANCY = Theme("tenants", 2)
LONG = Theme("long", 2, tokens_max=96, shrinks=True)
DISK = Theme("disk", 2, tokens_max=96, shrinks=True)
THEMES = (MIXED, TURNS, HYBRID, SEVERAL_RANKS, TENANCY, LONG, DISK)


def draw_theme(rng: random.Random) -> Theme:
    """A theme, by weight."""
    return rng.choices(THEMES, [theme.weight for theme in THEMES])[0]


def engines(theme: Theme, rng: random.Random) -> list[EngineShape]:
    """The engines of a world of this theme."""
    match theme.name:
        case "turns":
            names = rng.choice(
                (("small", "large"), ("hybrid-narrow", "large"), ("small", "groups"))
            )
            return [_engine(number, name, rng.choice(TENANTS)) for number, name in enumerate(names)]
        case "hybrid":
            names = rng.sample(HYBRIDS, rng.choice((1, 2)))
            return [_engine(number, name, "blue") for number, name in enumerate(names)]
        case "ranks":
            name, ranks = rng.choice(list(LAYOUTS)), rng.choice(SEVERAL)
            return [_engine(n, name, "blue", ranks) for n in range(rng.choice((1, 2)))]
        case "tenants":
            name = rng.choice(list(LAYOUTS))
            return [_engine(number, name, tenant) for number, tenant in enumerate(TENANTS)]
        case "long" | "disk":
            name = rng.choice(("small", "large", "hybrid", "groups"))
            return [_engine(number, name, "blue") for number in range(2)]
    return draw_engines(rng)


def limits(theme: Theme, rng: random.Random, roomy: bool) -> Limits:
    """The limits of such a world; a roomy one never has to evict."""
    drawn = draw_limits(rng, roomy)
    if roomy:
        return drawn
    match theme.name:
        case "turns":
            slabs = rng.choice((2, 3, 4))
            nvme = drawn.nvme and TierLimits(rng.choice((2, 3)), NVME_SLAB_BYTES)
            return replace(drawn, host=TierLimits(slabs, HOST_SLAB_BYTES), nvme=nvme)
        case "tenants":
            shares = [(tenant, rng.choice((0.4, 0.6, 0.8))) for tenant in TENANTS]
            default = rng.choice((None, None, 0.5))
            quotas = Quotas(default, tuple(rng.sample(shares, rng.randint(0, 2))))
            host = TierLimits(rng.randint(QUOTA_SLABS_MIN, 8), HOST_SLAB_BYTES)
            return replace(drawn, host=host, quotas=quotas)
        case "long" | "disk":
            host = TierLimits(rng.choice((3, 40)), HOST_SLAB_BYTES)
            return replace(
                drawn,
                host=host,
                nvme=TierLimits(60, NVME_SLAB_BYTES),
                write_backlog_max=65_536,
                session_bytes_max=1 << 30,
            )
    return drawn


def faults(theme: Theme, drawn: Faults) -> Faults:
    """The faults of such a world: often a sick rank, or a damaged disk, where that is the theme."""
    if theme is SEVERAL_RANKS:
        return replace(drawn, sick_rank=0.4)
    if theme is DISK:
        return replace(drawn, **DAMAGE)
    return drawn


def _engine(number: int, layout: str, tenant: str, ranks: str = "one") -> EngineShape:
    return EngineShape(f"e{number}", tenant, namespace(layout), LAYOUTS[layout], RANKS[ranks])
