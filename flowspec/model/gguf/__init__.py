"""GGUF files: their names, numbers, config, and tensors under the names of transformers."""
