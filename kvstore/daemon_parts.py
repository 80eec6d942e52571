"""What the composition root builds from its Config, how it says so, and what it asks of the
system."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from typing import TYPE_CHECKING

from kvstore.core.limits import Limits, Partial, RemoteLimits, TierLimits
from kvstore.core.quotas import Quotas
from kvstore.mover import MoverThreads
from kvstore.sizing import Config, NvmeConfig
from kvstore.sizing_redis import RedisConfig
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.slabs import DirectIO
from kvstore.units import format_size

if TYPE_CHECKING:
    from kvstore.daemon import Daemon

PR_SET_THP_DISABLE = 41

_DIRECT = {"auto": DirectIO.AUTO, "on": DirectIO.REQUIRED, "off": DirectIO.OFF}

_log = logging.getLogger(__name__)


def describe(daemon: Daemon) -> list[str]:
    """The lines that tell a person what runs, and how to connect."""
    config, host = daemon.config, daemon.config.host
    lines = [
        f"kvstore {daemon.version}, process {os.getpid()}",
        f"host     {format_size(host.size)}: {host.slabs()} slabs of {format_size(host.slab_size)} "
        f"and {host.staging_slots} for staging, huge pages {host.huge_pages}",
    ]
    if daemon.nvme is None:
        lines.append("nvme     off")
    else:
        nvme = config.nvme
        lines.append(
            f"nvme     {format_size(nvme.size)}: {nvme.slabs()} slabs of "
            f"{format_size(nvme.slab_size)}, {daemon.nvme.stats().mode} I/O, {nvme.path}"
        )
    return [
        *lines,
        f"redis    {daemon.redis.line()}",
        f"engines  unix:{config.socket}",
        f"admin    {config.admin.address}",
        f'connect  from kvstore import Client; client = Client("unix:{config.socket}")',
    ]


def nvme_tier(config: NvmeConfig) -> NvmeTier | None:
    """The NVMe tier, not open yet; None where there is none."""
    if not config.size:
        return None
    return NvmeTier(
        config.path,
        config.slabs(),
        config.slab_size,
        _DIRECT[config.direct_io],
        ahead_bytes=config.prewrite,
    )


_ANSWER_FIRST_S = 0.001
"""Where writes began at once, their threads had the cores that the answer wanted."""
_WRITES_AHEAD = 2
"""Writes that the hands have beyond those that their threads carry out."""


def limits_of(config: Config) -> Limits:
    """The core's limits. Reads are as many as their threads, and writes a few more, so that no
    thread waits for the loop; the rest waits in the core, where priorities hold. Copies are four
    deep for each thread, as several are reported together."""
    nvme, threads = config.nvme, config.threads
    return Limits(
        host=TierLimits(config.host.slabs(), config.host.slab_size),
        nvme=TierLimits(nvme.slabs(), nvme.slab_size) if nvme.size else None,
        staging_slots=config.host.staging_slots,
        lease_s=config.lease_s,
        session_bytes_max=config.session.bytes_max,
        partial=Partial(config.session.partial),
        copy_depth=4 * threads.copy,
        read_depth=threads.read,
        write_depth=threads.write + _WRITES_AHEAD,
        answer_first_s=_ANSWER_FIRST_S,
        remote=_remote_limits(config.redis),
        write_budget_bytes_s=nvme.write_budget,
        admit_after=nvme.admit_after,
        quotas=_quotas(config.tenants.quota),
    )


def _remote_limits(redis: RedisConfig) -> RemoteLimits | None:
    """Reads and writes are as many as the mover's threads for them, so that the rest waits in the
    core, as for NVMe."""
    if not redis.url:
        return None
    threads = MoverThreads()
    return RemoteLimits(
        probe_s=redis.probe_timeout,
        read_depth=threads.redis_read,
        write_depth=threads.redis_write,
        backlog_max=redis.backlog,
    )


def disable_huge_pages() -> None:
    """No transparent huge pages in this process, whatever asks for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        _log.warning("host.huge_pages=off has no effect: %s", os.strerror(ctypes.get_errno()))


def raise_open_files() -> None:
    """Each session takes two or three descriptors: allow as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.info("open files stay limited to %d: %s", soft, error)


def _quotas(given: tuple[tuple[str, float], ...]) -> Quotas:
    shares = dict(given)
    return Quotas(shares.pop("*", None), tuple(shares.items()))
