"""Every line at the paper's budget, and SDP-PE with the paper's constants: runs that other figures have too."""

from __future__ import annotations

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Size, chosen_settings, family, on, theory_settings
from shufflerl.experiments.figures.lines import LINES, PE, SDP_PE

ENV = "riverswim"
EPSILON = 1.0
LITERAL = (SDP_PE, PE)


def families(size: Size) -> list[Family]:
    """Each line."""
    return [family(line, ENV, EPSILON, size.episodes) for line in LINES]


def cells(size: Size, chosen: Chosen) -> list[Cell]:
    """The chosen constants, and the paper's."""
    literal = [own for own in families(size) if own.line in LITERAL]
    return on(size, chosen_settings(families(size), chosen) + theory_settings(literal))
