"""From all conserved releases to pooled rows.

Rows (h, x, a) have their transitions flat, row after row, as in a `Layout`. A pooled row says `raw`, an unbiased
estimate whose error has variance A p(1-p) + B in a cell of probability p: A (`sampling`) from the users' own chance,
B (`noise`) from privacy. Rewards have the same two numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled

#: What p(1-p) is taken for where p is not known yet.
TYPICAL = 0.15
#: The error variance of a row that nobody visited.
UNKNOWN = 1e9
#: Fewer visits than this are none: their squares would underflow, and a row of no weight would be 0 / 0.
_NOBODY = 1e-60


class Batches(NamedTuple):
    """Conserved noisy releases, one after the other.

    Batch b has users[b] and noise of variance noises[b] on every counter. It played policies[first_policy[b]] up to
    the one before policies[first_policy[b + 1]], each with its weight. Its rows, those that some policy plays, are
    likewise from first_row[b] on: rows[k] is a row's number, with the `surplus` of reward one over reward zero and
    the `counted` visits with their variance; their cells are from first_cell[b] on, row after row.
    asked[b, 0, h] and asked[b, 1, h] say whether the transitions and rewards of a step were counted at all.
    """

    users: FloatArray
    noises: FloatArray
    first_policy: IntArray
    policies: NDArray[np.int32]
    weights: FloatArray
    first_row: IntArray
    rows: IntArray
    surplus: FloatArray
    counted: FloatArray
    counted_variance: FloatArray
    first_cell: IntArray
    cells: FloatArray
    asked: BoolArray


@compiled
def pool(
    batches: Batches,
    moved: FloatArray,
    paid: FloatArray,
    start: FloatArray,
    start_known: bool,
    row_starts: IntArray,
    successors: NDArray[np.int32],
    probabilities: FloatArray,
    uncertainty: FloatArray,
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    raw_rewards: FloatArray,
    reward_sampling: FloatArray,
    reward_noise: FloatArray,
    visits: FloatArray,
) -> None:
    """One forward pass over all batches: visits of each, then rows pooled over batches.

    Of releases without noise only their sum matters: how many `moved` along each transition, and were `paid` each of
    both rewards.

    How many users of a policy are where follows from the model so far: m of them in a row send m p on to the next
    state, with variance m p(1-p) + m^2 u + p^2 v, u the `uncertainty` of p and v the variance of m. What a row was
    counted corrects that as in Kalman's filter, in the same proportion for all policies that play it; no row has
    fewer visits than none, and all rows of a step have as many as there are users.

    A batch with m visits of a row weighs w = m / (s^2 + TYPICAL m), s^2 its noise: raw = sum w F / sum w m,
    A = sum w^2 m / (sum w m)^2, B = sum w^2 s^2 / (sum w m)^2. A reward is (m + surplus) / 2, of noise s^2 / 2.
    """
    horizon, states, actions = visits.shape
    weights = np.zeros((horizon, states, actions))
    reward_weights = np.zeros((horizon, states, actions))
    noise[:] = reward_noise[:] = 0.0
    _weigh_rewards(paid, visits, reward_weights, raw_rewards, reward_sampling)
    _weigh_rows(moved, row_starts, weights.ravel(), raw, sampling.ravel())
    expected = np.zeros(states * actions)
    for b in range(len(batches.users)):
        s2, users = batches.noises[b], batches.users[b]
        policies = batches.policies[batches.first_policy[b] : batches.first_policy[b + 1]]
        shares = batches.weights[batches.first_policy[b] : batches.first_policy[b + 1]]
        here = users * shares.reshape(-1, 1) * start  # of every policy, in every state
        here_variance = here * (1.0 - shares.reshape(-1, 1) * start)
        cell = batches.first_cell[b]
        last = batches.first_row[b]
        for h in range(horizon):
            first = last
            trusted = h == 0 and not start_known
            last, total = _correct_step(batches, b, h, first, trusted, here, here_variance, actions, expected)
            scale = users / total if total > 0 else 1.0
            then = np.zeros_like(here)
            then_variance = np.zeros_like(here)
            for k in range(first, last):
                i = batches.rows[k]
                x, a = divmod(i - h * states * actions, actions)
                m = expected[k - first] * scale
                visits[h, x, a] += m
                if m > _NOBODY and batches.asked[b, 1, h]:
                    w = m / (s2 / 2.0 + TYPICAL * m)
                    reward_weights[h, x, a] += w * m
                    raw_rewards[h, x, a] += w * (m + batches.surplus[k]) / 2.0
                    reward_sampling[h, x, a] += w * w * m
                    reward_noise[h, x, a] += w * w * s2 / 2.0
                if h < horizon - 1:
                    w = 0.0
                    if m > _NOBODY and batches.asked[b, 0, h]:
                        w = m / (s2 + TYPICAL * m)
                        weights[h, x, a] += w * m
                        sampling[h, x, a] += w * w * m
                        noise[h, x, a] += w * w * s2
                    for t in range(row_starts[i], row_starts[i + 1]):
                        raw[t] += w * batches.cells[cell]
                        cell += 1
                    p = probabilities[row_starts[i] : row_starts[i + 1]]
                    after = successors[row_starts[i] : row_starts[i + 1]]
                    for c in range(len(policies)):
                        if policies[c, h, x] == a:
                            sent = here[c, x] * scale, here_variance[c, x], uncertainty[h, x, a]
                            _send_on(sent, after, p, then[c], then_variance[c])
            here = then
            here_variance = then_variance
    _divide(reward_weights, raw_rewards, reward_sampling, reward_noise)
    _divide_rows(weights.ravel(), row_starts, raw)
    _divide(weights, weights.copy(), sampling, noise)


@compiled
def _weigh_rewards(
    paid: FloatArray, visits: FloatArray, weights: FloatArray, raw: FloatArray, sampling: FloatArray
) -> None:
    """Write the sums of rewards that were counted without noise, where a visit weighs 1 / TYPICAL."""
    for h in range(visits.shape[0]):
        for x in range(visits.shape[1]):
            for a in range(visits.shape[2]):
                visits[h, x, a] = paid[h, x, a, 0] + paid[h, x, a, 1]
                weights[h, x, a] = visits[h, x, a] / TYPICAL
                raw[h, x, a] = paid[h, x, a, 1] / TYPICAL
                sampling[h, x, a] = weights[h, x, a] / TYPICAL


@compiled
def _weigh_rows(
    moved: FloatArray, row_starts: IntArray, weights: FloatArray, raw: FloatArray, sampling: FloatArray
) -> None:
    """Write the sums of transitions that were counted without noise; the last step has none."""
    sampling[:] = 0.0
    for i in range(len(row_starts) - 1):
        for t in range(row_starts[i], row_starts[i + 1]):
            weights[i] += moved[t] / TYPICAL
            raw[t] = moved[t] / TYPICAL
        sampling[i] = weights[i] / TYPICAL


@compiled
def _correct_step(
    batches: Batches,
    b: int,
    h: int,
    first: int,
    trusted: bool,
    here: FloatArray,
    variance: FloatArray,
    actions: int,
    expected: FloatArray,
) -> tuple[int, float]:
    """Correct what is expected of the rows of a step, from the `first` on; returns where they end, and their sum."""
    size = here.shape[1] * actions
    policies = batches.policies[batches.first_policy[b] : batches.first_policy[b + 1]]
    k = first
    total = 0.0
    while k < batches.first_row[b + 1] and batches.rows[k] < (h + 1) * size:
        x, a = divmod(batches.rows[k] - h * size, actions)
        counted = batches.counted[k], batches.counted_variance[k]
        expected[k - first] = _correct(policies[:, h, x], a, here[:, x], variance[:, x], counted, trusted)
        total += expected[k - first]
        k += 1
    return k, total


@compiled
def _correct(
    actions: NDArray[np.int32],
    a: int,
    here: FloatArray,
    variance: FloatArray,
    counted: tuple[float, float],
    trusted: bool,
) -> float:
    """Kalman's step on one row, whose policies are those with `actions` a: expected visits and counted ones."""
    m = 0.0
    v = 0.0
    policies = 0
    for c in range(len(actions)):
        if actions[c] == a:
            m += here[c]
            v += variance[c]
            policies += 1
    told, told_variance = counted
    gain = v / (v + told_variance) if v + told_variance > 0 else 0.0
    corrected = max(0.0, told if trusted else m + gain * (told - m))
    left = told_variance if trusted else gain * told_variance
    for c in range(len(actions)):
        if actions[c] == a:
            here[c] = here[c] * (corrected / m) if m > _NOBODY else corrected / policies
            variance[c] = variance[c] * left / v if v > 0 else left / policies
    return corrected


