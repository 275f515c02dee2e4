"""Final regret against policy switches: the paper's figure of the switching cost."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.switches.analysis import analyse
from shufflerl.experiments.figures.switches.sweep import cells, families

FIGURE = Figure("switches", "Regret against policy switches", analyse, families, cells)
