"""The figures and tables of a reproduction, in the report's order: each a folder with its sweep and its analysis."""

from __future__ import annotations

from shufflerl.experiments.figures import regret_curves, regret_epsilon
from shufflerl.experiments.figures.base import Figure

FIGURES: tuple[Figure, ...] = (regret_epsilon.FIGURE, regret_curves.FIGURE)
