"""Posteriors of rows that were counted without noise.

A row is drawn around its prior by a Dirichlet law of concentration s: small where a row mostly leads to one state,
large where rows resemble their prior. Of n visits in shares q that leaves a Dirichlet law around
p = (n q + s prior) / (n + s), of concentration n + s: E V has the variance Var_p V / (n + s + 1). Every row's counts
say how likely each s is around a uniform prior, and all rows together what law s has over the problem; where other
steps make the prior, s is no less than what they tell. Rewards are rows of two outcomes, paid and not, drawn around
what the problem pays on average, by one s for all of them, which together they tell better than each its own.

So where every row so far always led to one state, a few visits of one more tell nearly all of it; where rewards
differ, not having been paid a few times tells little.
"""

from __future__ import annotations

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.concentration import LEAST_VISITS, learn_law, log_likelihoods
from shufflerl.learners.optimistic.shrinkage import LARGEST_SPREAD, LEAST_CHANCE, REWARD_VARIANCE, prior_rewards

#: Concentrations that are weighed against each other, and how likely each is before any data.
CONCENTRATIONS = np.array([0.02, 0.1, 0.5, 2.0, 8.0])
_LAW = np.full(len(CONCENTRATIONS), 1.0 / len(CONCENTRATIONS))


@compiled
def shrinkage(law: FloatArray, least: float, visits: float) -> tuple[float, float]:
    """Means of s / (n + s) and 1 / (n + s + 1) over a law of s, where s is no less than other steps make it."""
    towards = left = 0.0
    for g in range(len(law)):
        s = max(CONCENTRATIONS[g], least)
        towards += law[g] * s / (visits + s)
        left += law[g] / (visits + s + 1.0)
    return towards, left


@compiled
def count_transitions(
    row_starts: IntArray,
    raw: FloatArray,
    sampling: FloatArray,
    prior: FloatArray,
    spread: FloatArray,
    probabilities: FloatArray,
    error: FloatArray,
) -> None:
    """Write every row's posterior mean, and the `error` of it: E V has nearly the variance error Var V.

    `prior` is what other steps say, of concentration 1 / spread - 1 where they say anything.
    """
    visits = 1.0 / sampling.ravel()
    spreads, errors = spread.ravel(), error.ravel()
    rows = len(row_starts) - 1
    which = np.full(rows, -1)
    known = 0
    for i in range(rows):
        if visits[i] >= LEAST_VISITS and row_starts[i + 1] - row_starts[i] > 1:
            which[i] = known
            known += 1
    likely = np.zeros((known, len(CONCENTRATIONS)))
    for i in range(rows):
        if which[i] >= 0:
            width = row_starts[i + 1] - row_starts[i]
            counts = visits[i] * raw[row_starts[i] : row_starts[i + 1]]
            log_likelihoods(counts, np.full(width, 1.0 / width), CONCENTRATIONS, likely[which[i]])
    law = learn_law(likely, _LAW)
    for i in range(rows):
        others = 1.0 / spreads[i] - 1.0 if spreads[i] < LARGEST_SPREAD else 0.0
        towards, errors[i] = shrinkage(likely[which[i]] if which[i] >= 0 else law, others, visits[i])
        for t in range(row_starts[i], row_starts[i + 1]):
            probabilities[t] = raw[t] + towards * (prior[t] - raw[t])


@compiled
def count_rewards(
    raw: FloatArray,
    sampling: FloatArray,
    differences: FloatArray,
    rewards: FloatArray,
    variances: FloatArray,
    error: FloatArray,
) -> None:
    """Write every reward's posterior mean p and its variance, `error` p (1 - p)."""
    visits, paid = (1.0 / sampling).ravel(), raw.ravel()
    means, spreads, errors = rewards.ravel(), variances.ravel(), error.ravel()
    seen, total = 1.0, 0.5
    for i in range(len(paid)):
        if visits[i] >= 1.0:
            seen += 1.0
            total += paid[i]
    usual = total / seen
    likely, here = np.zeros((2, len(CONCENTRATIONS)))
    for i in range(len(paid)):
        if visits[i] >= LEAST_VISITS:
            counts = visits[i] * np.array([paid[i], 1.0 - paid[i]])
            log_likelihoods(counts, np.array([usual, 1.0 - usual]), CONCENTRATIONS, here)
            likely += here
    law = np.exp(likely - likely.max())
    law /= law.sum()
    priors, prior_variances = np.empty_like(raw), np.empty_like(raw)
    prior_rewards(raw, sampling, np.zeros_like(raw), differences, usual, priors, prior_variances)
    prior, prior_variance = priors.ravel(), prior_variances.ravel()
    for i in range(len(paid)):
        chance = max(prior[i] * (1.0 - prior[i]), LEAST_CHANCE)
        others = max(0.0, chance / prior_variance[i] - 1.0) if prior_variance[i] < REWARD_VARIANCE else 0.0
        towards, errors[i] = shrinkage(law, others, visits[i])
        means[i] = paid[i] + towards * (prior[i] - paid[i])
        spreads[i] = errors[i] * means[i] * (1.0 - means[i])
