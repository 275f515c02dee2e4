"""UCBVI's inner loop: one optimistic plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.compiling import compiled, inlined


class Bonus(NamedTuple):
    """Which transitions can be, whose bonus it is, what multiplies it, and the logarithm in it."""

    support: BoolArray
    bernstein: bool
    scale: float
    log_term: float


@inlined
def upper_bound(
    cell: tuple[int, int, int], moves: FloatArray, pays: FloatArray, variance: float, after: FloatArray, bonus: Bonus
) -> float:
    """An upper bound on Q* of cell (h, x, a), from its counters and the bounds `after`[x'] of the next step.

    Noise of the given variance per counter enters twice: a row whose visits do not stand out of it is unknown, and
    the bonus covers what it does to the estimate of r + E V.
    """
    h, x, a = cell
    support, bernstein, scale, log_term = bonus
    last = len(pays) - 1
    max_value = float(last - h + 1)
    lost = pays[h, x, a, 0]
    won = pays[h, x, a, 1]
    visits = lost + won
    if variance == 0.0 and visits < 1.0:
        return max_value  # the transitions of nobody need no look: most rows of a large problem
    visits_variance = 2.0 * variance
    mean = 0.0
    value_variance = 0.0  # Var V under the estimated transitions
    squared_deviations = 0.0  # sum of (V - E V)^2 over possible next states: what unit noise does to E V
    if h < last:
        total = positive = cells = first = second = weighted = weighted_square = 0.0
        for y in range(len(after)):
            if support[h, x, a, y]:
                value = after[y]
                total += moves[h, x, a, y]
                cells += 1.0
                first += value
                second += value * value
                count = max(moves[h, x, a, y], 0.0)
                positive += count
                weighted += count * value
                weighted_square += count * value * value
        # The inverse-variance mean of two estimates of the visits: a sum of D = `cells` transition counters and a sum
        # of 2 reward counters.
        visits = (2.0 * total + cells * visits) / (cells + 2.0)
        visits_variance *= cells / (cells + 2.0)
        if positive <= 0:
            return max_value
        mean = weighted / positive
        value_variance = max(0.0, weighted_square / positive - mean * mean)
        squared_deviations = max(0.0, second - 2.0 * mean * first + cells * mean * mean)
    if visits < 1.0 or visits * visits <= visits_variance:
        return max_value
    reward = min(1.0, max(0.0, 0.5 + 0.5 * (won - lost) / visits))
    if bernstein:
        width = np.sqrt(log_term * (value_variance + reward * (1.0 - reward)) / visits) + log_term * max_value / visits
    else:
        width = max_value * np.sqrt(log_term / visits)
    width += np.sqrt(log_term * variance * (squared_deviations + 0.5)) / visits
    return float(min(max_value, reward + mean + scale * width))


@compiled
def optimistic_policy(
    rng: Generator,
    moves: FloatArray,
    pays: FloatArray,
    variance: float,
    bonus: Bonus,
    policy: PolicyArray,
    value: FloatArray,
    after: FloatArray,
) -> None:
    """Make `policy` greedy for an upper bound on Q*; among equals keep its action, else take one at random.

    Keeping what is deployed unless something is better avoids policy switches that buy nothing. `moves[h, x, a, x']`
    and `pays[h, x, a, r]` are sums of released counts whose noise has the given variance per counter; `value[x]`
    leaves with the bound at the first step, `after` is scratch of the same size.
    """
    horizon, states, actions, _ = pays.shape
    for h in range(horizon - 1, -1, -1):
        for x in range(states):
            after[x] = value[x]
        for x in range(states):
            deployed = policy[h, x]
            best = -1.0
            ties = 0
            for a in range(actions):
                q = upper_bound((h, x, a), moves, pays, variance, after, bonus)
                if q > best:
                    best = q
                    ties = 1
                    policy[h, x] = a
                elif q == best and policy[h, x] != deployed:
                    ties += 1
                    if a == deployed or rng.random() * ties < 1.0:
                        policy[h, x] = a
            value[x] = best
