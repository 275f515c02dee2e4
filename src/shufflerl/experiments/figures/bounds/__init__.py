"""The paper's table of regret bounds, with what was measured beside each."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.bounds.analysis import analyse
from shufflerl.experiments.figures.bounds.sweep import cells, families

FIGURE = Figure("bounds", "The table of bounds, and the regret measured", analyse, families, cells)
