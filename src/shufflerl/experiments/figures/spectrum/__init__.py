"""Dynamic spectrum access, the use that the paper is motivated by: the learned policy and its certificate."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.spectrum.analysis import analyse
from shufflerl.experiments.figures.spectrum.sweep import cells, families

FIGURE = Figure("spectrum", "Dynamic spectrum access", analyse, families, cells)
