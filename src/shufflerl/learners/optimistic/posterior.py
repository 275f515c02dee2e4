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


class Family(NamedTuple):
    """The rows of one family, transitions or rewards: pooled data, and what `fit` writes.

    Flat cells are `raw` and become `probabilities`; [h, x, a] are `sampling` A and `noise` B, and what they leave open
    (see `Rows`); between[x, a] becomes t.
    """

    row_starts: IntArray
    successors: NDArray[np.int32]
    raw: FloatArray
    sampling: FloatArray
    noise: FloatArray
    probabilities: FloatArray
    chance_error: FloatArray
    noise_error: FloatArray
    between: FloatArray


class Scratch(NamedTuple):
    """Room for the row of one (x, a): its next states, weighted sums, mean over the steps, its cells at every step."""

    nexts: IntArray
    place: IntArray
    top: FloatArray
    bottom: FloatArray
    mean: FloatArray
    nearest: FloatArray
    apart: FloatArray
    steps: IntArray


@compiled
def fit(family: Family) -> None:
    """Write the posterior of every row: how much steps differ, how concentrated rows are, then each row."""
    horizon, states, actions = family.sampling.shape
    grid, some = len(C.concentrations), C.row_concentrations
    size = 1
    for y in family.successors:
        size = max(size, y + 1)
    numbers, cells = np.empty((2, size), dtype=np.int64), np.empty((4, size))
    numbers[1] = -1
    scratch = Scratch(
        numbers[0],
        numbers[1],
        cells[0],
        cells[1],
        cells[2],
        cells[3],
        np.empty((size, horizon)),
        np.empty((size, horizon + 1), dtype=np.int64),
    )
    law = np.zeros((states * actions, grid))
    row_law = np.zeros((states * actions, some))
    for x in range(states):
        for a in range(actions):
            _compare_steps(family, x, a, scratch, law[x * actions + a])
    learn_law(law)
    for x in range(states):
        for a in range(actions):
            family.between[x, a] = 0.0
            for g in range(grid):
                family.between[x, a] += law[x * actions + a, g] / (1.0 + C.concentrations[g])
            _compare_to_uniform(family, x, a, scratch, row_law[x * actions + a])
    learn_law(row_law)
    for x in range(states):
        for a in range(actions):
            _shrink(family, x, a, scratch, row_law[x * actions + a])


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
def _sum_steps(family: Family, x: int, a: int, chance: float, t: float, s: Scratch) -> tuple[int, float, float]:
    """Sum the row's steps with weights w = 1 / (A + B / chance + t), by next state, into `top` and `bottom`.

    Returns how many next states there are, and A and B of the steps' mean: sum w^2 (A + t) and sum w^2 B.
    """
    horizon, states, actions = family.sampling.shape
    width = 0
    weights = by_chance = by_noise = 0.0
    for h in range(horizon):
        i = (h * states + x) * actions + a
        w = 1.0 / (family.sampling[h, x, a] + family.noise[h, x, a] / chance + t)
        weights += w
        by_chance += w * w * (family.sampling[h, x, a] + t)
        by_noise += w * w * family.noise[h, x, a]
        for cell in range(family.row_starts[i], family.row_starts[i + 1]):
            y = family.successors[cell]
            if s.place[y] < 0:
                s.place[y] = width
                s.nexts[width] = y
                s.top[width] = s.bottom[width] = 0.0
                width += 1
            s.top[s.place[y]] += w * family.raw[cell]
            s.bottom[s.place[y]] += w
    for j in range(width):
        s.place[s.nexts[j]] = -1
    return width, by_chance / weights**2, by_noise / weights**2


@compiled
def _compare_steps(family: Family, x: int, a: int, s: Scratch, likelihoods: FloatArray) -> None:
    """Write the log-likelihood of each concentration c of a row's steps around their mean.

    Every cell is normal, of variance A p(1-p) + B + t p(1-p) around a mean that is integrated out, with p the pooled
    mean and p(1-p) at its least value or more; of D cells D - 1 are free.
    """
    horizon, states, actions = family.sampling.shape
    width, _, _ = _sum_steps(family, x, a, C.typical, 0.0, s)
    for j in range(width):
        s.place[s.nexts[j]] = j
        s.steps[j, horizon] = 0
    for h in range(horizon):
        i = (h * states + x) * actions + a
        for cell in range(family.row_starts[i], family.row_starts[i + 1]):
            j = s.place[family.successors[cell]]
            k = s.steps[j, horizon]
            s.apart[j, k] = family.raw[cell] - s.top[j] / s.bottom[j]
            s.steps[j, k] = h
            s.steps[j, horizon] = k + 1
    for g in range(len(likelihoods)):
        total = 0.0
        for j in range(width):
            p = min(1.0, max(0.0, s.top[j] / s.bottom[j]))
            chance = max(p * (1.0 - p), C.least_chance)
            difference = max(p * (1.0 - p), C.least_difference) / (1.0 + C.concentrations[g])
            zeroth = first = second = logs = 0.0
            product = 1.0  # one logarithm for many factors, each well within 1e-100 to 1e100
            for k in range(s.steps[j, horizon]):
                h = s.steps[j, k]
                w = 1.0 / (family.sampling[h, x, a] * chance + family.noise[h, x, a] + difference + C.least_variance)
                zeroth += w
                first += w * s.apart[j, k]
                second += w * s.apart[j, k] * s.apart[j, k]
                product *= w
                if product < 1e-200 or product > 1e200:
                    logs += math.log(product)
                    product = 1.0
            logs += math.log(product / zeroth)
            total += 0.5 * (logs - second + first * first / zeroth)
        likelihoods[g] = total * (width - 1.0) / width
    for j in range(width):
        s.place[s.nexts[j]] = -1


