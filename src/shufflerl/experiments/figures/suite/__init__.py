"""The benchmark suite at one K: which learner is best where."""

from shufflerl.experiments.figures.base import Figure
from shufflerl.experiments.figures.suite.analysis import analyse
from shufflerl.experiments.figures.suite.sweep import cells

FIGURE = Figure("suite", "The benchmark suite", analyse, cells=cells)
