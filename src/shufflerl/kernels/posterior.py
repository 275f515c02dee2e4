"""From all conserved releases to a posterior of every row: pooling, and shrinkage learned from the data.

Rows (h, x, a) have their transitions flat, row after row, as in a `Layout`. A pooled row says `raw`, an unbiased
estimate whose error has variance A p(1-p) + B in a cell of probability p: A (`sampling`) from the users' own chance,
B (`noise`) from privacy. Rewards have the same two numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shufflerl.checks import FloatArray, IntArray
from shufflerl.kernels import compiled

#: What p(1-p) is taken for where p is not known yet.
TYPICAL = 0.15
#: What p(1-p) is at least taken for in the variance of an estimate, and in that of a difference between steps.
_LEAST_CHANCE = 0.02
_LEAST_DIFFERENCE = 0.005
#: The error variance of a row that nobody visited.
UNKNOWN = 1e9
#: Fewer visits than this are none: their squares would underflow, and a row of no weight would be 0 / 0.
_NOBODY = 1e-60
#: Differences between steps that are weighed against each other: a row is drawn at every step from a Dirichlet law of
#: this concentration around the steps' mean, so that a cell varies by p(1-p) t with t = 1 / (concentration + 1).
CONCENTRATIONS = np.array([0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 4096.0])
_EM_STEPS = 5
#: Before any data the mean of a cell over the steps is thought of as normal, of this mean and precision.
_MEAN, _MEAN_PRECISION = 0.3, 4.0
#: Prior of a row that no other step tells of: uniform over its next states, its mean of this variance.
_PRIOR_VARIANCE = 0.1
_LARGEST_SPREAD = 1.0 / 1.5
#: Prior of a reward that no other step tells of: mean 1/2, of this variance.
_REWARD_VARIANCE = 0.2


@compiled
def pool(
    batches: int,
    users: FloatArray,
    noises: FloatArray,
    policies: NDArray[np.int32],
    cells: FloatArray,
    surplus: FloatArray,
    counted: FloatArray,
    counted_variance: FloatArray,
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

    Of batch b: policies[b, h, x], the cells of the rows it played, one after the other in cells[b], surplus[b, h, x]
    of reward one over reward zero, and counted visits with their variance. Its visits follow from the model so far:
    those at step h predict m' = sum m p at the next, with variance sum [m p(1-p) + m^2 u + p^2 v], u the `uncertainty`
    of p and v the variance of m; the counted visits correct that as in Kalman's filter.

    A batch with m visits of a row weighs w = m / (s^2 + TYPICAL m), s^2 its noise: raw = sum w F / sum w m,
    A = sum w^2 m / (sum w m)^2, B = sum w^2 s^2 / (sum w m)^2. A reward is (m + surplus) / 2, of noise s^2 / 2.
    """
    horizon, states, actions = visits.shape
    weights = np.zeros((horizon, states, actions))
    reward_weights = np.zeros((horizon, states, actions))
    for table in (sampling, noise, raw_rewards, reward_sampling, reward_noise, visits):
        table[:] = 0.0
    raw[:] = 0.0
    here = np.zeros(states)
    here_variance = np.zeros(states)
    then = np.zeros(states)
    then_variance = np.zeros(states)
    for b in range(batches):
        s2 = noises[b]
        cell = 0
        for x in range(states):
            here[x] = users[b] * start[x]
            here_variance[x] = users[b] * start[x] * (1.0 - start[x])
        for h in range(horizon):
            if s2 == 0.0 or (h == 0 and not start_known):
                here[:] = counted[b, h]
                here_variance[:] = counted_variance[b, h]
            else:
                _correct(here, here_variance, counted[b, h], counted_variance[b, h])
            _spread_all(here, users[b])
            then[:] = 0.0
            then_variance[:] = 0.0
            for x in range(states):
                m = here[x]
                a = policies[b, h, x]
                visits[h, x, a] += m
                if m > _NOBODY:
                    w = m / (s2 / 2.0 + TYPICAL * m)
                    reward_weights[h, x, a] += w * m
                    raw_rewards[h, x, a] += w * (m + surplus[b, h, x]) / 2.0
                    reward_sampling[h, x, a] += w * w * m
                    reward_noise[h, x, a] += w * w * s2 / 2.0
                if h < horizon - 1:
                    w = 0.0
                    if m > _NOBODY:
                        w = m / (s2 + TYPICAL * m)
                        weights[h, x, a] += w * m
                        sampling[h, x, a] += w * w * m
                        noise[h, x, a] += w * w * s2
                    i = (h * states + x) * actions + a
                    for t in range(row_starts[i], row_starts[i + 1]):
                        p = probabilities[t]
                        raw[t] += w * cells[b, cell]
                        cell += 1
                        then[successors[t]] += m * p
                        then_variance[successors[t]] += (
                            m * p * (1.0 - p) + m * m * uncertainty[h, x, a] + p * p * here_variance[x]
                        )
            here[:] = then
            here_variance[:] = then_variance
    _divide(reward_weights, raw_rewards, reward_sampling, reward_noise)
    _divide_rows(weights.ravel(), row_starts, raw)
    _divide(weights, weights.copy(), sampling, noise)


