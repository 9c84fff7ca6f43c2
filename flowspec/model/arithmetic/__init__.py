"""The canonical arithmetic: the bits of a row follow from what the row sees, and from nothing else."""
