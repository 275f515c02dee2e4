"""What a try gains, by other ways than the planner's."""

from __future__ import annotations

import numpy as np
from scipy import stats

from shufflerl.learners.optimistic.constants import CONSTANTS as C


def gain_by_integration(
    mean: float, best: float, error: float, told: float, users: float, left: float, noise: float
) -> float:
    """Of a try in a bandit: what it adds to the best of two, by numerical integration, less what it costs.

    The next batches can go on with it: a try is worth its part of what the best number of such tries gains together, a
    power of two. Without noise all is by visit that of half as many visits as are known.
    """
    known = told + 1 / C.typical
    batches = 2.0 ** np.arange(40) if noise else np.array([max(2.0, C.typical * known / 2) / users])
    tells = batches / (C.typical / users + noise / users**2)
    moves = error * np.sqrt(tells / (tells + known))
    z = np.linspace(-9, 9, 4001)
    ahead = np.maximum(0, mean + moves[:, None] * z - best) @ stats.norm.pdf(z) * (z[1] - z[0])
    return float((left * ahead / batches).max() - users * (best - mean))


def error_in_probes(error: float, told: float, noise: float) -> float:
    """The error of an arm as probes take it: bolder with noise for few visits."""
    if noise:
        return float(C.boldness * error * np.sqrt(1 + C.few / (C.few + C.typical * told)))
    return C.exact_boldness * error
