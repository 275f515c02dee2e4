"""The tuning protocol: a few candidates for the constants of every line, tried on seeds that are never reported.

For each family (line, environment, budget) the candidate of the lowest mean regret over the tuning seeds is chosen;
the first of them if several tie. A line with one candidate needs no trial.
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
        Cell(own.setting(constants), seed)
        for own in families
        for tried in [candidates(own, size)]
        if len(tried) > 1
        for constants in tried
        for seed in size.tuning
    ]


def choose(families: Sequence[Family], size: Size, runs: Runs) -> Chosen:
    """The best candidate of each family."""
    best: dict[Family, dict[str, Any]] = {}
    for own in families:
        tried = candidates(own, size)
        means = [runs.regrets(own.setting(constants)).mean() for constants in tried] if len(tried) > 1 else [0.0]
        best[own] = tried[int(np.argmin(means))]
    return best
