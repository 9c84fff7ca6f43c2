"""The recipe of the bundled models: the text they learnt from, the training loop, and how well they do.

python -m flowspec.demo.recipe.train --help
python -m flowspec.demo.recipe.measure --help
"""
