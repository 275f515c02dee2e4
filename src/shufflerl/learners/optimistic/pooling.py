"""From releases to pooled rows: how many users were where, and what they met there.

A pooled row says `raw`, an unbiased estimate whose error has variance A p(1-p) + B in a cell of probability p: A, the
inverse effective sample size, from the users' own chance, B from privacy. Rewards are rows of two outcomes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.constants import CONSTANTS as C

#: A and B of a row that nobody visited.
UNKNOWN = 1e9
#: Fewer visits than this are none: their squares would underflow.
_NOBODY = 1e-60


class Sums(NamedTuple):
    """What is kept of all releases: the visits[h, x, a], and sums weighted by w = m / (s^2 + typical m).

    A batch of noise variance s^2 adds to every row of m visits w m to its `weights`, w^2 m to its `squares`, w^2 s^2 to
    its `noises`, all [f, h, x, a] for transitions (f = 0) and rewards (f = 1), and w times what was counted to `moves`
    and `pays`. The noise of a reward is that of two counters: s^2 / 2.
    """

    visits: FloatArray
    weights: FloatArray
    squares: FloatArray
    noises: FloatArray
    moves: FloatArray
    pays: FloatArray


class Releases(NamedTuple):
    """Releases with users conserved, one after the other: who played what, and what was counted.

    Release b has users[b] and noise of variance noises[b] on every counter. policies[i] was played by the part
    shares[i] of release[i]'s users. counted[b] are the visits of rows by the counters, of that `variance`, values[b]
    all counters; asked[b, f, h] says which were asked.
    """

    users: FloatArray
    noises: FloatArray
    release: IntArray
    policies: NDArray[np.int32]
    shares: FloatArray
    values: FloatArray
    counted: FloatArray
    variance: FloatArray
    asked: BoolArray


@compiled
def add_releases(
    releases: Releases,
    firsts: IntArray,
    start: FloatArray,
    start_known: bool,
    row_starts: IntArray,
    successors: NDArray[np.int32],
    probabilities: FloatArray,
    uncertainty: FloatArray,
    sums: Sums,
) -> None:
    """Add releases to the sums; policies of release b are those from firsts[b] on.

    How many users of a policy are where follows from the model so far: m of them in a row send m p on to the next
    state, with variance m p(1-p) + m^2 u + p^2 v, u the `uncertainty` of p and v the variance of m. What a row was
    counted corrects that as in Kalman's filter, in the same proportion for all policies that play it; no row has
    fewer visits than none, and all rows of a step have as many as there are users.
    """
    horizon, states, actions = sums.visits.shape
    here, variance, then, then_variance = np.empty((4, len(releases.shares), states))
    visits = np.empty((states, actions))
    for b in range(len(releases.users)):
        first, last, users = firsts[b], firsts[b + 1], releases.users[b]
        for c in range(first, last):
            for x in range(states):
                p = releases.shares[c] * start[x]
                here[c, x] = users * p
                variance[c, x] = here[c, x] * (1.0 - p)
        for h in range(horizon):
            total = 0.0
            for x in range(states):
                of_policies = releases.policies[first:last, h, x], here[first:last, x], variance[first:last, x]
                for a in range(actions):
                    counted, noise = releases.counted[b, h, x, a], releases.variance[b, h, x, a]
                    visits[x, a] = _correct(counted, noise, h > 0 or start_known, a, *of_policies)
                    total += visits[x, a]
            scale = users / total if total > 0.0 else 1.0
            then[first:last] = 0.0
            then_variance[first:last] = 0.0
            for x in range(states):
                for a in range(actions):
                    _count_row(releases, b, h, x, a, visits[x, a] * scale, row_starts, sums)
                    i = (h * states + x) * actions + a
                    for c in range(first, last):
                        if releases.policies[c, h, x] == a:
                            m, v = here[c, x] * scale, variance[c, x]
                            for t in range(row_starts[i], row_starts[i + 1]):
                                p, y = probabilities[t], successors[t]
                                then[c, y] += m * p
                                then_variance[c, y] += m * p * (1.0 - p) + m * m * uncertainty[h, x, a] + p * p * v
            here, then = then, here
            variance, then_variance = then_variance, variance


@compiled
def _correct(
    counted: float, noise: float, predicted: bool, a: int, plays: NDArray[np.int32], m_of: FloatArray, v_of: FloatArray
) -> float:
    """Kalman's step on a row of action a: its visits, and m and v of every policy that plays it."""
    m = v = 0.0
    players = 0
    for c in range(len(plays)):
        if plays[c] == a:
            m += m_of[c]
            v += v_of[c]
            players += 1
    if players == 0:
        return 0.0
    gain = v / (v + noise) if noise > 0.0 and predicted else 1.0
    corrected = max(0.0, m + gain * (counted - m))
    left = gain * noise
    for c in range(len(plays)):
        if plays[c] == a:
            m_of[c] = m_of[c] * (corrected / m) if m > _NOBODY else corrected / players
            v_of[c] = v_of[c] * (left / v) if v > 0.0 else left / players
    return float(corrected)


@compiled
def _count_row(releases: Releases, b: int, h: int, x: int, a: int, m: float, row_starts: IntArray, sums: Sums) -> None:
    """Add what m visits of a row were counted for."""
    sums.visits[h, x, a] += m
    i = (h * sums.visits.shape[1] + x) * sums.visits.shape[2] + a
    for f in range(2):
        if m > _NOBODY and releases.asked[b, f, h]:
            noise = releases.noises[b] / (1.0 + f)
            w = m / (noise + C.typical * m)
            sums.weights[f, h, x, a] += w * m
            sums.squares[f, h, x, a] += w * w * m
            sums.noises[f, h, x, a] += w * w * noise
            if f == 0:
                for t in range(row_starts[i], row_starts[i + 1]):
                    sums.moves[t] += w * releases.values[b, t]
            else:
                unpaid = row_starts[-1] + 2 * i
                sums.pays[h, x, a] += w * (m + releases.values[b, unpaid + 1] - releases.values[b, unpaid]) / 2.0


def pool(sums: Sums, row: IntArray, widths: IntArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """The raw rows, those of rewards as pairs (not paid, paid), and A and B of both.

    Cell t is of row[t], which has so many cells.
    """
    seen, squared = sums.weights > 0.0, sums.weights * sums.weights
    inverse_ess, noise = np.full((2, *seen.shape), UNKNOWN)
    np.divide(sums.squares, squared, out=inverse_ess, where=seen)
    np.divide(sums.noises, squared, out=noise, where=seen)
    raw = 1.0 / widths[row]
    np.divide(sums.moves, sums.weights[0].ravel()[row], out=raw, where=seen[0].ravel()[row])
    pairs = np.full((*sums.pays.shape, 2), 0.5)
    np.divide(sums.pays, sums.weights[1], out=pairs[..., 1], where=seen[1])
    pairs[..., 0] = 1.0 - pairs[..., 1]
    return raw, pairs.ravel(), inverse_ess, noise
