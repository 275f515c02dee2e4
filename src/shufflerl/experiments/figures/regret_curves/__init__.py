"""Cumulative regret against episodes on RiverSwim at two budgets: the paper's Figures (b) and (c) of RiverSwim."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.regret_curves.analysis import analyse
from shufflerl.experiments.figures.regret_curves.sweep import cells, families

FIGURE = Figure("regret-curves", "Regret as episodes go by on RiverSwim", analyse, families, cells)
