"""Final regret against the privacy budget on RiverSwim: the paper's Figure 4(a)."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.regret_epsilon.analysis import analyse
from shufflerl.experiments.figures.regret_epsilon.sweep import cells, families

FIGURE = Figure("regret-epsilon", "Regret against the privacy budget on RiverSwim", analyse, families, cells)
