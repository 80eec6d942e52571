"""Exit statuses of the command line."""

OK = 0
FAILURE = 1
USAGE = 2
"""Wrong usage or configuration."""
NO_DAEMON = 3
INTERRUPTED = 130
