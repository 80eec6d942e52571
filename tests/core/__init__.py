"""Unit tests of the pure core: tiny capacities, one behaviour each, invariants after each event."""
