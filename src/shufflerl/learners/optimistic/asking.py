"""Which counters are asked of a batch: the fewer a user touches, the less noise there is on all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.optimism import Rows, information, mean_and_error
from shufflerl.learners.optimistic.pooling import TYPICAL

#: So much of what is unsure of next states' values sets them apart; the rest is the same for all.
_APART = 0.5


class Stakes(NamedTuple):
    """What asking for transitions (f = 0) and rewards (f = 1) of rows may tell.

    `error[f, h, x, a]` is the variance that each leaves of a row's value, `known` what is known of it, one over a
    variance, and `differences[f, x, a]` how much the steps differ. A batch promises `visits[h, x, a]` of rows, and
    those `met[h, x]` of states.
    """

    error: FloatArray
    known: FloatArray
    differences: FloatArray
    visits: FloatArray
    met: FloatArray


@compiled
def choose_counters(
    rows: Rows,
    values: FloatArray,
    unsure: FloatArray,
    promised: FloatArray,
    noisy: float,
    each: float,
    asked: BoolArray,
) -> None:
    """Write whether the transitions asked[0, h] and the rewards asked[1, h] of a step are asked of a batch.

    A user touches one counter of each family and step that is asked. If that is all of them, every counter has noise of
    variance `noisy`; each that is left out takes `each` off. So from all of them the family and step is dropped that
    tells least, again and again for as long as the others then tell more.

    What a row's transitions are worth is reckoned with the `values` of the next states and how `unsure` these are:
    before anything is known of them, so that they seem the same, it still matters where a row leads.
    """
    stakes = _find_stakes(rows, values, unsure, promised)
    asked[:] = True
    asked[0, -1] = False
    losses = np.zeros(asked.shape)
    told = _worth(stakes, asked, noisy, losses)
    for _ in range(asked.sum() - 1):
        noisy -= each
        _worth(stakes, asked, noisy, losses)
        least = losses.argmin()
        asked.ravel()[least] = False
        without = _worth(stakes, asked, noisy, losses)
        if without <= told:
            asked.ravel()[least] = True
            break
        told = without


@compiled
def _find_stakes(rows: Rows, values: FloatArray, unsure: FloatArray, promised: FloatArray) -> Stakes:
    horizon, states, actions = promised.shape
    error = np.zeros((2, horizon, states, actions))
    known = np.zeros((2, horizon, states, actions))
    differences = np.empty((2, states, actions))
    differences[0] = rows.differences
    differences[1] = rows.reward_differences
    apart = _APART * unsure
    for h in range(horizon):
        for x in range(states):
            for a in range(actions):
                if promised[h, x, a] > 0:
                    error[1, h, x, a] = rows.reward_variances[h, x, a]
                    known[1, h, x, a] = 1.0 / rows.reward_variances[h, x, a]
                    if h < horizon - 1:
                        error[0, h, x, a] = mean_and_error(values[h + 1], rows, h, x, a, apart[h + 1])[1]
                        own = 1.0 / (TYPICAL * rows.sampling[h, x, a] + rows.noise[h, x, a])
                        known[0, h, x, a] = own + 1.0 / (TYPICAL * rows.spread[h, x, a])
    return Stakes(error, known, differences, promised, promised.sum(axis=2))


@compiled
def _worth(stakes: Stakes, asked: BoolArray, noise: float, losses: FloatArray) -> float:
    """What a batch tells if these counters are asked, with noise of that variance on each.

    m visits of a row tell I = m^2 / (s^2 + TYPICAL m), s^2 the noise (half of it for a reward, which two counters
    make), and at other steps 1 / (1 / I + TYPICAL t) if steps differ by t. Of an error v of which K is known, J in all
    take v J / (K + J): a sum over the rows that are tried, each as often as its state is met.

    losses[f, h] becomes what is lost of it without a family and step, at other steps to first order.
    """
    horizon, states, actions = stakes.visits.shape
    told = np.zeros(horizon)
    shared = np.zeros(horizon)
    slopes = np.zeros(horizon)
    total = 0.0
    for f in range(2):
        for h in range(horizon):
            losses[f, h] = 0.0 if asked[f, h] else np.inf
    for x in range(states):
        for a in range(actions):
            for f in range(2):
                everywhere = 0.0
                for h in range(horizon):
                    told[h] = shared[h] = slopes[h] = 0.0
                    if asked[f, h] and stakes.visits[h, x, a] > 0:
                        told[h] = information(stakes.visits[h, x, a], noise / (1.0 + f))
                        shared[h] = told[h] / (1.0 + told[h] * TYPICAL * stakes.differences[f, x, a])
                        everywhere += shared[h]
                if everywhere == 0.0:
                    continue
                for h in range(horizon):
                    stake = stakes.met[h, x] * stakes.error[f, h, x, a]
                    if stake > 0.0:
                        known = stakes.known[f, h, x, a]
                        others = everywhere - shared[h]
                        tells = told[h] + others
                        gain = stake * tells / (known + tells)
                        total += gain
                        losses[f, h] += gain - stake * others / (known + others)
                        slopes[h] = stake * known / (known + tells) ** 2
                slope = slopes.sum()
                for h in range(horizon):
                    losses[f, h] += shared[h] * (slope - slopes[h])
    return total
