"""An optimistic plan on a posterior, and what a policy of it is worth."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.pooling import TYPICAL

#: How finely `worth_trying` is solved for.
_FINE = 1e-3


class Rows(NamedTuple):
    """All rows (h, x, a) with their errors, as `estimation.posterior.Posterior` has them.

    Transitions are flat: those of row i are from row_starts[i] on. `told` is what is known of a row, one over a
    variance: that of a counter pooled from its own data, noise and chance of p(1-p) = TYPICAL together, the mean of
    that for transitions and for rewards; and before the last step, as far as steps are `alike`, that of the prior
    which the other steps make. Where all counts are `exact`, that prior has the concentration of a Dirichlet law, and
    `sampling` is all there is to a row's error (see `mean_and_error`).
    """

    row_starts: IntArray
    successors: NDArray[np.int32]
    probabilities: FloatArray
    prior: FloatArray
    doubt: FloatArray
    spread: FloatArray
    sampling: FloatArray
    noise: FloatArray
    rewards: FloatArray
    reward_variances: FloatArray
    differences: FloatArray
    reward_differences: FloatArray
    visits: FloatArray
    told: FloatArray
    alike: float
    exact: bool


@compiled
def information(visits: float, noise: float) -> float:
    """What so many visits in one batch tell of a row: one over the variance, noise and chance together."""
    return visits * visits / (noise + TYPICAL * visits) if visits > 0 else 0.0


@compiled
def visits_for(told: float, noise: float) -> float:
    """How many visits in one batch tell so much.

    >>> round(visits_for(information(30.0, 16.0), 16.0), 9)
    30.0
    """
    half = TYPICAL * told / 2
    return half + math.sqrt(half * half + noise * told)


@compiled
def beyond(z: float) -> float:
    """psi(z) = phi(z) - z Phi(-z): the mean of what a standard normal has above z, from 0.4 at z = 0 down."""
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2


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
        z = (low + high) / 2
        if beyond(z) * left > z * users:
            low = z
        else:
            high = z
    return low


@compiled
def mean_and_error(
    values: FloatArray, rows: Rows, h: int, x: int, a: int, unsure: FloatArray | None = None
) -> tuple[float, float]:
    """E V over a row's next states and the variance of its error: see `optimistic_policy`, or A Var V of exact counts.

    Where the values themselves are `unsure`, by such variances, the error is that of what they may turn out to be.
    """
    i = (h * rows.rewards.shape[1] + x) * rows.rewards.shape[2] + a
    first, last = rows.row_starts[i], rows.row_starts[i + 1]
    sampling, noise, spread = rows.sampling[h, x, a], rows.noise[h, x, a], rows.spread[h, x, a]
    expected = square = prior_expected = prior_square = reach = noisy = 0.0
    for t in range(first, last):
        v = values[rows.successors[t]]
        expected += rows.probabilities[t] * v
        square += rows.probabilities[t] * v * v
        prior_expected += rows.prior[t] * v
        prior_square += rows.prior[t] * v * v
    for t in range(first, last):
        apart = (values[rows.successors[t]] - expected) ** 2
        if unsure is not None:
            apart += unsure[rows.successors[t]]
            square += rows.probabilities[t] * unsure[rows.successors[t]]
            prior_square += rows.prior[t] * unsure[rows.successors[t]]
        reach += apart
        noisy += rows.doubt[t] * apart
    width = last - first
    chance = max(0.0, square - expected * expected)
    if rows.exact:
        return expected, sampling * chance
    prior_chance = max(0.0, prior_square - prior_expected * prior_expected)
    data = sampling * (chance + min(1.0, sampling) * reach / width) + noise * noisy
    before = spread * max(prior_chance, 0.1 * reach / width)
    return expected, data * before / (data + before) if data + before > 0 else 0.0


@compiled
def along(here: float, after: float, alike: float) -> float:
    """The variance of an error here and those after it: squares add up, or errors do where the steps are alike."""
    return float(here + after + 2.0 * alike * np.sqrt(here * after))


@compiled
def optimistic_policy(
    rows: Rows,
    promised: FloatArray,
    optimism: float,
    users: float,
    left: float,
    noisy: float,
    lots: FloatArray,
    policy: PolicyArray,
    values: FloatArray,
) -> None:
    """Write the policy that is best if every row is as good as it may be worth finding out; `lots` break ties.

    `values[h, x]` become what it would then earn from (h, x) on.

    The error of r + E V in row (h, x, a), V the next step's optimistic values, has variance v = (that of r) + the
    harmonic sum of what the data leave open, A (Var V + min(1, A) q / D) + B q with q = sum (V - E V)^2 over the D next
    states (in the term of B each times its `doubt`), and what the prior does, spread * max(Var V, q / 10 D).

    I is what is told of the row, and what the visits `promised` by others of the same batch will tell, by noise of
    variance `noisy`: these take their part off v. Trying the row with the n `users` of a batch, or with as many as
    double I if that is more, tells J and can move it by sqrt(v J / (I + J)): `optimism` times z times that is its
    bonus b, z what is worth trying by so many of the users that are `left`.

    Errors add up along a path: b^2 + E b'^2 + 2 `alike` b sqrt(E b'^2), b' the bonus at the next step. Where the steps
    are alike (1) their errors are the same error and bonuses add; where they are not (0), their squares do.

    A row that few have seen may lead where nobody has been: 0.15 (optimism z)^2 (1 + max V - E V) / (1 + N) for that,
    times J / (I + J), with the visits N counting those at other steps too where rewards are alike.
    """
    horizon, states, actions = rows.rewards.shape
    everywhere = (rows.visits + promised).sum(axis=0)
    by_all = worth_trying(users, left)
    value = np.zeros(states)
    mean = np.zeros(states)
    bonus = np.zeros(states)
    value_after = np.zeros(states)
    mean_after = np.zeros(states)
    bonus_after = np.zeros(states)
    for h in range(horizon - 1, -1, -1):
        value_after[:] = value
        mean_after[:] = mean
        bonus_after[:] = bonus
        highest = value_after.max()
        most = float(horizon - h)
        for x in range(states):
            best = -1.0
            lot = -1.0
            policy[h, x] = 0
            for a in range(actions):
                variance = rows.reward_variances[h, x, a]
                expected = expected_mean = expected_bonus = 0.0
                if h < horizon - 1:
                    expected, error = mean_and_error(value_after, rows, h, x, a)
                    variance += error
                    i = (h * states + x) * actions + a
                    for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                        expected_mean += rows.probabilities[t] * mean_after[rows.successors[t]]
                        expected_bonus += rows.probabilities[t] * bonus_after[rows.successors[t]]
                seen = rows.visits[h, x, a] + promised[h, x, a]
                known = rows.told[h, x, a] + information(promised[h, x, a], noisy)
                variance *= (rows.told[h, x, a] + 1.0 / TYPICAL) / (known + 1.0 / TYPICAL)
                doubling = visits_for(known, noisy)
                z = optimism * (by_all if doubling <= users else worth_trying(doubling, left))
                tells = information(max(users, doubling), noisy)
                squared = z * z * tells / (tells + known) if left > 0 else 0.0
                shared = seen + (1.0 - min(1.0, 5.0 * rows.reward_differences[x, a])) * (everywhere[x, a] - seen)
                surprise = 0.15 * squared * (1.0 + highest - expected) / (1.0 + shared)
                index = rows.rewards[h, x, a] + expected_mean + surprise
                path = along(squared * variance, expected_bonus, rows.alike)
                upper = min(index + np.sqrt(path), most)
                if upper > best or (upper == best and lots[h, x, a] > lot):
                    best = upper
                    lot = lots[h, x, a]
                    policy[h, x] = a
                    mean[x] = min(index, most)
                    bonus[x] = path
            value[x] = best
        values[h] = value


@compiled
def policy_estimate(rows: Rows, policy: PolicyArray) -> tuple[FloatArray, FloatArray]:
    """mean[x] and variance[x] of what a policy earns from state x on, by the errors of `optimistic_policy`.

    The errors of the states that may come next are taken for one error: E b^2 where independent ones would give less.
    """
    horizon, states, actions = rows.rewards.shape
    mean = np.zeros(states)
    variance = np.zeros(states)
    for h in range(horizon - 1, -1, -1):
        mean_after = mean.copy()
        variance_after = variance.copy()
        for x in range(states):
            a = int(policy[h, x])
            here = rows.reward_variances[h, x, a]
            mean[x] = rows.rewards[h, x, a]
            expected = 0.0
            if h < horizon - 1:
                ahead, error = mean_and_error(mean_after, rows, h, x, a)
                mean[x] += ahead
                here += error
                i = (h * states + x) * actions + a
                for t in range(rows.row_starts[i], rows.row_starts[i + 1]):
                    expected += rows.probabilities[t] * variance_after[rows.successors[t]]
            variance[x] = along(here, expected, rows.alike)
    return mean, variance
