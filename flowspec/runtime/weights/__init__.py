"""Weights for daemons that do not have the model: the head serves a slice's tensors, the daemon stores them
by their content.

`offer` and `digests` are the head's side, `server` its thread; `store` is the daemon's folder, `stored` a
model read from it, `receive` what brings a model's tensors into it. `docs/design/weights.md` tells the whole.
"""
