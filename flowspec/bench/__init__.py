"""Measuring and checking whole clusters: exactness, the cost of a hop, the memory of a daemon."""
