"""One optimistic plan on a posterior, and how many users it is worth."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shufflerl.checks import FloatArray, IntArray
from shufflerl.kernels import compiled
from shufflerl.mdp import PolicyArray

#: A row is thought of as tried by so many times its visits, or by the smallest batch.
_TRIES = 4.0
#: How much of an error counts further along a path. Less than one, since values add up over a path of rows that are
#: all taken at their best, which no run of luck would do.
_ALONG = 0.5
#: At the decision itself as much and, divided by the number of steps, so much more: with one step all of it counts.
_HERE = 0.5
#: More where few have been, so many times the smallest batch: what was dismissed on little evidence is tried again.
_FEW, _LEAST_FEW = 4.0, 4.0
#: By this much for every tenfold of what was played since 20 smallest batches.
_TENFOLD, _SINCE = 0.15, 20.0
#: By what share of its visits a decision may grow in one batch.
_QUARTER = 0.25


@compiled
def worth_trying(users: float, left: float) -> float:
    """How many standard errors behind a rival may be for n users to be worth a try: the z of psi(z) / z = n / R.

    R are the users `left` after the batch; psi(z) = phi(z) - z Phi(-z) is the mean of what a standard normal has above
    z, which falls from 0.4 at z = 0.

    >>> [round(worth_trying(float(n), 1000.0), 2) for n in (1, 10, 100, 1000)]
    [2.44, 1.72, 0.94, 0.28]
    >>> worth_trying(10.0, 0.0)
    0.0
    """
    if left == 0.0:
        return 0.0
    low, high = 0.0, 10.0
    while high - low > 1e-7:
        z = (low + high) / 2
        beyond = math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2
        if beyond * left > z * users:
            low = z
        else:
            high = z
    return low


@compiled
def _mean_and_error(
    values: FloatArray,
    after: NDArray[np.int32],
    probabilities: FloatArray,
    prior: FloatArray,
    errors: tuple[float, float, float],
) -> tuple[float, float]:
    """E V over a row's next states and the variance of its error; see `optimistic_policy`."""
    sampling, noise, spread = errors
    expected = square = prior_expected = prior_square = reach = 0.0
    for j in range(len(after)):
        v = values[after[j]]
        expected += probabilities[j] * v
        square += probabilities[j] * v * v
        prior_expected += prior[j] * v
        prior_square += prior[j] * v * v
    for j in range(len(after)):
        reach += (values[after[j]] - expected) ** 2
    chance = max(0.0, square - expected * expected)
    prior_chance = max(0.0, prior_square - prior_expected * prior_expected)
    data = sampling * (chance + min(1.0, sampling) * reach / len(after)) + noise * reach
    before = spread * max(prior_chance, 0.1 * reach / len(after))
    return expected, data * before / (data + before) if data + before > 0 else 0.0


