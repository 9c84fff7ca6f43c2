"""What a model writes beside its answer's text, in its family's format: thoughts, and calls of tools."""
