"""Measurements of this machine and of simulated ones. `python -m tests.perf.NAME`."""
