"""How concentrated rows are around a prior: a Dirichlet law whose concentration s the rows tell together.

Every row's counts say how likely each s of a grid is, and all rows together what law s has over the problem
(empirical Bayes, by EM).
"""

from __future__ import annotations

import math

from shufflerl.arrays import FloatArray
from shufflerl.compiling import compiled

#: A row that fewer have visited says nothing about s.
LEAST_VISITS = 2.0
_EM_STEPS = 20


@compiled
def log_likelihoods(counts: FloatArray, prior: FloatArray, concentrations: FloatArray, out: FloatArray) -> None:
    """Write how likely such counts of a row are by each concentration, but for a factor that is the same for all."""
    total = counts.sum()
    for g in range(len(concentrations)):
        s = concentrations[g]
        out[g] = math.lgamma(s) - math.lgamma(total + s)
        for j in range(len(counts)):
            if counts[j] > 0.0:
                out[g] += math.lgamma(counts[j] + s * prior[j]) - math.lgamma(s * prior[j])


@compiled
def learn_law(likelihoods: FloatArray, before: FloatArray) -> FloatArray:
    """The law of s over all rows, given `likelihoods[i, g]` of row i, which become what is likely of its s.

    `before` any data it is such a law, of the weight of one row.
    """
    rows, grid = likelihoods.shape
    law = before.copy()
    for i in range(rows):
        top = likelihoods[i].max()
        for g in range(grid):
            likelihoods[i, g] = math.exp(likelihoods[i, g] - top)
    for _ in range(_EM_STEPS):
        seen = before.copy()
        for i in range(rows):
            total = 0.0
            for g in range(grid):
                total += law[g] * likelihoods[i, g]
            for g in range(grid):
                seen[g] += law[g] * likelihoods[i, g] / total
        law = seen / (1.0 + rows)
    for i in range(rows):
        total = 0.0
        for g in range(grid):
            likelihoods[i, g] *= law[g]
            total += likelihoods[i, g]
        for g in range(grid):
            likelihoods[i, g] /= total
    return law
