"""FlowSpec: one language model, sliced over small devices, exact and fast for one user."""

__version__ = "0.1.0"
