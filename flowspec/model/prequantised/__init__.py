"""Checkpoints of the hub whose matrices were quantised by other tools: GPTQ, AWQ, compressed-tensors, FP8."""
