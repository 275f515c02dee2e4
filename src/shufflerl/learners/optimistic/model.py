"""What all releases together say: sums of them, and the posterior of every row that follows from these."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray
from shufflerl.counts import Release
from shufflerl.errors import StateMismatchError
from shufflerl.estimation.flow import conserve
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.pooling import Releases, Sums, add_releases, pool
from shufflerl.learners.optimistic.posterior import Family, arrange, fit
from shufflerl.learners.optimistic.rows import Rows, similarity
from shufflerl.mdp import Problem

#: Arrays of the state that have an entry for each policy of noisy releases, and those with which a pass begins.
_BY_POLICY = ("release", "policies", "shares")
_BEFORE = ("probabilities", "uncertainty")


class Model:
    """The posterior of all rows, made anew after every release.

    `probabilities` has one number per possible transition, in order of tags, made of the pooled data `raw`; `raw_paid`
    are those of rewards, a pair per row. What is known of transitions (f = 0) and rewards (f = 1): the data's errors
    `inverse_ess` and `noise` (see `pooling`), what these leave open, `chance_error` and `noise_error` (see `Rows`), all
    [f, h, x, a], and between[f, x, a], how much steps differ.
    """

    def __init__(self, problem: Problem) -> None:
        layout, (_, states, actions) = problem.layout, problem.layout.shape
        shape = (problem.horizon, states, actions)
        rows = problem.horizon * states * actions
        self._problem = problem
        self._row_starts = np.append(layout.row_starts, np.full(states * actions, layout.size))  # the last lead nowhere
        self._successors = np.array(layout.successors)
        self._widths = np.diff(self._row_starts)
        self._row = np.repeat(np.arange(rows), self._widths)  # of every cell
        sums = shape, (2, *shape), (2, *shape), (2, *shape), (layout.size,), shape
        self._exact, self._sums = Sums(*map(np.zeros, sums)), Sums(*map(np.zeros, sums))  # without noise; with all
        none: dict[str, Any] = {
            "release": np.zeros(0, dtype=np.int64),
            "policies": np.zeros((0, *shape[:2]), dtype=np.int32),
            "values": np.zeros((0, layout.size + 2 * rows)),
            "counted": np.zeros((0, *shape)),
            "variance": np.zeros((0, *shape)),
            "asked": np.zeros((0, 2, problem.horizon), dtype=np.bool_),
        }
        self._noisy = Releases(users=np.zeros(0), noises=np.zeros(0), shares=np.zeros(0), **none)
        self.raw, self.probabilities = np.zeros((2, layout.size))
        self.raw_paid, self._paid = np.zeros((2, 2 * rows))
        self.inverse_ess, self.noise, self.chance_error, self.noise_error = errors = np.ones((4, 2, *shape))
        self.between: FloatArray = np.zeros((2, states, actions))
        self._uncertainty = np.zeros(shape)
        pairs, by_pair, between = states * actions, errors.reshape(4, 2, shape[0], -1), self.between.reshape(2, -1)
        twos = arrange(np.arange(0, 2 * rows + 1, 2), np.tile(np.arange(2, dtype=np.int32), rows), pairs)
        # By visits alone the steps that pay best, and so are visited most, set the others apart: few visits of these
        # would seem to tell all. Of transitions they do tell much, as most rows lead to few states.
        self._families = [Family(twos, 1.0, self.raw_paid, self._paid, between[1], *by_pair[:, 1])]
        if problem.horizon > 1:
            cells = arrange(layout.row_starts, layout.successors, pairs)
            self._families.append(Family(cells, 0.0, self.raw, self.probabilities, between[0], *by_pair[:, 0, :-1]))
        self._fit()

    @property
    def visits(self) -> FloatArray:
        """How many users were in x at step h and took a."""
        return self._sums.visits

    @property
    def start(self) -> FloatArray:
        """Where users begin: as is told of the problem, or else as they were counted so far."""
        if self._problem.start is not None:
            return np.array(self._problem.start)
        begun = self.visits[0].sum(axis=-1)
        return begun / begun.sum() if begun.any() else np.full(len(begun), 1.0 / len(begun))

    @property
    def rows(self) -> Rows:
        """The posterior, as plans are made on it.

        The precision of a row is that of its own data, and as far as steps are alike that of its posterior, which all
        steps make: the mean of transitions and rewards. Two counters make a reward.
        """
        rewards = self._paid[1::2].reshape(self.visits.shape)
        several = self._problem.horizon > 1  # one step is like no other
        homogeneity = similarity(float(self.between.mean(axis=(1, 2)).max())) if several else 0.0
        own = 1.0 / (C.typical * self.inverse_ess + self.noise * np.array([1.0, 2.0])[:, None, None, None])
        pooled = 1.0 / (C.typical * self.chance_error + self.noise_error) - 1.0 / C.typical
        pooled = own + homogeneity * np.maximum(0.0, pooled - own)
        precision = np.append(pooled[:, :-1].mean(axis=0), pooled[1, -1:], axis=0)
        beside = 0.0 if len(self._noisy.users) else C.beside * self.chance_error[1]
        p = rewards + (0.5 - rewards) * beside / (1.0 + beside)
        return Rows(
            row_starts=self._row_starts,
            successors=self._successors,
            probabilities=self.probabilities,
            chance_error=self.chance_error[0],
            noise_error=self.noise_error[0],
            rewards=rewards.copy(),
            reward_variances=self.chance_error[1] * p * (1.0 - p) + self.noise_error[1],
            precision=precision,
            visits=self.visits,
            between=self.between,
            homogeneity=homogeneity,
        )

    def add(self, release: Release) -> None:
        """Take in the release of a batch, in a few passes over all: the visits need the rows, the rows the visits."""
        conserved, mixture = conserve(release, self._problem.start), release.batch.mixture
        counted = *conserved, release.batch.table_query.asked
        users, noise, policies = [float(release.batch.users)], [float(release.noise.variance)], mixture.policies
        each = users, noise, [0] * len(policies), policies, mixture.weights, *(values[None] for values in counted)
        one = Releases(*map(np.array, each))
        if release.noise.variance == 0.0:
            self._add(one, self._exact)
        else:
            one = one._replace(release=one.release + len(self._noisy.users))
            both: Any = zip(self._noisy, one, strict=True)
            for kept, new in both:
                kept.resize((len(kept) + len(new), *new.shape[1:]), refcheck=False)  # copies take as long as all else
                kept[-len(new) :] = new
        for _ in range(C.passes if len(self._noisy.users) else 1):
            self._fit()

    def _add(self, releases: Releases, sums: Sums) -> None:
        states, stated = self._problem.n_states, self._problem.start
        start = np.full(states, 1.0 / states) if stated is None else np.array(stated)
        rows = self._row_starts, self._successors, self.probabilities, self._uncertainty
        firsts = np.searchsorted(releases.release, np.arange(len(releases.users) + 1))
        add_releases(releases, firsts, start, stated is not None, *rows, sums)

    def _fit(self) -> None:
        self._before = self.probabilities.copy(), self._uncertainty.copy()
        for mine, exact in zip(self._sums, self._exact, strict=True):
            mine[...] = exact
        self._add(self._noisy, self._sums)
        data = self.raw, self.raw_paid, self.inverse_ess, self.noise
        for mine, pooled in zip(data, pool(self._sums, self._row, self._widths), strict=True):
            mine[...] = pooled
        for family in self._families:
            fit(family)
        each = self.probabilities * (1.0 - self.probabilities)
        chance = np.bincount(self._row, each, len(self._widths)) / np.maximum(self._widths, 1)
        # The mean variance of a row's cells.
        self._uncertainty = self.chance_error[0] * chance.reshape(self.visits.shape) + self.noise_error[0]

    def state(self) -> dict[str, NDArray[Any]]:
        """What was taken in, and where the last pass over it began: repeating that pass gives all the rest."""
        exact = {f"exact_{name}": values for name, values in self._exact._asdict().items()}
        noisy = {name: kept.copy() for name, kept in self._noisy._asdict().items()}  # these grow
        return exact | noisy | dict(zip(_BEFORE, self._before, strict=True))

    def load_state(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put what `state` gave into a new model."""
        mine, lengths = self.state(), {name: len(arrays.get(name, ())) for name in ("users", "shares")}
        for name, empty in mine.items():
            saved, shape = arrays.get(name), empty.shape
            if name in Releases._fields:
                shape = (lengths["shares" if name in _BY_POLICY else "users"], *shape[1:])
            signed = name in ("exact_moves", "exact_pays", "values", "counted")
            fits = saved is not None and (saved.shape, saved.dtype) == (shape, empty.dtype)
            if saved is None or not fits or not np.isfinite(saved).all() or (not signed and (saved < 0).any()):
                raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")
        played, numbers = arrays["policies"], arrays["release"]
        in_turn = np.unique(numbers).tolist() == list(range(lengths["users"])) and (np.diff(numbers) >= 0).all()
        if not in_turn or (played >= self._problem.n_actions).any():
            raise StateMismatchError("The saved state has no fitting policies; use bytes that save() returned.")
        for name, values in self._exact._asdict().items():
            values[...] = arrays[f"exact_{name}"]
        self._noisy = Releases(*(np.array(arrays[name]) for name in Releases._fields))
        self.probabilities[:], self._uncertainty = arrays["probabilities"], np.array(arrays["uncertainty"])
        self._fit()
