"""What a model writes beside its answer's text: thoughts, and calls of tools, each in the format of its
family."""
