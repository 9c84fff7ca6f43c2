"""Measurements of this machine, and comparisons with other software. `python -m tests.perf.NAME`."""
