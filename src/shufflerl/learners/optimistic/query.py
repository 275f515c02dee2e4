"""Which counters are asked of a batch: the fewer a user touches, the less noise there is on all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.rows import Rows, expected_value, information


class Stakes(NamedTuple):
    """What asking for transitions (f = 0) and rewards (f = 1) of rows may tell.

    `error[f, h, x, a]` is the variance that each leaves of a row's value, `precision` what is known of it, and
    `between[f, x, a]` how much the steps differ. A batch allocates `visits[h, x, a]` to rows, and those `met[h, x]` to
    states.
    """

    error: FloatArray
    precision: FloatArray
    between: FloatArray
    visits: FloatArray
    met: FloatArray


def choose_counters(
    rows: Rows, values: FloatArray, value_variance: FloatArray, allocated: FloatArray, variances: FloatArray
) -> BoolArray:
    """Whether the transitions asked[0, h] and the rewards asked[1, h] of a step are asked of a batch.

    A user touches one counter of each family and step that is asked: if n of them, every counter has noise of variance
    `variances[n - 1]`. So from all of them the family and step is dropped that tells least, again and again, and of all
    these the ones are asked that together tell most. There may be more to gain behind a step that gains nothing: the
    law of the noise may change with the number of counters.

    What a row's transitions are worth is reckoned with the `values` of the next states and their variance: before
    anything is known of them, so that they seem the same, it still matters where a row leads.
    """
    asked = np.ones((2, len(allocated)), dtype=np.bool_)
    asked[0, -1] = False
    if variances[0] >= variances[-1]:
        return asked
    stakes, losses = find_stakes(rows, values, value_variance, allocated), np.zeros(asked.size)
    best, most = asked.copy(), worth(stakes, asked, variances[-1], losses)
    for noise in variances[-2::-1]:
        worth(stakes, asked, noise, losses)
        asked.ravel()[losses.argmin()] = False
        value = worth(stakes, asked, noise, losses)
        if value > most:
            best, most = asked.copy(), value
    return best


@compiled
def find_stakes(rows: Rows, values: FloatArray, value_variance: FloatArray, allocated: FloatArray) -> Stakes:
    """What is at stake in the rows that are tried; of what is open of next states' values a part sets them apart."""
    horizon, states, actions = allocated.shape
    error = np.zeros((2, horizon, states, actions))
    precision = np.ones((2, horizon, states, actions))
    met = np.zeros((horizon, states))
    for h in range(horizon):
        for x in range(states):
            for a in range(actions):
                met[h, x] += allocated[h, x, a]
                if allocated[h, x, a] > 0.0:
                    error[1, h, x, a] = rows.reward_variances[h, x, a]
                    precision[1, h, x, a] = 1.0 / rows.reward_variances[h, x, a]
                    if h < horizon - 1:
                        by_chance, by_noise = rows.chance_error[h, x, a], rows.noise_error[h, x, a]
                        _, error[0, h, x, a] = expected_value(rows, values, h, x, a)
                        precision[0, h, x, a] = 1.0 / (C.typical * by_chance + by_noise)
                        i = (h * states + x) * actions + a
                        for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                            open_variance = C.apart * value_variance[h + 1, rows.successors[t]]
                            error[0, h, x, a] += (by_chance * rows.probabilities[t] + by_noise) * open_variance
    return Stakes(error, precision, rows.between, allocated, met)


@compiled
def worth(stakes: Stakes, asked: BoolArray, noise: float, losses: FloatArray) -> float:
    """What a batch tells if these counters are asked, with noise of that variance on each.

    m visits of a row tell I = m^2 / (s^2 + typical m), s^2 the noise (half of it for a reward, which two counters
    make), and at other steps 1 / (1 / I + typical t) if steps differ by t. Of an error v at precision K, J in all
    take v J / (K + J): a sum over the rows that are tried, each as often as its state is met.

    losses[f horizon + h] becomes what is lost of it without a family and step, at other steps to first order.
    """
    horizon, states, actions = stakes.visits.shape
    added = np.zeros(horizon)
    shared = np.zeros(horizon)
    slopes = np.zeros(horizon)
    total = 0.0
    for f in range(2):
        for h in range(horizon):
            losses[f * horizon + h] = 0.0 if asked[f, h] else np.inf
        for x in range(states):
            for a in range(actions):
                everywhere = 0.0
                for h in range(horizon):
                    added[h] = shared[h] = slopes[h] = 0.0
                    if asked[f, h] and stakes.visits[h, x, a] > 0.0:
                        added[h] = information(stakes.visits[h, x, a], noise / (1.0 + f))
                        shared[h] = added[h] / (1.0 + added[h] * C.typical * stakes.between[f, x, a])
                        everywhere += shared[h]
                if everywhere == 0.0:
                    continue
                slope = 0.0
                for h in range(horizon):
                    stake = stakes.met[h, x] * stakes.error[f, h, x, a]
                    if stake > 0.0:
                        prior = stakes.precision[f, h, x, a]
                        others = everywhere - shared[h]
                        total_added = added[h] + others
                        gain = stake * total_added / (prior + total_added)
                        total += gain
                        losses[f * horizon + h] += gain - stake * others / (prior + others)
                        slopes[h] = stake * prior / (prior + total_added) ** 2
                        slope += slopes[h]
                for h in range(horizon):
                    losses[f * horizon + h] += shared[h] * (slope - slopes[h])
    return total
