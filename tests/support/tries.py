"""What a try gains, by other ways than the planner's."""

from __future__ import annotations

import numpy as np
from scipy import integrate, stats

from shufflerl.learners.optimistic.constants import CONSTANTS as C


def gain_by_integration(
    mean: float, best: float, error: float, told: float, users: float, left: float, noise: float
) -> float:
    """Of a try in a bandit: what it adds to the best of two, by numerical integration, less what it costs.

    No arm pays more than 1, however well its try turns out. Without noise all is by visit that of half as many visits
    as are known.
    """
    known = told + 1 / C.typical
    whole = users if noise else max(2.0, C.typical * known / 2)
    tells = 1 / (C.typical / whole + noise / whole**2)
    moves = error * np.sqrt(tells / (tells + known))
    ahead, _ = integrate.quad(lambda x: (x - best) * stats.norm.pdf(x, mean, moves), best, 1)
    ahead += (1 - best) * stats.norm.sf(1, mean, moves)
    return float(users / whole * (left * ahead - whole * (best - mean)))


def error_in_probes(error: float, told: float, noise: float) -> float:
    """The error of an arm as probes take it: bolder with noise for few visits."""
    if noise:
        return float(C.boldness * error * np.sqrt(1 + C.few / (C.few + C.typical * told)))
    return C.exact_boldness * error
