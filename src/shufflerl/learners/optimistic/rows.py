"""The posterior as plans read it, and what visits tell of a row."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.constants import CONSTANTS as C

#: How finely `worth_trying` is solved for.
_FINE = 1e-3


class Rows(NamedTuple):
    """The posterior of all rows (h, x, a), as `Model.rows` has it.

    Transitions are flat: those of row i are from row_starts[i] on; rows of the last step have none. The posterior of
    E V, for values V of the next states, has variance `chance_error` Var V + `noise_error` sum (V - E V)^2: what the
    users' own chance leaves open and what privacy does. `precision` is one over the variance of a counter's mean that
    is known of a row, as `information` reckons it. `between[f, x, a]` is the variance between steps of transitions
    (f = 0) and rewards (f = 1) relative to p(1-p), `homogeneity` how alike all steps are, from 0 to 1.
    """

    row_starts: IntArray
    successors: NDArray[np.int32]
    probabilities: FloatArray
    chance_error: FloatArray
    noise_error: FloatArray
    rewards: FloatArray
    reward_variances: FloatArray
    precision: FloatArray
    visits: FloatArray
    between: FloatArray
    homogeneity: float


@compiled
def similarity(between: float) -> float:
    """How far rows whose steps differ by that variance count as alike: 1 if it is 0.

    >>> similarity(0.0), similarity(0.1), similarity(0.3)
    (1.0, 0.5, 0.0)
    """
    return 1.0 - min(1.0, C.dissimilarity * between)


@compiled
def information(visits: float, noise: float) -> float:
    """The precision that so many visits in one batch add, by noise of that variance on a counter."""
    return visits * visits / (noise + C.typical * visits) if visits > 0.0 else 0.0


@compiled
def visits_for(precision: float, noise: float) -> float:
    """How many visits in one batch add that precision.

    >>> round(visits_for(information(30.0, 16.0), 16.0), 9)
    30.0
    """
    half = C.typical * precision / 2.0
    return half + math.sqrt(half * half + noise * precision)


@compiled
def unit_normal_loss(z: float) -> float:
    """psi(z) = phi(z) - z Phi(-z): the mean of what a standard normal has above z, from 0.4 at z = 0 down."""
    return math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi) - z * math.erfc(z / math.sqrt(2.0)) / 2.0


@compiled
def worth_trying(users: float, left: float) -> float:
    """How many standard errors behind a rival may be for n users to be worth a try: the z of psi(z) / z = n / R.

    R are the users `left` after the batch.

    >>> [round(worth_trying(float(n), 1000.0), 1) for n in (1, 10, 100, 1000)]
    [2.4, 1.7, 0.9, 0.3]
    >>> worth_trying(10.0, 0.0)
    0.0
    """
    low, high = 0.0, 10.0  # psi(10) is below 1e-24
    while high - low > _FINE:
        z = (low + high) / 2.0
        if unit_normal_loss(z) * left > z * users:
            low = z
        else:
            high = z
    return low


@compiled
def expectation(rows: Rows, values: FloatArray, h: int, x: int, a: int) -> float:
    """E V over a row's next states; values[h, x] has a last step of zeros."""
    i = (h * rows.rewards.shape[1] + x) * rows.rewards.shape[2] + a
    mean = 0.0
    for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
        mean += rows.probabilities[t] * values[h + 1, rows.successors[t]]
    return mean


@compiled
def expected_value(rows: Rows, values: FloatArray, h: int, x: int, a: int) -> tuple[float, float]:
    """E V over a row's next states and the variance of its error.

    What noise leaves open of a row that nobody knows is as much in cells that no step ever led to. So of its part D of
    the variance D P / (D + P) is left, as if a prior had told E V with variance P = sum p (V - E V)^2 (no p below
    `min_chance`).
    """
    mean = expectation(rows, values, h, x, a)
    i = (h * rows.rewards.shape[1] + x) * rows.rewards.shape[2] + a
    variance = squares = prior = 0.0
    for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
        apart = (values[h + 1, rows.successors[t]] - mean) ** 2
        variance += rows.probabilities[t] * apart
        squares += apart
        prior += max(rows.probabilities[t], C.min_chance) * apart
    noise = rows.noise_error[h, x, a] * squares
    if noise > 0.0:
        noise *= prior / (noise + prior)
    return mean, rows.chance_error[h, x, a] * variance + noise
