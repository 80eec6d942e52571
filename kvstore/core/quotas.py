"""Quotas: how much of each local tier one tenant may hold.

A quota is a share of a tier's bytes, a limit and no reservation: a tenant below its own may still
lose chunks to others. Whoever would pass it evicts leaves of its own first, and is refused where
none may leave. What a scan finds again counts, even beyond the quota: it may have become smaller,
and what was evicted lies on disk until it is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quotas:
    """Shares in (0, 1] by tenant, and the ``default`` of all others; None is no quota."""

    default: float | None = None
    shares: tuple[tuple[str, float], ...] = ()

    def of(self, tenant: str) -> float | None:
        """A tenant's share of each local tier."""
        return dict(self.shares).get(tenant, self.default)


NO_QUOTAS = Quotas()


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant holds of one tier: bytes of slots that aren't FREE, and at most how many it may
    hold (None: all)."""

    tenant: str
    quota_bytes: int | None
    used_bytes: int = 0

    def lacks(self, nbytes: int) -> bool:
        """Whether so many more would pass the quota."""
        return self.quota_bytes is not None and self.used_bytes + nbytes > self.quota_bytes


@dataclass(slots=True)
class Accounts:
    """The accounts of one tier of ``tier_bytes``, made when a tenant first comes."""

    quotas: Quotas
    tier_bytes: int
    _accounts: dict[str, Account] = field(default_factory=dict)

    def of(self, tenant: str) -> Account:
        """A tenant's account."""
        account = self._accounts.get(tenant)
        if account is None:
            share = self.quotas.of(tenant)
            quota = None if share is None else int(share * self.tier_bytes)
            account = self._accounts[tenant] = Account(tenant, quota)
        return account

    def all(self) -> list[Account]:
        """All accounts, by tenant."""
        return [self._accounts[tenant] for tenant in sorted(self._accounts)]
