"""Weights for daemons: where a slice's tensors come from, and the store that has them by their content."""
