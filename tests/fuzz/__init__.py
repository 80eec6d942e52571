"""Fuzzing: mutated frames, headers, files and settings. ``FUZZ_EXAMPLES`` says how many frames and
how many headers; the rest goes by it."""