@compiled
def _average_steps(family: Family, x: int, a: int, s: Scratch) -> tuple[float, int, float, float]:
    """Write the mean over the steps; returns b, the mean p(1-p) of its cells, their number, and A and B of it."""
    t = family.between[x, a]
    chance = C.typical
    for _ in range(2):
        width, by_chance, by_noise = _sum_steps(family, x, a, chance, t, s)
        for j in range(width):
            s.mean[j] = s.top[j] / s.bottom[j]
        project(s.mean, width, s.nearest)
        chance = 0.0
        for j in range(width):
            chance += s.nearest[j] * (1.0 - s.nearest[j]) / width
        chance = max(chance, C.least_chance)
    return chance, width, by_chance, by_noise


@compiled
def _compare_to_uniform(family: Family, x: int, a: int, s: Scratch, likelihoods: FloatArray) -> None:
    """Write the log-likelihood of each concentration of a row's mean over the steps around the uniform row.

    A cell of it is normal around 1/D, of variance b (1 + A s) / (1 + s) + B with b = (1 - 1/D) / D.
    """
    _, width, by_chance, by_noise = _average_steps(family, x, a, s)
    apart = 0.0
    for j in range(width):
        apart += (s.mean[j] - 1.0 / width) ** 2 / width
    for g in range(len(likelihoods)):
        c = C.concentrations[g]
        v = (1.0 - 1.0 / width) / width * (1.0 + by_chance * c) / (1.0 + c) + by_noise
        likelihoods[g] = -0.5 * (width - 1.0) * (math.log(v) + apart / v) if width > 1 else 0.0


@compiled
def _shrink(family: Family, x: int, a: int, s: Scratch, law: FloatArray) -> None:
    """Write the posterior of a row at every step: its own data and its mean over the steps, drawn to the uniform row.

    The mean's own error is left open too, as far as a step leans on it.
    """
    horizon, states, actions = family.sampling.shape
    chance, width, by_chance, by_noise = _average_steps(family, x, a, s)
    usual = max((1.0 - 1.0 / width) / width, C.least_chance)
    trust = shared = 0.0
    for g in range(len(law)):
        c = C.concentrations[g]
        k = 1.0 / (1.0 + by_chance * c + by_noise * (1.0 + c) / usual)
        trust += law[g] * k
        shared += law[g] * k * by_chance / (1.0 + k * by_chance)
    for j in range(width):
        s.place[s.nexts[j]] = j
    c = 1.0 / family.between[x, a] - 1.0
    for h in range(horizon):
        sampling, noise = family.sampling[h, x, a], family.noise[h, x, a]
        k = 1.0 / (1.0 + sampling * c + noise * (1.0 + c) / chance)
        leans = (1.0 - k) ** 2
        family.chance_error[h, x, a] = k * sampling / (1.0 + k * sampling) + leans * shared
        family.noise_error[h, x, a] = k * noise + leans * trust * by_noise
        i = (h * states + x) * actions + a
        first = family.row_starts[i]
        size = family.row_starts[i + 1] - first
        for j in range(size):
            s.bottom[j] = s.mean[s.place[family.successors[first + j]]]
        project(s.bottom, size, s.nearest)
        for j in range(size):
            s.bottom[j] = family.raw[first + j]
        project(s.bottom, size, s.top)
        for j in range(size):
            prior = trust * s.nearest[j] + (1.0 - trust) / size
            family.probabilities[first + j] = k * s.top[j] + (1.0 - k) * prior
    for j in range(width):
        s.place[s.nexts[j]] = -1


@compiled
def project(values: FloatArray, size: int, out: FloatArray) -> None:
    """Write the point of the simplex nearest to the first values: all less some shift, but for those that fall below 0.

    Who are these? Those below the shift that makes the others sum to 1, found in a few passes and without sorting
    (Michelot 1986): a cell that is below one such shift is below all that follow.
    """
    kept = size
    before = kept + 1
    shift = -1.0
    for j in range(size):
        shift += values[j]
    shift /= kept
    while kept < before:
        before, kept, total = kept, 0, 0.0
        for j in range(size):
            if values[j] > shift:
                kept += 1
                total += values[j]
        if kept > 0:
            shift = (total - 1.0) / kept
    for j in range(size):
        out[j] = max(0.0, values[j] - shift)
