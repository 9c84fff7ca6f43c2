"""The recipe of the bundled models: the text they learnt from, the training loop, and how well they do.

python -m tests.recipe.train --help
python -m tests.recipe.measure --help
"""
