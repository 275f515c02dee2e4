"""What all releases together say about every row: pooled by inverse variance, shrunk by empirical Bayes.

Three questions, each a model in a sentence and a kernel beside its formula (`kernels/posterior.py`):

1. How many users were where? A batch's counted visits are off by noise; its policy and the rows known so far predict
   them too. Both are weighed as in Kalman's filter (`pool`), which then pools the rows of all batches by weights that
   fall with noise.
2. Is the problem the same at every step? A row at one step is drawn around its mean over the steps, by an unknown
   spread: the data say how likely each spread is, for the transitions and rewards of every state and action, and what
   law these spreads have over the problem (`compare_steps`).
3. What is a row? Its own estimate and, as a prior, what the other steps say, each as far as its error allows
   (`shrink_transitions`, `shrink_rewards`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.checks import FloatArray, IntArray
from shufflerl.counts import Release
from shufflerl.errors import StateMismatchError
from shufflerl.estimation.flow import conserve
from shufflerl.mdp import Problem

_OF_BATCHES = ("users", "noises", "policies", "cells", "surplus", "counted", "counted_variance")

_Seven = tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]
Rows = tuple[IntArray, NDArray[np.int32], *_Seven]

#: Passes over all batches after each release: the visits need the rows, the rows need the visits.
_PASSES = 2


class Posterior:
    """Estimates of all rows and their errors, made anew after every release.

    Of releases of single policies. `probabilities` and `prior` have one number per possible transition, in order of
    tags; what has one number per row is [h, x, a]: its `rewards` and their `reward_variances`, the errors `sampling`
    and `noise` of the pooled data, the `spread` of the prior, the `visits` so far. `differences[x, a]` and
    `reward_differences[x, a]` say how much the steps differ: 0 not at all, 2/3 in every way.
    """

    def __init__(self, problem: Problem, most_batches: int) -> None:
        layers, states, actions = problem.layout.shape
        self._problem = problem
        self._rows = problem.layout.row_starts, problem.layout.successors
        widths = np.diff(problem.layout.row_starts).reshape(layers, states, actions)
        self._widths = widths
        shape = (problem.horizon, states)
        self._batches = 0
        # Of each batch; pages of memory are taken as they are filled.
        self._users, self._noises = np.empty((2, most_batches))
        self._policies: NDArray[np.int32] = np.empty((most_batches, *shape), dtype=np.int32)
        self._cells: FloatArray = np.empty((most_batches, int(widths.max(axis=-1).sum()) if layers else 0))
        self._surplus, self._counted, self._counted_variance = np.empty((3, most_batches, *shape))

        rows = (*shape, actions)
        self.visits: FloatArray = np.zeros(rows)
        self.sampling, self.noise = np.full((2, *rows), np.inf)
        self.spread: FloatArray = np.zeros(rows)
        self.rewards, self.reward_variances = np.zeros((2, *rows))
        self.prior: FloatArray = np.repeat(1.0 / widths.ravel(), widths.ravel())
        self.probabilities: FloatArray = self.prior.copy()
        self.differences, self.reward_differences = np.zeros((2, states, actions))
        self._raw = np.zeros_like(self.prior)
        self._uncertainty = np.full(rows, 0.05)
        self._raw_rewards, self._reward_sampling, self._reward_noise = np.zeros((3, *rows))
        self._fit()

    @property
    def alike(self) -> float:
        """How alike the steps are: 1 if the same, 0 if they differ by a fifth of what they could or more."""
        largest = max(float(self.differences.sum()), float(self.reward_differences.sum())) / self.differences.size
        return 1.0 - min(1.0, 5.0 * largest)

    @property
    def rows(self) -> Rows:
        """The rows and their errors, in the order in which plans are made on them."""
        transitions = *self._rows, self.probabilities, self.prior, self.spread, self.sampling, self.noise
        return *transitions, self.rewards, self.reward_variances

    def add(self, release: Release) -> None:
        """Take in the full release of a batch that played a single policy."""
        problem, batch, b = self._problem, release.batch, self._batches
        (policy,) = batch.mixture.policies
        conserved = conserve(release, problem.start)
        moved, paid = conserved.values[: problem.layout.size], conserved.values[problem.layout.size :]
        played = np.arange(problem.n_actions) == policy[..., None]
        self._users[b], self._noises[b] = batch.users, release.noise.variance
        self._policies[b] = policy
        cells = moved[np.repeat(played[:-1].ravel(), self._widths.ravel())]
        self._cells[b, : len(cells)] = cells
        self._surplus[b] = np.diff(paid.reshape(-1, 2)[played.ravel()], axis=-1).reshape(policy.shape)
        self._counted[b], self._counted_variance[b] = conserved.visits, conserved.variance
        self._batches += 1
        for _ in range(_PASSES):
            self._fit()

    def _fit(self) -> None:
        from shufflerl.kernels.posterior import compare_steps, pool, shrink_rewards, shrink_transitions

        problem, rows = self._problem, self._rows
        self._before = self.probabilities.copy(), self._uncertainty.copy()
        start = np.full(problem.n_states, 1.0 / problem.n_states) if problem.start is None else problem.start
        transitions = self._raw, self.sampling, self.noise
        rewards = self._raw_rewards, self._reward_sampling, self._reward_noise
        pool(
            self._batches,
            self._users,
            self._noises,
            self._policies,
            self._cells,
            self._surplus,
            self._counted,
            self._counted_variance,
            start,
            problem.start is not None,
            *rows,
            self.probabilities,
            self._uncertainty,
            *transitions,
            *rewards,
            self.visits,
        )
        compare_steps(*rows, *transitions, *rewards, self.differences, self.reward_differences)
        shrink_transitions(
            *rows, *transitions, self.differences, self.prior, self.spread, self.probabilities, self._uncertainty
        )
        shrink_rewards(*rewards, self.reward_differences, self.rewards, self.reward_variances)

    def memory(self) -> dict[str, NDArray[Any]]:
        """The batches taken in, and where the last pass over them began: repeating that pass gives all the rest."""
        taken = {name: getattr(self, f"_{name}")[: self._batches] for name in _OF_BATCHES}
        return taken | {"probabilities": self._before[0], "uncertainty": self._before[1]}

    def recall(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `memory` gave."""
        batches = len(arrays.get("users", ()))
        room = {name: getattr(self, f"_{name}")[:batches] for name in _OF_BATCHES}
        room |= {"probabilities": self.probabilities, "uncertainty": self._uncertainty}
        for name, mine in room.items():  # compiled code trusts their shapes
            saved = arrays.get(name)
            if saved is None or (saved.shape, saved.dtype) != (mine.shape, mine.dtype):
                raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")
        for name, mine in room.items():
            mine[...] = arrays[name]
        self._batches = batches
        self._fit()
