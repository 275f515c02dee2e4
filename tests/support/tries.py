"""What a try gains, by other means than the kernels'; and a look by itself."""

from __future__ import annotations

import numpy as np
from scipy import integrate, optimize, stats

from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.learners.optimistic.looks import Best, plan_look
from shufflerl.learners.optimistic.optimism import Rows
from shufflerl.learners.optimistic.pooling import TYPICAL


def gain_by_integration(
    mean: float,
    best: float,
    error: float,
    told: float,
    users: float,
    left: float,
    noise: float,
    *,
    lost: float = 1.0,
    room: float | None = None,
    kept: float = 0.0,
) -> float:
    """Of a try in a bandit: what it adds to the best of two, by numerical integration, less what it costs.

    No arm pays more than 1, however well its try turns out. Without noise all is by visit that of half as many visits
    as are known; with noise it counts up to 2.5 times where more is at stake than was lost so far, and three tenths of
    what three times as many would gain for those who are `kept` by waiting are taken off, as far as noise is all.
    """
    known = told + 1 / TYPICAL
    whole = users if noise else max(2.0, TYPICAL * known / 2)
    tells = 1 / (TYPICAL / whole + noise / whole**2)
    moves = error * np.sqrt(tells / (tells + known))
    ahead, _ = integrate.quad(lambda x: (x - best) * stats.norm.pdf(x, mean, moves), best, 1)
    ahead += (1 - best) * stats.norm.sf(1, mean, moves)
    gain = left * ahead
    if noise:
        stake = left * min(error / (1 + (best - mean) / error), 1 - best if room is None else room)
        gain *= 1 + 1.5 * stake / (stake + 3 * lost)
    gain = float(users / whole * (gain - whole * (best - mean)))
    if noise and gain > 0 and kept > 0:
        then = gain_by_integration(mean, best, error, told, 3 * users, kept * left, noise, lost=lost, room=room)
        gain -= 0.3 * noise / (noise + TYPICAL * users) * max(0.0, then)
    return gain


def error_in_looks(mean: float, best: float, error: float, told: float, noise: float) -> float:
    """The error of an arm as looks take it: bolder for few visits with noise, for a skewed law without."""
    if noise:
        return float(0.9 * error * np.sqrt(1 + 8 / (8 + TYPICAL * told)))
    a, b = np.array([mean, 1 - mean]) * (mean * (1 - mean) / error**2 - 1)
    skew, far = 2 * (b - a) * np.sqrt(a + b + 1) / ((a + b + 2) * np.sqrt(a * b)), (best - mean) / error
    if skew <= 0 or far <= 1:
        return 1.65 * error
    z = optimize.brentq(lambda z: z + skew * (z * z - 1) / 6 - far, 0.5, far + 1)
    return float(1.65 * (best - mean) / z)


def first_look(
    rows: Rows,
    best: Best,
    promised: FloatArray,
    start: FloatArray,
    sizes: tuple[float, float],
    left: float,
    noise: float,
    policy: PolicyArray,
    kept: float = 0.0,
) -> float:
    """The first look of a batch."""
    looked = np.zeros(len(policy), dtype=np.bool_)
    return plan_look(rows, best, promised, start, sizes, left, kept, noise, looked, policy)
