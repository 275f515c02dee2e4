"""Experiments: the paper's figures and ours, each a module with its sweep as constants and its analysis a function.

`python -m shufflerl.experiments.theorem` runs one, prints its table and draws its figure.
"""
