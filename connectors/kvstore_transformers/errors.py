"""What the reference engine refuses, each in one line: below KVStoreError, as everything that
kvstore raises on purpose."""

from __future__ import annotations

from kvstore.core.errors import KVStoreError


class ModelError(KVStoreError):
    """A model that can't be loaded or fetched; the text says why."""


class UnsupportedModelError(ModelError):
    """A model whose configuration this engine doesn't compute; names the value and what is
    valid."""


class RequestError(KVStoreError):
    """A request that no engine of this size could serve: empty, too long, or with unknown
    tokens."""


class OwnershipError(KVStoreError):
    """A block freed by someone who doesn't own it, or twice: a bug in the engine."""
