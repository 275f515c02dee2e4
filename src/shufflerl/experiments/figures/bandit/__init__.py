"""Cumulative regret on the heterogeneous bandit: the paper's figure of the multi-armed bandit."""

from shufflerl.experiments.figures.bandit.analysis import analyse
from shufflerl.experiments.figures.bandit.sweep import cells, families
from shufflerl.experiments.figures.base import Figure

FIGURE = Figure("bandit", "The heterogeneous bandit", analyse, families, cells)
