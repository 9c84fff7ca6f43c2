"""Measurements of this machine and of simulated ones. `python -m lab.perf.NAME`."""
