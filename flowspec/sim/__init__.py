"""The virtual world: the real cores and codec under a virtual clock, deterministic from a seed."""
