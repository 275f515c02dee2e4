"""Every line at every budget, and SDP-PE with the paper's constants at each."""

from __future__ import annotations

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family, on, theory_settings
from shufflerl.experiments.figures.lines import LINES

ENV = "riverswim"
EPSILONS = {"full": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), "quick": (0.1, 1.0, 10.0)}
#: Budgets at which the constants of the theory are run too.
THEORY = {"full": EPSILONS["full"], "quick": (1.0,)}


def families(size: Size) -> list[Family]:
    """Each line at each budget; one without privacy has no budget, and is there once."""
    every = [family(line, ENV, epsilon, size.episodes) for line in LINES for epsilon in EPSILONS[size.name]]
    return list(dict.fromkeys(every))


def with_theory(size: Size) -> list[Family]:
    """Those that are run with the constants of the theory too."""
    return [own for own in families(size) if own.epsilon is None or own.epsilon in THEORY[size.name]]


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants, and those of the theory."""
    return on(size, chosen_settings(families(size), chosen) + theory_settings(with_theory(size)))
