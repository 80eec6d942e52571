"""Benchmarks: one question a file, the harness and what several questions share.

``python -m bench`` runs all questions but those with a command of their own (README.md).
"""
