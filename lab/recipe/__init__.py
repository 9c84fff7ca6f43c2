"""The recipe of the bundled models: the text they learnt from, the training loop, and how well they do.

python -m lab.recipe.train --help
python -m lab.recipe.measure --help
"""
