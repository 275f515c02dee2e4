"""From pooled rows to a posterior of every row, by shrinkage that is learned from the data (empirical Bayes).

One model for transitions and rewards, with noise and without. The row of (x, a) at a step is drawn around its mean over
the steps by a Dirichlet law of concentration c, and that mean around the uniform row by one of concentration s. A cell
of such a row varies by b t around a mean with b = p(1-p), t = 1 / (1 + c). Data of error A p(1-p) + B then have error
b (A (1 - t) + B / b) on average, so that the posterior mean gives them the weight

    k = t / (t + A (1 - t) + B / b) = 1 / (1 + A c + B (1 + c) / b):

n / (n + c) for n exact visits, as a Dirichlet law has it, and the normal law's weight where noise is all. What stays
open is k times the error of the data, k A p(1-p) + k B; with exact counts 1 / (n + c + 1) of p(1-p).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.learners.optimistic.constants import CONSTANTS as C


class Cells(NamedTuple):
    """Where the cells of a family's rows are.

    Row h pairs + q, of the pair q = (x, a) at step h, has the cells from `row_starts` on. The cells of a pair that lead
    to one state, each at its step, are one outcome: those of pair q are numbered from pair_starts[q] on, cell t is of
    outcome outcomes[t], and outcome o has the `members` from member_starts[o] on, step after step.
    """

    row_starts: IntArray
    pair_starts: IntArray
    outcomes: IntArray
    member_starts: IntArray
    members: IntArray
    steps: IntArray


def arrange(row_starts: IntArray, successors: NDArray[np.int32], pairs: int) -> Cells:
    """The cells of rows that lead to `successors`."""
    row = np.repeat(np.arange(len(row_starts) - 1), np.diff(row_starts))
    states = successors.max(initial=0) + 1
    leads, outcomes = np.unique(row % pairs * states + successors, return_inverse=True)
    pair_starts = np.searchsorted(leads, np.arange(pairs + 1) * states)
    members = np.argsort(outcomes, kind="stable")
    member_starts = np.searchsorted(outcomes[members], np.arange(len(leads) + 1))
    return Cells(np.array(row_starts), pair_starts, outcomes, member_starts, members, row // pairs)


class Family(NamedTuple):
    """The rows of one family, transitions or rewards: pooled data, and what `fit` writes.

    `raw` cells become `probabilities`, between[q] becomes t. Of rows [h, q] there are the data's errors,
    `inverse_ess` A and `noise` B, and what they leave open (see `Rows`). Before t is known, steps are taken to be
    `apart` by so much.
    """

    cells: Cells
    apart: float
    raw: FloatArray
    probabilities: FloatArray
    between: FloatArray
    inverse_ess: FloatArray
    noise: FloatArray
    chance_error: FloatArray
    noise_error: FloatArray


@compiled
def fit(family: Family) -> None:
    """Write the posterior of every row: how much steps differ, how concentrated rows are, then each row."""
    pairs = family.inverse_ess.shape[1]
    law = np.empty((pairs, len(C.concentrations)))
    row_law = np.empty((pairs, C.row_concentrations))
    for q in range(pairs):
        _compare_steps(family, q, law[q])
    learn_law(law)
    for q in range(pairs):
        family.between[q] = 0.0
        for g in range(len(C.concentrations)):
            family.between[q] += law[q, g] / (1.0 + C.concentrations[g])
        _compare_to_uniform(family, q, row_law[q])
    learn_law(row_law)
    for q in range(pairs):
        _shrink(family, q, row_law[q])


@compiled
def learn_law(likelihoods: FloatArray) -> None:
    """Turn log-likelihoods[i, g] of row i at a concentration g into its posterior, by a law of g that all rows share.

    That law is learned by EM, from the even one on, which keeps the weight of one row.
    """
    rows, grid = likelihoods.shape
    law, seen = np.full(grid, 1.0 / grid), np.empty(grid)
    for i in range(rows):
        top = -np.inf
        for g in range(grid):
            top = max(top, likelihoods[i, g])
        for g in range(grid):
            likelihoods[i, g] = math.exp(likelihoods[i, g] - top)
    for step in range(C.em_steps + 1):
        seen[:] = 1.0 / grid
        for i in range(rows):
            total = 0.0
            for g in range(grid):
                total += law[g] * likelihoods[i, g]
            for g in range(grid):
                share = law[g] * likelihoods[i, g] / total
                seen[g] += share
                if step == C.em_steps:
                    likelihoods[i, g] = share
        for g in range(grid):
            law[g] = seen[g] / (1.0 + rows)


@compiled
def _average(family: Family, q: int, chance: float, t: float) -> tuple[FloatArray, float, float]:
    """The mean of a row over its steps with weights w = 1 / (A + B / chance + t), and its A and B.

    These are sum w^2 (A + t) and sum w^2 B.
    """
    cells, first = family.cells, family.cells.pair_starts[q]
    weights, mean = np.empty(len(family.noise)), np.empty(cells.pair_starts[q + 1] - first)
    total = by_chance = by_noise = 0.0
    for h in range(len(weights)):
        w = 1.0 / (family.inverse_ess[h, q] + family.noise[h, q] / chance + t)
        weights[h] = w
        total += w
        by_chance += w * w * (family.inverse_ess[h, q] + t)
        by_noise += w * w * family.noise[h, q]
    for j in range(len(mean)):
        top = bottom = 0.0
        for cell in cells.members[cells.member_starts[first + j] : cells.member_starts[first + j + 1]]:
            top += weights[cells.steps[cell]] * family.raw[cell]
            bottom += weights[cells.steps[cell]]
        mean[j] = top / bottom
    return mean, by_chance / total**2, by_noise / total**2


@compiled
def _compare_steps(family: Family, q: int, likelihoods: FloatArray) -> None:
    """Write the log-likelihood of each concentration c of a row's steps around their mean.

    Every cell is normal, of variance A p(1-p) + B + t p(1-p) around a mean that is integrated out, with p the pooled
    mean and p(1-p) at its least value or more; of D cells D - 1 are free.
    """
    cells = family.cells
    mean, _, _ = _average(family, q, C.typical, family.apart)
    width = len(mean)
    for g in range(len(likelihoods)):
        total = 0.0
        for j in range(width):
            o = cells.pair_starts[q] + j
            p = min(1.0, max(0.0, mean[j]))
            chance = max(p * (1.0 - p), C.min_chance)
            difference = chance / (1.0 + C.concentrations[g])
            zeroth = first = second = logs = 0.0
            product = 1.0  # one logarithm for many factors, each well within 1e-100 to 1e100
            for cell in cells.members[cells.member_starts[o] : cells.member_starts[o + 1]]:
                h = cells.steps[cell]
                apart = family.raw[cell] - mean[j]
                w = 1.0 / (family.inverse_ess[h, q] * chance + family.noise[h, q] + difference + C.min_variance)
                zeroth += w
                first += w * apart
                second += w * apart * apart
                product *= w
                if product < 1e-200 or product > 1e200:
                    logs += math.log(product)
                    product = 1.0
            logs += math.log(product / zeroth)
            total += 0.5 * (logs - second + first * first / zeroth)
        likelihoods[g] = total * (width - 1.0) / width


@compiled
def _average_steps(family: Family, q: int) -> tuple[FloatArray, float, float, float]:
    """The mean over the steps, b, the mean p(1-p) of its cells, and A and B of it."""
    chance = C.typical
    for _ in range(2):
        mean, by_chance, by_noise = _average(family, q, chance, family.between[q])
        chance = 0.0
        for p in project(mean):
            chance += p * (1.0 - p) / len(mean)
        chance = max(chance, C.min_chance)
    return mean, chance, by_chance, by_noise


@compiled
def _compare_to_uniform(family: Family, q: int, likelihoods: FloatArray) -> None:
    """Write the log-likelihood of each concentration of a row's mean over the steps around the uniform row.

    A cell of it is normal around 1/D, of variance b (1 + A s) / (1 + s) + B with b = (1 - 1/D) / D.
    """
    mean, _, by_chance, by_noise = _average_steps(family, q)
    width, apart = len(mean), 0.0
    for p in mean:
        apart += (p - 1.0 / width) ** 2 / width
    for g in range(len(likelihoods)):
        c = C.concentrations[g]
        v = (1.0 - 1.0 / width) / width * (1.0 + by_chance * c) / (1.0 + c) + by_noise
        likelihoods[g] = -0.5 * (width - 1.0) * (math.log(v) + apart / v) if width > 1 else 0.0


@compiled
def _shrink(family: Family, q: int, law: FloatArray) -> None:
    """Write the posterior of a row at every step: its own data and its mean over the steps, drawn to the uniform row.

    The mean's own error is left open too, as far as a step leans on it.
    """
    cells = family.cells
    horizon, pairs = family.inverse_ess.shape
    mean, chance, by_chance, by_noise = _average_steps(family, q)
    usual = max((1.0 - 1.0 / len(mean)) / len(mean), C.min_chance)
    trust = shared = 0.0
    for g in range(len(law)):
        c = C.concentrations[g]
        k = 1.0 / (1.0 + by_chance * c + by_noise * (1.0 + c) / usual)
        trust += law[g] * k
        shared += law[g] * k * by_chance / (1.0 + k * by_chance)
    c = 1.0 / family.between[q] - 1.0
    for h in range(horizon):
        inverse_ess, noise = family.inverse_ess[h, q], family.noise[h, q]
        k = 1.0 / (1.0 + inverse_ess * c + noise * (1.0 + c) / chance)
        leans = (1.0 - k) ** 2
        family.chance_error[h, q] = k * inverse_ess / (1.0 + k * inverse_ess) + leans * shared
        family.noise_error[h, q] = k * noise + leans * trust * by_noise
        first, last = cells.row_starts[h * pairs + q], cells.row_starts[h * pairs + q + 1]
        near = project(mean[cells.outcomes[first:last] - cells.pair_starts[q]])
        own = project(family.raw[first:last])
        for j in range(last - first):
            prior = trust * near[j] + (1.0 - trust) / (last - first)
            family.probabilities[first + j] = (1.0 - k) * prior + k * own[j]


@compiled
def project(values: FloatArray) -> FloatArray:
    """The point of the simplex nearest to the values: all less some shift, but for those that fall below 0.

    Who are these? Those below the shift that makes the others sum to 1, found in a few passes and without sorting
    (Michelot 1986): a cell that is below one such shift is below all that follow.
    """
    shift = -1.0
    for value in values:
        shift += value
    shift /= len(values)
    kept, before = len(values), len(values) + 1
    while kept < before:
        before, kept, total = kept, 0, 0.0
        for value in values:
            if value > shift:
                kept += 1
                total += value
        if kept > 0:
            shift = (total - 1.0) / kept
    return np.maximum(0.0, values - shift)
