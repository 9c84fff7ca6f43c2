"""Drafters: cheap models that propose what may come next, all behind one protocol."""
