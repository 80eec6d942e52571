"""What a simulation raises when the core breaks a promise."""

from __future__ import annotations


class SimulationError(AssertionError):
    """A promise of the core was broken; the text says which, and how to replay it."""
