"""The simulator: the production core with fake hands, a virtual clock and injected faults, from a
seed."""