@compiled
def _divide_rows(weights: FloatArray, row_starts: IntArray, raw: FloatArray) -> None:
    """Weighted sums of rows into rows; those of no weight are uniform."""
    for i in range(len(row_starts) - 1):
        for t in range(row_starts[i], row_starts[i + 1]):
            raw[t] = raw[t] / weights[i] if weights[i] > 0 else 1.0 / (row_starts[i + 1] - row_starts[i])


@compiled
def _correct(here: FloatArray, variance: FloatArray, counted: FloatArray, counted_variance: FloatArray) -> None:
    """Kalman's step: predicted visits and counted ones, weighed by their variances."""
    for x in range(len(here)):
        if variance[x] + counted_variance[x] > 0:
            gain = variance[x] / (variance[x] + counted_variance[x])
            here[x] += gain * (counted[x] - here[x])
            variance[x] = gain * counted_variance[x]


@compiled
def _spread_all(here: FloatArray, users: float) -> None:
    """No state is visited by fewer than none, and all together by all users."""
    total = 0.0
    for x in range(len(here)):
        here[x] = max(0.0, here[x])
        total += here[x]
    if total > 0:
        for x in range(len(here)):
            here[x] *= users / total


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


@compiled
def _add_likelihoods(estimates: FloatArray, errors: FloatArray, noises: FloatArray, total: FloatArray) -> None:
    """Add to total[g] the log-likelihood of difference g for one cell's estimates at several steps.

    Model: estimate_h ~ N(mu, A_h c + B_h + t d + 1e-4) with c and d the chance p(1-p) of the cell, each with its least
    value, and mu ~ N(_MEAN, 1 / _MEAN_PRECISION), which is integrated out.
    """
    top = 0.0
    bottom = 0.0
    for k in range(len(estimates)):
        w = 1.0 / (TYPICAL * errors[k] + noises[k])
        top += w * estimates[k]
        bottom += w
    p = min(1.0, max(0.0, top / bottom))
    chance = max(p * (1.0 - p), _LEAST_CHANCE)
    difference = max(p * (1.0 - p), _LEAST_DIFFERENCE)
    for g in range(len(CONCENTRATIONS)):
        t = 1.0 / (CONCENTRATIONS[g] + 1.0)
        zeroth = _MEAN_PRECISION
        first = _MEAN_PRECISION * _MEAN
        second = _MEAN_PRECISION * _MEAN * _MEAN
        logs = 0.0
        for k in range(len(estimates)):
            variance = errors[k] * chance + noises[k] + t * difference + 1e-4
            zeroth += 1.0 / variance
            first += estimates[k] / variance
            second += estimates[k] * estimates[k] / variance
            logs += np.log(variance)
        total[g] -= 0.5 * (logs + np.log(zeroth) + second - first * first / zeroth)


@compiled
def _mixed(likelihoods: FloatArray, differences: FloatArray) -> None:
    """differences[x, a]: the posterior mean of t, under a law of t over all (x, a) learned by a few steps of EM.

    The law starts uniform over the grid and keeps the weight of one (x, a) there.
    """
    states, actions, grid = likelihoods.shape
    law = np.full(grid, 1.0 / grid)
    seen = np.zeros(grid)
    posterior = np.zeros(grid)
    for _ in range(_EM_STEPS + 1):
        seen[:] = 1.0 / grid
        for x in range(states):
            for a in range(actions):
                top = likelihoods[x, a].max()
                total = 0.0
                for g in range(grid):
                    posterior[g] = law[g] * np.exp(likelihoods[x, a, g] - top)
                    total += posterior[g]
                mean = 0.0
                for g in range(grid):
                    seen[g] += posterior[g] / total
                    mean += posterior[g] / total / (CONCENTRATIONS[g] + 1.0)
                differences[x, a] = mean
        for g in range(grid):
            law[g] = seen[g] / (1.0 + states * actions)


@compiled
def compare_steps(
    row_starts: IntArray,
    successors: NDArray[np.int32],
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    raw_rewards: FloatArray,
    reward_sampling: FloatArray,
    reward_noise: FloatArray,
    differences: FloatArray,
    reward_differences: FloatArray,
) -> None:
    """How different are the steps? Write the posterior means of t for the transitions and rewards of every (x, a)."""
    horizon, states, actions = raw_rewards.shape
    likelihoods = np.zeros((states, actions, len(CONCENTRATIONS)))
    reward_likelihoods = np.zeros((states, actions, len(CONCENTRATIONS)))
    # The estimates of one row's cells, by next state: how many steps have it, and what they say.
    steps = np.zeros(states, dtype=np.int64)
    estimates = np.zeros((states, horizon))
    errors = np.zeros((states, horizon))
    noises = np.zeros((states, horizon))
    for x in range(states):
        for a in range(actions):
            if horizon > 1:
                _add_likelihoods(
                    raw_rewards[:, x, a], reward_sampling[:, x, a], reward_noise[:, x, a], reward_likelihoods[x, a]
                )
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                for t in range(row_starts[i], row_starts[i + 1]):
                    y = successors[t]
                    estimates[y, steps[y]] = raw[t]
                    errors[y, steps[y]] = sampling[h, x, a]
                    noises[y, steps[y]] = noise[h, x, a]
                    steps[y] += 1
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                for t in range(row_starts[i], row_starts[i + 1]):
                    y = successors[t]
                    k = steps[y]
                    if k > 1:
                        _add_likelihoods(estimates[y, :k], errors[y, :k], noises[y, :k], likelihoods[x, a])
                    steps[y] = 0
    _mixed(likelihoods, differences)
    _mixed(reward_likelihoods, reward_differences)


