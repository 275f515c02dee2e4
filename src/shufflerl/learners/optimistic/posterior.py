"""What all releases together say about every row: pooled by inverse variance, shrunk by empirical Bayes.

Three questions, each a model in a sentence and a kernel beside its formula (`shrinkage`):

1. How many users were where? A batch's counted visits are off by noise; its policies and the rows known so far
   predict them too. Both are weighed as in Kalman's filter (`pooling`), which then pools the rows of all
   batches by weights that fall with noise.
2. Is the problem the same at every step? A row at one step is drawn around its mean over the steps, by an unknown
   spread: the data say how likely each spread is, for the transitions and rewards of every state and action, and what
   law these spreads have over the problem (`compare_steps`).
3. What is a row? Its own estimate and, as a prior, what the other steps say, each as far as its error allows
   (`shrink_transitions`, `shrink_rewards`); without noise by a Dirichlet law that is learned (`dirichlet`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import Release
from shufflerl.errors import StateMismatchError
from shufflerl.estimation.flow import Conserved, conserve
from shufflerl.mdp import Problem

if TYPE_CHECKING:
    from shufflerl.learners.optimistic.optimism import Rows

#: What is kept of every noisy batch, and as what; how many rows and cells it has follows from its policies.
_KEPT: dict[str, type] = {
    "users": np.float64,
    "noises": np.float64,
    "mixed": np.int64,
    "policies": np.int32,
    "weights": np.float64,
    "surplus": np.float64,
    "counted": np.float64,
    "counted_variance": np.float64,
    "cells": np.float64,
    "asked": np.bool_,
}

_NEVER_BELOW_ZERO = {"users", "noises", "weights", "counted_variance"}

#: Passes over all batches after each release, if some are noisy: the visits need the rows, the rows need the visits.
_PASSES = 2


class _Column:
    """An array that grows at its end, by doubling its room."""

    def __init__(self, kind: type, shape: tuple[int, ...] = ()) -> None:
        self._room: NDArray[Any] = np.empty((1, *shape), dtype=kind)
        self._length = 0

    @property
    def values(self) -> NDArray[Any]:
        return self._room[: self._length]

    def extend(self, values: NDArray[Any]) -> None:
        """Add values at the end."""
        length = self._length + len(values)
        if length > len(self._room):
            room = np.empty((max(length, 2 * len(self._room)), *self._room.shape[1:]), dtype=self._room.dtype)
            room[: self._length] = self.values
            self._room = room
        self._room[self._length : length] = values
        self._length = length


class Posterior:
    """Estimates of all rows and their errors, made anew after every release.

    `probabilities`, `prior` and `doubt` have one number per possible transition, in order of tags; what has one number
    per row is [h, x, a]: its `rewards` and their `reward_variances`, the errors `sampling` and `noise` of the pooled
    data, the same of rewards, the `spread` of the prior, the `visits` so far. `differences[x, a]` and
    `reward_differences[x, a]` say how much the steps differ: 0 not at all, 2/3 in every way.
    """

    def __init__(self, problem: Problem) -> None:
        _, states, actions = problem.layout.shape
        self._problem = problem
        self._rows = problem.layout.row_starts, problem.layout.successors
        widths = np.diff(problem.layout.row_starts)
        self._widths = np.concatenate([widths, np.zeros(states * actions, dtype=widths.dtype)])  # none after the last
        shape = (problem.horizon, states)
        shapes = {"policies": shape, "asked": (2, problem.horizon)}
        self._kept = {name: _Column(kind, shapes.get(name, ())) for name, kind in _KEPT.items()}
        self._played = _Column(np.int64)  # the rows of all batches, and where those of each begin
        self._first_row, self._first_cell = _Column(np.int64), _Column(np.int64)
        for first in (self._first_row, self._first_cell):
            first.extend(np.zeros(1, dtype=np.int64))
        self._moved: FloatArray = np.zeros(problem.layout.size)  # counts without noise: only their sum matters
        self._paid: FloatArray = np.zeros((*shape, actions, 2))

        rows = (*shape, actions)
        self.visits: FloatArray = np.zeros(rows)
        self.sampling, self.noise = np.full((2, *rows), np.inf)
        self.spread: FloatArray = np.zeros(rows)
        self.rewards, self.reward_variances = np.zeros((2, *rows))
        self.prior: FloatArray = np.repeat(1.0 / widths, widths)
        self.probabilities: FloatArray = self.prior.copy()
        self.differences, self.reward_differences = np.zeros((2, states, actions))
        self.doubt: FloatArray = np.ones_like(self.prior)
        self._raw = np.zeros_like(self.prior)
        self._uncertainty = np.full(rows, 0.05)
        self._error, self._reward_error = np.ones((2, *rows))
        self._raw_rewards, self.reward_sampling, self.reward_noise = np.zeros((3, *rows))
        self._fit()

    @property
    def is_new(self) -> bool:
        """Whether nothing has been taken in."""
        return len(self._kept["users"].values) == 0 and not self._paid.any()

    @property
    def _exact(self) -> bool:
        """Whether there are counts, all of them without noise."""
        return len(self._kept["users"].values) == 0 and bool(self._paid.any())

    @property
    def alike(self) -> float:
        """How alike the steps are: 1 if the same, 0 if they differ by a fifth of what they could, or if one is all."""
        if self._problem.horizon == 1:
            return 0.0
        largest = max(float(self.differences.sum()), float(self.reward_differences.sum())) / self.differences.size
        return 1.0 - min(1.0, 5.0 * largest)

    @property
    def start(self) -> FloatArray:
        """Where users begin: as is told of the problem, or else as they were counted so far."""
        if self._problem.start is not None:
            return self._problem.start
        begun = self.visits[0].sum(axis=-1)
        # Read-only as the problem's, as kernels would be compiled again for a writable one.
        return checks.frozen(begun / begun.sum() if begun.any() else np.full(len(begun), 1.0 / len(begun)))

    @property
    def rows(self) -> Rows:
        """The rows and their errors, as plans are made on them."""
        from shufflerl.learners.optimistic.optimism import Rows
        from shufflerl.learners.optimistic.pooling import TYPICAL
        from shufflerl.learners.optimistic.shrinkage import LARGEST_SPREAD

        alike = self.alike
        told = 1.0 / (TYPICAL * self.reward_sampling + 2.0 * self.reward_noise)  # two counters make a reward
        told[:-1] = (told[:-1] + 1.0 / (TYPICAL * self.sampling[:-1] + self.noise[:-1])) / 2.0
        if self._exact:
            known = 1.0 / self._reward_error - 1.0
            known[:-1] = (known[:-1] + 1.0 / self._error[:-1] - 1.0) / 2.0
            told += alike * (known / TYPICAL - told)
        else:
            told[:-1] += alike * (1.0 / self.spread[:-1] - 1.0 / LARGEST_SPREAD) / TYPICAL
        return Rows(
            *self._rows,
            self.probabilities,
            self.prior,
            self.doubt,
            self.spread,
            self._error if self._exact else self.sampling,
            self.noise,
            self.rewards,
            self.reward_variances,
            self.differences,
            self.reward_differences,
            self.visits,
            told,
            alike,
            self._exact,
        )

    def add(self, release: Release) -> None:
        """Take in the release of a batch."""
        size, conserved = self._problem.layout.size, conserve(release, self._problem.start)
        moved, paid = conserved.values[:size], conserved.values[size:].reshape(self._paid.shape)
        if release.noise.variance == 0.0:
            self._moved += moved
            self._paid += paid
        else:
            self._keep(release, conserved, moved, paid)
        for _ in range(1 if self._exact else _PASSES):
            self._fit()

    def _keep(self, release: Release, conserved: Conserved, moved: FloatArray, paid: FloatArray) -> None:
        """Note what a noisy batch played and what was counted of it."""
        mixture = release.batch.mixture
        played = self._mark_played(mixture.policies)
        batch = {
            "users": np.array([release.batch.users]),
            "noises": np.array([release.noise.variance]),
            "mixed": np.array([len(mixture.policies)]),
            "policies": mixture.policies,
            "weights": mixture.weights,
            "surplus": np.diff(paid.reshape(-1, 2)[played], axis=-1).ravel(),
            "counted": conserved.row_visits.ravel()[played],
            "counted_variance": conserved.row_variance.ravel()[played],
            "cells": moved[np.repeat(played, self._widths)],
            "asked": release.batch.query.asked[None],
        }
        for name, values in batch.items():
            self._kept[name].extend(values)

    def _mark_played(self, policies: NDArray[np.int32]) -> BoolArray:
        """Which rows some policy of a batch plays; notes where the next batch's rows and cells begin."""
        played: BoolArray = (policies[..., None] == np.arange(self._problem.n_actions)).any(axis=0).ravel()
        self._played.extend(np.flatnonzero(played))
        self._first_row.extend(self._first_row.values[-1:] + played.sum())
        self._first_cell.extend(self._first_cell.values[-1:] + self._widths[played].sum())
        return played

    def _fit(self) -> None:
        from shufflerl.learners.optimistic.dirichlet import count_rewards, count_transitions
        from shufflerl.learners.optimistic.pooling import Batches, pool
        from shufflerl.learners.optimistic.shrinkage import compare_steps, shrink_rewards, shrink_transitions

        problem, rows = self._problem, self._rows
        self._before = self.probabilities.copy(), self._uncertainty.copy()
        evenly = checks.frozen(np.full(problem.n_states, 1.0 / problem.n_states))
        start = evenly if problem.start is None else problem.start
        transitions = self._raw, self.sampling, self.noise
        rewards = self._raw_rewards, self.reward_sampling, self.reward_noise
        kept = {name: column.values for name, column in self._kept.items()}
        firsts = {
            "first_policy": np.concatenate([[0], np.cumsum(kept.pop("mixed"))]),
            "first_row": self._first_row.values,
            "rows": self._played.values,
            "first_cell": self._first_cell.values,
        }
        pool(
            Batches(**kept, **firsts),
            self._moved,
            self._paid,
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
            *rows,
            *transitions,
            self.differences,
            self.prior,
            self.spread,
            self.probabilities,
            self._uncertainty,
            self.doubt,
        )
        if self._exact:
            count_transitions(
                rows[0], self._raw, self.sampling, self.prior, self.spread, self.probabilities, self._error
            )
            count_rewards(
                *rewards[:2], self.reward_differences, self.rewards, self.reward_variances, self._reward_error
            )
        else:
            shrink_rewards(*rewards, self.reward_differences, self.rewards, self.reward_variances)

    def memory(self) -> dict[str, NDArray[Any]]:
        """What was taken in, and where the last pass over it began: repeating that pass gives all the rest."""
        kept = {name: column.values for name, column in self._kept.items()}
        counted = {"moved": self._moved, "paid": self._paid}
        return kept | counted | {"probabilities": self._before[0], "uncertainty": self._before[1]}

    def recall(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put what `memory` gave into a new posterior."""
        self._check("mixed", arrays, len(arrays.get("users", ())))
        mixed = arrays["mixed"]
        batches, policies = len(mixed), int(mixed.sum())
        for name in ("users", "noises", "asked"):
            self._check(name, arrays, batches)
        for name in ("policies", "weights"):
            self._check(name, arrays, policies)
        if (mixed < 1).any() or not ((arrays["policies"] >= 0) & (arrays["policies"] < self._problem.n_actions)).all():
            raise StateMismatchError("The saved state has no fitting policies; use bytes that save() returned.")
        for played in np.split(arrays["policies"], np.cumsum(mixed)[:-1]) if batches else ():
            self._mark_played(played)
        for name in ("surplus", "counted", "counted_variance"):
            self._check(name, arrays, int(self._first_row.values[-1]))
        self._check("cells", arrays, int(self._first_cell.values[-1]))
        whole = {
            "moved": self._moved,
            "paid": self._paid,
            "probabilities": self.probabilities,
            "uncertainty": self._uncertainty,
        }
        for name, mine in whole.items():
            saved = arrays.get(name)
            if saved is None or not _numbers(saved, mine.shape, mine.dtype) or (saved < 0).any():
                raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")
            mine[...] = saved
        for name, column in self._kept.items():
            column.extend(arrays[name])
        self._fit()

    def _check(self, name: str, arrays: dict[str, NDArray[Any]], length: int) -> None:
        """Compiled code trusts the shapes of what is kept, and that it is numbers."""
        saved, shape = arrays.get(name), self._kept[name].values.shape[1:]
        numbers = _numbers(saved, (length, *shape), np.dtype(_KEPT[name]))
        if saved is None or not numbers or (name in _NEVER_BELOW_ZERO and (saved < 0).any()):
            raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")


def _numbers(saved: NDArray[Any] | None, shape: tuple[int, ...], kind: np.dtype[Any]) -> bool:
    """Whether an array has that shape and kind, and is finite everywhere."""
    return saved is not None and (saved.shape, saved.dtype) == (shape, kind) and bool(np.isfinite(saved).all())
