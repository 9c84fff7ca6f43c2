"""A device: what it says of itself, and how others ask it."""
