"""From pooled rows (`pooling`) to a posterior of every row, by shrinkage that is learned from the data.

For rows that were counted without noise see `dirichlet`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.concentration import LEAST_VISITS, learn_law, log_likelihoods
from shufflerl.learners.optimistic.pooling import TYPICAL, UNKNOWN

#: What p(1-p) is at least taken for in the variance of an estimate, and in that of a difference between steps.
LEAST_CHANCE = 0.02
_LEAST_DIFFERENCE = 0.005
#: Differences between steps that are weighed against each other: a row is drawn at every step from a Dirichlet law of
#: this concentration around the steps' mean, so that a cell varies by p(1-p) t with t = 1 / (concentration + 1). The
#: last is as good as no difference at all: without it, what many steps tell of a small reward stays unsaid at others.
CONCENTRATIONS = np.array([0.5, 2.0, 8.0, 32.0, 128.0, 512.0, 4096.0, 1e6])
#: How likely each is before any data.
_LAW = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]) / 7.0
_EM_STEPS = 5
#: The variance of an estimate is never taken for less.
_LEAST_VARIANCE = 1e-6
#: Before any data the mean of a cell over the steps is thought of as normal, of this mean and precision.
_MEAN, _MEAN_PRECISION = 0.3, 4.0
#: Rows are on average uniform over their next states: a row's mean over the steps is drawn around that by a Dirichlet
#: law of one of these concentrations, and how likely each is before any data. Errors are those of the least.
UNIFORM = np.array([1.5, 6.0, 24.0, 96.0])
_UNIFORM_LAW = np.array([0.7, 0.1, 0.1, 0.1])
LARGEST_SPREAD = 1.0 / UNIFORM[0]
#: However far below zero a cell was counted, this much of its noise is left.
_LEAST_DOUBT = 0.1
#: Prior of a reward that no other step tells of: mean 1/2, of this variance.
REWARD_VARIANCE = 0.2
#: Visits that are thought of beside those that were counted, paid as the prior says, where the chance of an estimate is
#: reckoned: who was paid nothing eight times is not sure to be paid nothing.
_BESIDE = 2.0


@compiled
def _add_likelihoods(estimates: FloatArray, errors: FloatArray, noises: FloatArray, total: FloatArray) -> None:
    """Add to total[g] the log-likelihood of difference g for one cell's estimates at several steps.

    Model: estimate_h ~ N(mu, A_h c + B_h + t d + _LEAST_VARIANCE) with c and d the chance p(1-p) of the cell, each with
    its least value, and mu ~ N(_MEAN, 1 / _MEAN_PRECISION), which is integrated out.
    """
    top = 0.0
    bottom = 0.0
    for k in range(len(estimates)):
        w = 1.0 / (TYPICAL * errors[k] + noises[k])
        top += w * estimates[k]
        bottom += w
    p = min(1.0, max(0.0, top / bottom))
    chance = max(p * (1.0 - p), LEAST_CHANCE)
    difference = max(p * (1.0 - p), _LEAST_DIFFERENCE)
    for g in range(len(CONCENTRATIONS)):
        t = 1.0 / (CONCENTRATIONS[g] + 1.0)
        zeroth = _MEAN_PRECISION
        first = _MEAN_PRECISION * _MEAN
        second = _MEAN_PRECISION * _MEAN * _MEAN
        logs = 0.0
        for k in range(len(estimates)):
            variance = errors[k] * chance + noises[k] + t * difference + _LEAST_VARIANCE
            zeroth += 1.0 / variance
            first += estimates[k] / variance
            second += estimates[k] * estimates[k] / variance
            logs += np.log(variance)
        total[g] -= 0.5 * (logs + np.log(zeroth) + second - first * first / zeroth)


@compiled
def _mixed(likelihoods: FloatArray, differences: FloatArray) -> None:
    """differences[x, a]: the posterior mean of t, under a law of t over all (x, a) learned by a few steps of EM.

    The law starts as before any data and keeps the weight of one (x, a) there.
    """
    states, actions, grid = likelihoods.shape
    law = _LAW.copy()
    seen = np.zeros(grid)
    posterior = np.zeros(grid)
    for _ in range(_EM_STEPS + 1):
        seen[:] = _LAW
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
    """Write the point of the simplex nearest to `values`: all less some shift, but for those that would fall below 0.

    Who are these? Those below the shift that makes the others sum to 1, found in a few passes and without sorting
    (Michelot 1986): a cell that is below one such shift is below all that follow.
    """
    kept = len(values)
    before = kept + 1
    shift = (values.sum() - 1.0) / kept
    while kept < before:
        before, kept, total = kept, 0, 0.0
        for value in values:
            if value > shift:
                kept += 1
                total += value
        if kept > 0:
            shift = (total - 1.0) / kept
    for j in range(len(values)):
        out[j] = max(0.0, values[j] - shift)


@compiled
def _doubt(mean: float, variance: float) -> float:
    """What cutting a normal to [0, 1] leaves of its variance: all of it well inside, little of it far outside.

    With limits a and b standard deviations off the mean: 1 + (a phi(a) - b phi(b)) / m - (phi(a) - phi(b))^2 / m^2,
    m = Phi(b) - Phi(a). Nearly 1 / a^2 and 1 / b^2 far outside.

    >>> [round(_doubt(mean, 0.01), 2) for mean in (0.5, 0.1, 0.0, -0.1)]
    [1.0, 0.63, 0.36, 0.2]
    """
    sd = math.sqrt(variance)
    a = -mean / sd
    b = (1.0 - mean) / sd
    if a > 6.0 or b < -6.0:
        return max(_LEAST_DOUBT, 1.0 / min(a * a, b * b))
    at_a = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    at_b = math.exp(-b * b / 2) / math.sqrt(2 * math.pi)
    mass = (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2
    left = 1.0 + (a * at_a - b * at_b) / mass - ((at_a - at_b) / mass) ** 2
    return max(_LEAST_DOUBT, left)


@compiled
def how_uniform(
    row_starts: IntArray,
    successors: NDArray[np.int32],
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    differences: FloatArray,
) -> FloatArray:
    """likely[x, a, g]: how likely a row's mean over the steps is of concentration g around the uniform row.

    That mean is pooled by weights w = 1 / (A + B / TYPICAL + t). Without noise it has the law of sum w visits. Noise
    would make rows seem more uniform than they are there, so with it the D cells are each taken for
    ~ N(1/D, (D - 1) / (D^2 (s + 1)) + sum w^2 ((A + t) p(1-p) + B) / (sum w)^2), and D - 1 of them for free.
    """
    horizon, states, actions = sampling.shape
    tops = np.zeros(states)
    bottoms = np.zeros(states)
    nexts = np.zeros(states, dtype=np.int64)
    likely = np.zeros((states * actions, len(UNIFORM)))
    which = np.full((states, actions), -1)
    known = 0
    for x in range(states):
        for a in range(actions):
            width = 0
            weights = by_chance = by_noise = 0.0
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                w = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL + differences[x, a])
                weights += w
                by_chance += w * w * (sampling[h, x, a] + differences[x, a])
                if noise[h, x, a] < UNKNOWN:
                    by_noise += w * w * noise[h, x, a]
                for t in range(row_starts[i], row_starts[i + 1]):
                    y = successors[t]
                    if bottoms[y] == 0.0:
                        nexts[width] = y
                        width += 1
                    tops[y] += w * raw[t]
                    bottoms[y] += w
            means, own = np.empty((2, width))
            visits = 0.0
            for j in range(width):
                y = nexts[j]
                means[j] = tops[y] / bottoms[y]
                visits += bottoms[y] / width
                tops[y] = bottoms[y] = 0.0
            if width > 1 and visits >= LEAST_VISITS:
                project(means, own)
                if by_noise == 0.0:
                    log_likelihoods(visits * own, np.full(width, 1.0 / width), UNIFORM, likely[known])
                else:
                    chance = max((own * (1.0 - own)).sum() / width, _LEAST_DIFFERENCE)
                    error = (by_chance * chance + by_noise) / weights**2
                    apart = ((means - 1.0 / width) ** 2).sum() / width
                    variances = (width - 1.0) / (width * width * (UNIFORM + 1.0)) + error
                    likely[known] = -0.5 * (width - 1.0) * (np.log(variances) + apart / variances)
                which[x, a] = known
                known += 1
    law = learn_law(likely[:known], _UNIFORM_LAW)
    out = np.empty((states, actions, len(UNIFORM)))
    for x in range(states):
        for a in range(actions):
            out[x, a] = likely[which[x, a]] if which[x, a] >= 0 else law
    return out


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
    doubt: FloatArray,
) -> None:
    """Each row's prior from the other steps, then its posterior.

    Prior: the other steps' rows averaged with weights 1 / (A + B / TYPICAL + t), of sum N, and drawn towards the
    uniform row by E s / (N + s) (see `how_uniform`); `spread` is its variance per p(1-p), taken for 1 / (N + s) + t
    with the least s: who were sure that rows are uniform would never look at the one that is not. Posterior: a weighted
    mean of the row's own estimate, projected on the simplex, and the prior, by their mean variances over the cells;
    `uncertainty` is the variance that remains. `doubt` says for every cell what part of its noise can still be in it,
    as no probability is below 0 or above 1.
    """
    horizon, states, actions = sampling.shape
    tops = np.zeros(states)
    bottoms = np.zeros(states)
    others = np.zeros(states)
    own = np.zeros(states)
    uniform = how_uniform(row_starts, successors, raw, sampling, noise, differences)
    for x in range(states):
        for a in range(actions):
            difference = differences[x, a]
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                w = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL + difference)
                for t in range(row_starts[i], row_starts[i + 1]):
                    tops[successors[t]] += w * raw[t]
                    bottoms[successors[t]] += w
            for h in range(horizon - 1):
                i = (h * states + x) * actions + a
                first = row_starts[i]
                width = row_starts[i + 1] - first
                w = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL + difference)
                told = 0.0
                for j in range(width):
                    y = successors[first + j]
                    rest = bottoms[y] - w
                    others[j] = (tops[y] - w * raw[first + j]) / rest if rest > 1e-6 else 1.0 / width
                    told += max(rest, 0.0) / width
                project(others[:width], own[:width])
                trust = (uniform[x, a] * told / (told + UNIFORM)).sum()
                spread[h, x, a] = min(LARGEST_SPREAD, 1.0 / (told + UNIFORM[0]) + difference)
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
                for j in range(width):
                    error = noise[h, x, a] + sampling[h, x, a] * own[j] * (1.0 - own[j])
                    doubt[first + j] = _doubt(raw[first + j], error) if noise[h, x, a] > 0.0 and error < 1.0 else 1.0
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
def prior_rewards(
    raw: FloatArray,
    sampling: FloatArray,
    noise: FloatArray,
    differences: FloatArray,
    usual: float,
    prior: FloatArray,
    variances: FloatArray,
) -> None:
    """Write each mean reward's prior from the other steps, and from what is `usual`, and its variance."""
    horizon, states, actions = raw.shape
    before = 1.0 / REWARD_VARIANCE
    for x in range(states):
        for a in range(actions):
            top = usual * before
            bottom = before
            for h in range(horizon):
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * differences[x, a])
                top += w * raw[h, x, a]
                bottom += w
            for h in range(horizon):
                w = 1.0 / (TYPICAL * sampling[h, x, a] + noise[h, x, a] + TYPICAL * differences[x, a])
                told = max(bottom - w, before)
                mean = min(1.0, max(0.0, (top - w * raw[h, x, a]) / told))
                chance = max(mean * (1.0 - mean), LEAST_CHANCE)
                prior[h, x, a] = mean
                variances[h, x, a] = min(REWARD_VARIANCE, 1.0 / told + differences[x, a] * chance)


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
    priors, prior_variances = np.empty_like(raw), np.empty_like(raw)
    prior_rewards(raw, sampling, noise, differences, 0.5, priors, prior_variances)
    for h in range(raw.shape[0]):
        for x in range(raw.shape[1]):
            for a in range(raw.shape[2]):
                prior, prior_variance = priors[h, x, a], prior_variances[h, x, a]
                own = min(1.0, max(0.0, raw[h, x, a]))
                visited = 1.0 / (sampling[h, x, a] + noise[h, x, a] / TYPICAL)
                p = (visited * own + _BESIDE * prior) / (visited + _BESIDE)
                variance = sampling[h, x, a] * p * (1.0 - p) + noise[h, x, a]
                trust = prior_variance / (prior_variance + variance)
                rewards[h, x, a] = trust * own + (1.0 - trust) * prior
                variances[h, x, a] = trust * variance