@compiled
def optimistic_policy(
    row_starts: IntArray,
    successors: NDArray[np.int32],
    probabilities: FloatArray,
    prior: FloatArray,
    spread: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    rewards: FloatArray,
    reward_variances: FloatArray,
    reward_differences: FloatArray,
    visits: FloatArray,
    promised: FloatArray,
    users: float,
    left: float,
    played: float,
    alike: float,
    lots: FloatArray,
    policy: PolicyArray,
) -> None:
    """Write the policy that is best if every row is as good as it may be worth finding out; `lots` break ties.

    The error of r + E V in row (h, x, a), V the next step's optimistic values, has variance v = (that of r) + the
    harmonic sum of what the data leave open, A (Var V + min(1, A) q / D) + B q with q = sum (V - E V)^2 over the D next
    states, and what the prior does, spread * max(Var V, q / 10 D). With the visits that are `promised` by other users
    of the same batch it will be v (1 + N) / (1 + N + promised), N the visits so far.

    Trying the row with n users, 4 N or the smallest batch of `users`, can move it by sqrt(v n / (n + N)); z times that
    is its bonus b, z what is worth trying with n of the users that are `left`. At the decision itself b counts by 1/2 +
    1/2H, and more where N is small; for decisions before it by half. There errors add up along a path: b^2 + E b'^2 +
    2 `alike` b sqrt(E b'^2), b' the bonus at the next step. Where the steps are alike (1) their errors are the same
    error and bonuses add; where they are not (0), their squares do.

    A row that few have seen may lead where nobody has been: (z/2)^2 / 5 (1 + max V - E V) / (1 + N) for that, times
    n / (n + N), with N counting visits at other steps too where rewards are alike.
    """
    horizon, states, actions = rewards.shape
    everywhere = (visits + promised).sum(axis=0)
    bolder = _TENFOLD * np.log10(max(1.0, played / users / _SINCE))
    few = _FEW * max(users, _LEAST_FEW)
    z_least = worth_trying(users, left)
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
            for a in range(actions):
                variance = reward_variances[h, x, a]
                expected = expected_mean = expected_bonus = 0.0
                if h < horizon - 1:
                    i = (h * states + x) * actions + a
                    after = successors[row_starts[i] : row_starts[i + 1]]
                    p = probabilities[row_starts[i] : row_starts[i + 1]]
                    p0 = prior[row_starts[i] : row_starts[i + 1]]
                    errors = (sampling[h, x, a], noise[h, x, a], spread[h, x, a])
                    expected, error = _mean_and_error(value_after, after, p, p0, errors)
                    variance += error
                    for j in range(len(after)):
                        expected_mean += p[j] * mean_after[after[j]]
                        expected_bonus += p[j] * bonus_after[after[j]]
                seen = visits[h, x, a] + promised[h, x, a]
                tried = max(users, _TRIES * seen)
                z = z_least if tried == users else worth_trying(tried, left)
                squared = z * z * tried / (tried + seen)
                known = seen + (1.0 - min(1.0, 5.0 * reward_differences[x, a])) * (everywhere[x, a] - seen)
                local = squared * variance * (1.0 + visits[h, x, a]) / (1.0 + seen)
                here = _ALONG + _HERE / horizon + bolder * few / (few + known)
                unseen = 0.2 * _ALONG**2 * squared * (1.0 + highest - expected) / (1.0 + known)
                index = rewards[h, x, a] + expected_mean + unseen
                upper = index + np.sqrt(_added(here**2 * local, expected_bonus, alike))
                if upper > best or (upper == best and lots[h, x, a] > lot):
                    best = upper
                    lot = lots[h, x, a]
                    policy[h, x] = a
                    mean[x] = min(index, most)
                    bonus[x] = _added(_ALONG**2 * local, expected_bonus, alike)
            value[x] = min(mean[x] + np.sqrt(bonus[x]), most)


@compiled
def _added(first: float, second: float, alike: float) -> float:
    """The variance of two errors' sum, given theirs and their correlation."""
    return first + second + 2.0 * alike * np.sqrt(first * second)


@compiled
def users_worth(
    row_starts: IntArray,
    successors: NDArray[np.int32],
    probabilities: FloatArray,
    start: FloatArray,
    visits: FloatArray,
    policy: PolicyArray,
    smallest: float,
    reached: FloatArray,
) -> float:
    """How many users may play a policy before one of its decisions has got a quarter of its visits anew.

    Or as many as the `smallest` batch, if that is more: what has hardly been tried is played shortly, what is known
    well for long. Writes how likely each (h, x) is to be `reached`.
    """
    horizon, states = policy.shape
    reached[:] = 0.0
    reached[0] = start
    users = np.inf
    for h in range(horizon):
        for x in range(states):
            if reached[h, x] > 0.0:
                users = min(users, max(smallest, _QUARTER * visits[h, x, policy[h, x]]) / reached[h, x])
            if h < horizon - 1:
                i = (h * states + x) * visits.shape[2] + policy[h, x]
                for t in range(row_starts[i], row_starts[i + 1]):
                    reached[h + 1, successors[t]] += reached[h, x] * probabilities[t]
    return users
