"""The part with tensors: slices of transformers models, tree cache and attention, sampling, tokenizers,
loading."""
