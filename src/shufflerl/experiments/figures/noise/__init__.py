"""Noise per counter: the paper's constants, exact accounting and the central Gaussian."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.noise.analysis import analyse

FIGURE = Figure("noise", "Noise per counter", analyse)
