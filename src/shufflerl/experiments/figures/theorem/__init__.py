"""Regret against K over thirteen decades: the theorem where it bites, and the practical constants before."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.theorem.analysis import analyse
from shufflerl.experiments.figures.theorem.sweep import cells

FIGURE = Figure("theorem", "Regret against K: where the theorem bites", analyse, cells=cells)
