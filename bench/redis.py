"""Redis: how fast values come and go, and what a server costs those who don't wait for it.

Values of 1, 4 and 32 MiB at a Valkey server on loopback, four connections: our tier by a raw loop
over sockets, and by redis-py (``redis_sides.py``); beside them what two processes move without any
server (``redis_loopback.py``), which bounds them all. A probe of 512 chunks at a Cluster of three
nodes. What daemons do with a server, healthy or sick: ``redis_daemons.py``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench import redis_daemons
from bench.harness import (
    MICRO,
    Bench,
    Question,
    Size,
    at_least,
    at_most,
    interleave,
    p50,
    rates,
    timed,
)
from bench.redis_loopback import LoopbackValues
from bench.redis_sides import ClientValues, RawValues, Rounds, Slots, TierValues, Values
from kvstore.core.remote_messages import Probe, Probed
from kvstore.testing.samples import pattern, sample_header
from kvstore.tiers.redis_lane import Lane
from tests.redis_cluster import Cluster
from tests.redis_rig import standalone

_THREADS = 4
_KEYS = 512


@dataclass(frozen=True, slots=True)
class _Sizes:
    values_mib: tuple[int, ...]
    side_mib: int
    rounds: int
    probes: int


_SIZES = {Size.FULL: _Sizes((1, 4, 32), 128, 3, 200), Size.SMALL: _Sizes((1,), 8, 2, 5)}


def measure(bench: Bench) -> None:
    """Rows of values, of probes, and of daemons."""
    with _short_folder() as folder:
        server = standalone(folder / "v")
        # The package's build uses libc's memory: without this each large value is mapped anew.
        server.environment = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
        with server:
            for mib in _SIZES[bench.size].values_mib:
                _values(bench, server.port, mib)
        _probes(bench, folder / "c")
        redis_daemons.measure(bench, folder)


@contextmanager
def _short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _values(bench: Bench, port: int, mib: int) -> None:
    sizes = _SIZES[bench.size]
    slots = Slots(_THREADS, mib << 20)
    slots.fill()
    with ExitStack() as stack:
        rounds = stack.enter_context(
            closing(Rounds(_THREADS, max(1, sizes.side_mib // mib // _THREADS)))
        )
        sides: dict[str, Values] = {
            "ours": stack.enter_context(closing(TierValues(f"redis://127.0.0.1:{port}", slots))),
            "raw": stack.enter_context(closing(RawValues(port, slots))),
            "no server": stack.enter_context(closing(LoopbackValues(slots))),
            "redis-py": stack.enter_context(closing(ClientValues(port, slots))),
        }
        puts = {name: rounds.side(side.put) for name, side in sides.items()}
        interleave(puts, 1)
        stored = [interleave(puts, sizes.rounds) for _ in range(bench.runs)]
        gets = {name: rounds.side(side.get) for name, side in sides.items()}
        for get in gets.values():
            slots.forget()
            get(0)
            slots.check()
        read = [interleave(gets, sizes.rounds) for _ in range(bench.runs)]
        slots.check()
    what = f"{mib} MiB, {_THREADS} connections"
    nbytes = max(1, sizes.side_mib // mib // _THREADS) * _THREADS * mib << 20
    bench.row(
        f"SET {what}, by a raw loop", "x", rates(stored, "ours", "raw"), at_least(0.75),
        _speeds(stored, nbytes),
    )  # fmt: skip
    bench.row(f"SET {what}, by redis-py", "x", rates(stored, "ours", "redis-py"), at_least(4))
    bench.row(
        f"SET {what}: no server at all, by redis-py", "x", rates(stored, "no server", "redis-py")
    )
    bench.row(
        f"GET {what}, by a raw loop", "x", rates(read, "ours", "raw"), at_least(0.75),
        _speeds(read, nbytes),
    )  # fmt: skip
    bench.row(f"GET {what}, by redis-py", "x", rates(read, "ours", "redis-py"), at_least(1.8))
    bench.row(
        f"GET {what}: no server at all, by redis-py", "x", rates(read, "no server", "redis-py")
    )


def _speeds(runs: list[dict[str, list[float]]], nbytes: int) -> str:
    return "; ".join(
        f"{side} {', '.join(f'{nbytes / p50(run[side]) / 1e9:.2f}' for run in runs)} GB/s"
        for side in runs[0]
    )


def _probes(bench: Bench, folder: Path) -> None:
    """Half of the chunks are there."""
    slots = Slots(1, 4096)
    with Cluster(folder) as cluster, closing(TierValues(cluster.url, slots)) as values:
        headers = [sample_header(n, 4096) for n in range(_KEYS)]
        keys = b"".join(header.key for header in headers)
        first = headers[0]
        probe = Probe(2, first.tenant, first.namespace, keys, (0,), (first.part,))
        for header in headers[::2]:
            values.tier.write(values.place, header, pattern(1, 4096))
        expected = bytes([1, 0] * (_KEYS // 2))
        _check(values.tier.probe(probe), expected)
        with _counted() as sent:
            _check(values.tier.probe(probe), expected)
        trips = max(sent.values())
        assert len(sent) == len(cluster.nodes)
        runs = [
            [timed(lambda: values.tier.probe(probe)) for _ in range(_SIZES[bench.size].probes)]
            for _ in range(bench.runs)
        ]
    bench.row(
        f"probe of {_KEYS} chunks, {len(sent)} nodes: round trips to one", "",
        [float(trips)] * bench.runs, at_most(1),
        f"p50 {', '.join(f'{p50(run) * MICRO:,.0f}' for run in runs)} us",
    )  # fmt: skip


def _check(probed: Probed, expected: bytes) -> None:
    assert not probed.error, probed.error
    assert probed.found == (expected,), "the probe's answer is wrong"


@contextmanager
def _counted() -> Iterator[dict[Lane, int]]:
    """How often each lane sends."""
    sent: dict[Lane, int] = {}
    send = Lane.send

    def count(lane: Lane, data: bytes) -> None:
        sent[lane] = sent.get(lane, 0) + 1
        send(lane, data)

    with patch.object(Lane, "send", count):
        yield sent


QUESTION = Question("redis", "how fast is a shared server, and what does a sick one cost?", measure)
