"""Every line at the paper's two budgets."""

from __future__ import annotations

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family, on
from shufflerl.experiments.figures.lines import LINES

ENV = "riverswim"
EPSILONS = (0.1, 1.0)


def families(size: Size) -> list[Family]:
    """Each line at each budget; one without privacy has no budget, and is there once."""
    return list(dict.fromkeys(family(line, ENV, epsilon, size.episodes) for line in LINES for epsilon in EPSILONS))


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants."""
    return on(size, chosen_settings(families(size), chosen))
