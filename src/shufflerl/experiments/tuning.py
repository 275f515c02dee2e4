"""The tuning protocol: every line has as many candidates for its constants, tried on seeds that are never reported.

For each family (line, environment, budget) the candidate of the lowest mean regret over the tuning seeds is chosen;
the first of them if several tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shufflerl.experiments.cells import Cell
from shufflerl.experiments.figures.base import Chosen, Family, Runs, Size


def candidates(own: Family, size: Size) -> tuple[dict[str, Any], ...]:
    """The constants that a family's are chosen from."""
    return own.line.candidates[: size.candidates]


def cells(families: Iterable[Family], size: Size) -> list[Cell]:
    """Every candidate of every family on the tuning seeds."""
    return [
        Cell(own.setting(parameters), seed)
        for own in families
        for parameters in candidates(own, size)
        for seed in size.tuning
    ]


def choose(families: Sequence[Family], size: Size, runs: Runs) -> Chosen:
    """The best candidate of each family."""
    best: dict[Family, dict[str, Any]] = {}
    for own in families:
        tried = candidates(own, size)
        best[own] = tried[int(np.argmin([runs.regrets(own.setting(parameters)).mean() for parameters in tried]))]
    return best
