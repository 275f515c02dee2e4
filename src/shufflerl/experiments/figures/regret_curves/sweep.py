"""Every line at the paper's two budgets."""

from __future__ import annotations

from shufflerl.experiment import Setting
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family
from shufflerl.experiments.figures.lines import LINES

ENV = "riverswim"
EPSILONS = (0.1, 1.0)


def families(size: Size) -> list[Family]:
    """Each line at each budget; one without privacy has no budget, and is there once."""
    return list(dict.fromkeys(family(line, ENV, epsilon, size.episodes) for line in LINES for epsilon in EPSILONS))


def settings(size: Size, chosen: Chosen) -> list[Setting]:
    """The chosen constants."""
    return chosen_settings(families(size), chosen)