@compiled
def _send_on(
    sent: tuple[float, float, float],
    after: NDArray[np.int32],
    probabilities: FloatArray,
    then: FloatArray,
    then_variance: FloatArray,
) -> None:
    """Add the users of one policy who leave a row to those it has at the next step."""
    m, v, u = sent
    for j in range(len(after)):
        p = probabilities[j]
        then[after[j]] += m * p
        then_variance[after[j]] += m * p * (1.0 - p) + m * m * u + p * p * v


@compiled
def _divide_rows(weights: FloatArray, row_starts: IntArray, raw: FloatArray) -> None:
    """Weighted sums of rows into rows; those of no weight are uniform."""
    for i in range(len(row_starts) - 1):
        for t in range(row_starts[i], row_starts[i + 1]):
            raw[t] = raw[t] / weights[i] if weights[i] > 0 else 1.0 / (row_starts[i + 1] - row_starts[i])


@compiled
def _divide(weights: FloatArray, tops: FloatArray, sampling: FloatArray, noise: FloatArray) -> None:
    """Weighted sums into a mean and its errors; rows of no weight know nothing, and say one half."""
    for h in range(weights.shape[0]):
        for x in range(weights.shape[1]):
            for a in range(weights.shape[2]):
                w = weights[h, x, a]
                if w > 0:
                    tops[h, x, a] /= w
                    sampling[h, x, a] /= w * w
                    noise[h, x, a] /= w * w
                else:
                    tops[h, x, a] = 0.5
                    sampling[h, x, a] = noise[h, x, a] = UNKNOWN
