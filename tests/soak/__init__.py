"""Everything for long: ``make soak``."""
