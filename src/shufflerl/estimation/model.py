"""A model of the MDP from all releases so far, with what is uncertain about it.

Releases are pooled with weights: batch b of n users whose counters carry noise of variance s^2 counts
w = m / (m + s^2), with m = n / (X A) the visits a row may expect: a batch that is all noise adds hardly any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import BoolArray, FloatArray
from shufflerl.counts import Release
from shufflerl.estimation.flow import conserve
from shufflerl.mdp import Problem


class Model(NamedTuple):
    """Estimated transitions[h, x, a, x'] and rewards[h, x, a] of the `known` rows; other rows are zero.

    A row estimated from weighted counts has error variance `inverse_ess` (one over its effective sample size) times the
    variance of one user's outcome, plus `noise_variance` times the sum of squares that the privacy noise acts on.
    """

    transitions: FloatArray
    rewards: FloatArray
    known: BoolArray
    inverse_ess: FloatArray
    noise_variance: FloatArray


class Evidence:
    """Weighted sums of releases: what a model is made of. Steps that a release did not ask add nothing."""

    def __init__(self, problem: Problem) -> None:
        shape = (problem.n_states, problem.n_actions)
        self._problem = problem
        self.moves: FloatArray = np.zeros((problem.horizon - 1, *shape, problem.n_states))
        self.pays: FloatArray = np.zeros((problem.horizon, *shape, 2))
        self.visits: FloatArray = np.zeros((problem.horizon, *shape))
        self.squared_visits: FloatArray = np.zeros((problem.horizon, *shape))  # sum of w^2 N
        self.noise_variance: FloatArray = np.zeros(problem.horizon)  # sum of w^2 s^2: of a counter, by step

    def add(self, release: Release) -> None:
        """Take a release in."""
        problem, query, noise_variance = self._problem, release.batch.table_query, release.noise.variance
        complete = query.touched_counters == 2 * problem.horizon - 1
        moves, pays = query.scatter(conserve(release, problem.start).values) if complete else release.tables
        visits = pays.sum(axis=-1)
        crude = [step for step in query.transition_steps if step not in query.reward_steps]
        visits[crude] = moves[crude].sum(axis=-1)
        expected = release.batch.users / (problem.n_states * problem.n_actions)
        weight = expected / (expected + noise_variance)
        self.moves += weight * moves
        self.pays += weight * pays
        self.visits += weight * visits
        self.squared_visits += weight**2 * np.maximum(visits, 0.0)
        asked = sorted({*query.transition_steps, *query.reward_steps})
        self.noise_variance[asked] += weight**2 * noise_variance

    def model(self) -> Model:
        """What the evidence says.

        A row is known once its visits stand out of their noise; cells and rewards below one deviation are taken for
        nothing, which keeps noise from inventing ways to where nobody was.
        """
        deviation = np.sqrt(self.noise_variance)[:, None, None]
        known = self.visits > 0.5 * np.sqrt(self._problem.n_states) * deviation + 2.0
        cells = np.where(self.moves > deviation[:-1, ..., None], self.moves, 0.0)
        total = cells.sum(axis=-1, keepdims=True)
        known[:-1] &= total[..., 0] > 0
        transitions = np.divide(cells, total, out=np.zeros_like(cells), where=known[:-1, ..., None])
        paid = self.pays.sum(axis=-1)
        won = np.where(self.pays[..., 1] > deviation / np.sqrt(2), self.pays[..., 1], 0.0)
        rewards = np.divide(won, paid, out=np.zeros_like(won), where=known & (paid > 1.0))
        visits = np.maximum(self.visits, 1.0)
        return Model(
            transitions=transitions,
            rewards=np.clip(rewards, 0.0, 1.0),
            known=known,
            inverse_ess=np.maximum(self.squared_visits, 1e-9) / visits**2,
            noise_variance=np.broadcast_to(deviation**2, visits.shape) / visits**2,
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """The sums, by name."""
        return {name: value for name, value in vars(self).items() if name != "_problem"}

    def load_state(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Put the sums back."""
        for name in self.state():
            setattr(self, name, arrays[name])
