"""FlowSpec's version, on which nothing stands that it would pull in."""

__version__ = "0.1.0"
