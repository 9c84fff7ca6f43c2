"""Experiments of the laboratory, and studies of one: `python -m lab.bench`, `python -m lab.bench.oracle`."""
