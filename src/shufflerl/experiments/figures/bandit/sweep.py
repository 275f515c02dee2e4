"""Every line at the paper's budget on the environment as it is by default, which is as the paper has it."""

from __future__ import annotations

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family, on, theory_settings
from shufflerl.experiments.figures.lines import LINES

ENV = "bandit"
EPSILON = 1.0


def families(size: Size) -> list[Family]:
    """Each line."""
    return [family(line, ENV, EPSILON, size.episodes) for line in LINES]


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    own = families(size)
    return on(size, chosen_settings(own, chosen) + theory_settings(own))
