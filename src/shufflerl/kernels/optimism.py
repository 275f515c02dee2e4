"""One optimistic plan on a posterior."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shufflerl.checks import FloatArray, IntArray
from shufflerl.kernels import compiled
from shufflerl.mdp import PolicyArray


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
    low, high = 0.0, 40.0
    while high - low > 1e-9:
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
    optimism: float,
    users: float,
    alike: float,
    lots: FloatArray,
    policy: PolicyArray,
) -> None:
    """Write the policy that is best if every row is as good as it may be worth finding out; `lots` break ties.

    The error of r + E V in row (h, x, a), V the next step's optimistic values, has variance v = (that of r) + the
    harmonic sum of what the data leave open, A (Var V + min(1, A) q / D) + B q with q = sum (V - E V)^2 over the D next
    states, and what the prior does, spread * max(Var V, q / 10 D). Trying the row with the n `users` of a batch can
    move it by sqrt(v n / (n + N)), N its visits so far: `optimism` times that is its bonus b.

    Errors add up along a path: b^2 + E b'^2 + 2 `alike` b sqrt(E b'^2), b' the bonus at the next step. Where the steps
    are alike (1) their errors are the same error and bonuses add; where they are not (0), their squares do.

    A row that few have seen may lead where nobody has been: optimism^2 / 5 (1 + max V - E V) / (1 + N) for that, times
    n / (n + N), with N counting visits at other steps too where rewards are alike.
    """
    horizon, states, actions = rewards.shape
    everywhere = visits.sum(axis=0)
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
                seen = visits[h, x, a]
                squared = optimism * optimism * users / (users + seen)
                known = seen + (1.0 - min(1.0, 5.0 * reward_differences[x, a])) * (everywhere[x, a] - seen)
                index = rewards[h, x, a] + expected_mean + 0.2 * squared * (1.0 + highest - expected) / (1.0 + known)
                local = squared * variance
                along = local + expected_bonus + 2.0 * alike * np.sqrt(local * expected_bonus)
                upper = min(index + np.sqrt(along), most)
                if upper > best or (upper == best and lots[h, x, a] > lot):
                    best = upper
                    lot = lots[h, x, a]
                    policy[h, x] = a
                    mean[x] = min(index, most)
                    bonus[x] = along
            value[x] = best