@compiled
def project(values: FloatArray, out: FloatArray) -> None:
    """Write the point of the simplex nearest to `values`."""
    ordered = np.sort(values)
    partial = 0.0
    shift = 0.0
    for k in range(len(values)):
        value = ordered[len(values) - 1 - k]
        partial += value
        if value > (partial - 1.0) / (k + 1):
            shift = (partial - 1.0) / (k + 1)
    for j in range(len(values)):
        out[j] = max(0.0, values[j] - shift)


@compiled
def shrink_transitions(
    row_starts: IntArray,
    successors: NDArray[np.int32],
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    differences: FloatArray,
    prior: FloatArray,
    spread: FloatArray,
    probabilities: FloatArray,
    uncertainty: FloatArray,
) -> None:
    """Each row's prior from the other steps, then its posterior.

    Prior: the other steps' rows averaged with weights 1 / (TYPICAL A + B + TYPICAL t), of sum S, and drawn towards the
    uniform row; `spread` is its variance per p(1-p). Posterior: a weighted mean of the row's own estimate, projected on
    the simplex, and the prior, by their mean variances over the cells; `uncertainty` is the variance that remains.
    """
    horizon, states, actions = sampling.shape
    tops = np.zeros(states)
    bottoms = np.zeros(states)
    others = np.zeros(states)
    own = np.zeros(states)
    for x in range(states):
        for a in range(actions):
            difference = differences[x, a]
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * difference)
                for t in range(row_starts[i], row_starts[i + 1]):
                    tops[successors[t]] += w * raw[t]
                    bottoms[successors[t]] += w
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                first = row_starts[i]
                width = row_starts[i + 1] - first
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * difference)
                told = 0.0
                for j in range(width):
                    y = successors[first + j]
                    rest = bottoms[y] - w
                    others[j] = (tops[y] - w * raw[first + j]) / rest if rest > 1e-6 else 1.0 / width
                    told += max(rest, 0.0) / width
                project(others[:width], own[:width])
                trust = _PRIOR_VARIANCE * told / (_PRIOR_VARIANCE * told + 1.0)
                spread[h, x, a] = min(_LARGEST_SPREAD, 1.0 / (TYPICAL * (1.0 / _PRIOR_VARIANCE + told)) + difference)
                prior_variance = 0.0
                for j in range(width):
                    p = trust * own[j] + (1.0 - trust) / width
                    prior[first + j] = p
                    prior_variance += spread[h, x, a] * p * (1.0 - p) / width
                project(raw[first : first + width], own[:width])
                visited = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL)
                variance = noise[h, x, a] * (1.0 - 1.0 / width)
                for j in range(width):
                    p = (visited * own[j] + 0.5 * prior[first + j]) / (visited + 0.5)
                    variance += sampling[h, x, a] * p * (1.0 - p) / width
                trust = prior_variance / (prior_variance + variance) if prior_variance + variance > 0 else 1.0
                uncertainty[h, x, a] = trust * variance
                for j in range(width):
                    probabilities[first + j] = trust * own[j] + (1.0 - trust) * prior[first + j]
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                for t in range(row_starts[i], row_starts[i + 1]):
                    tops[successors[t]] = 0.0
                    bottoms[successors[t]] = 0.0


@compiled
def shrink_rewards(
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    differences: FloatArray,
    rewards: FloatArray,
    variances: FloatArray,
) -> None:
    """Each mean reward's prior from the other steps, then its posterior mean and variance, as for transitions."""
    horizon, states, actions = raw.shape
    before = 1.0 / _REWARD_VARIANCE
    for x in range(states):
        for a in range(actions):
            top = 0.5 * before
            bottom = before
            for h in range(horizon):
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * differences[x, a])
                top += w * raw[h, x, a]
                bottom += w
            for h in range(horizon):
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * differences[x, a])
                told = max(bottom - w, before)
                prior = min(1.0, max(0.0, (top - w * raw[h, x, a]) / told))
                chance = max(prior * (1.0 - prior), _LEAST_CHANCE)
                prior_variance = min(_REWARD_VARIANCE, 1.0 / told + differences[x, a] * chance)
                own = min(1.0, max(0.0, raw[h, x, a]))
                visited = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL)
                p = (visited * own + 0.5 * prior) / (visited + 0.5)
                variance = sampling[h, x, a] * p * (1.0 - p) + noise[h, x, a]
                trust = prior_variance / (prior_variance + variance)
                rewards[h, x, a] = trust * own + (1.0 - trust) * prior
                variances[h, x, a] = trust * variance
