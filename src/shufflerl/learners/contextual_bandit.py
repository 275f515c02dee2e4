"""Contextual bandits by Thompson sampling on noisy counts: for problems whose actions do not steer the state.

What state x and action a earn in a step is taken for

    p[x, a] = scale[a] (1/2 + m + u[x] + v[a] + w[x, a]),

all of them normal, with public scales: so what is learned of a state serves for all actions, and of an action for all
states. How much actions differ, and differ from state to state, is learned from the counts (empirical Bayes).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from shufflerl import checks
from shufflerl.arrays import FloatArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import StateMismatchError
from shufflerl.learners.base import Estimate, Learner, View
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import Noise
from shufflerl.policies import Scores
from shufflerl.seeding import Seed
from shufflerl.steps import StepProblem

#: Deviations of m and u before anything is known; v and w have one of these each, whichever fit best.
_COMMON, _BETWEEN, _OWN = 0.3, (0.02, 0.06, 0.2), (0.01, 0.03, 0.1, 0.3)
#: p(1-p) is never taken for less, as p is only estimated.
_MIN_VARIANCE = 0.05
#: Policies of a batch.
_POLICIES = 32
#: Users of a batch at least, by state and action: in deviations of a counter's noise, and without any. And in parts of
#: those before it.
_DEVIATIONS, _MIN_USERS, _GROWTH = 1.7, 0.25, 0.5
#: The interval shown around the estimated value is so many standard errors to either side.
_SHOWN = 2.0


class Posterior(NamedTuple):
    """What is known of p: of effects m, u and v their mean and the Cholesky factor of their precision; then of w.

    Given those, w has the mean `shrinkage` times what the data have beyond them, and variance[x, a].
    """

    effects: FloatArray
    factor: FloatArray
    data: FloatArray
    shrinkage: FloatArray
    variance: FloatArray
    scale: FloatArray

    def _rewards(self, effects: FloatArray, noise: FloatArray | float) -> FloatArray:
        """p[..., x, a] of effects[..., i], with so many deviations added to w."""
        states = len(self.data)
        level, by_state, by_action = effects[..., :1], effects[..., 1 : states + 1], effects[..., states + 1 :]
        common = self.scale * (level[..., None] + by_state[..., :, None] + by_action[..., None, :])
        return 0.5 * self.scale + common + self.shrinkage * (self.data - common) + np.sqrt(self.variance) * noise

    @property
    def mean(self) -> FloatArray:
        """The mean of p[x, a]."""
        return self._rewards(self.effects, 0.0)

    def sample(self, count: int, rng: np.random.Generator) -> FloatArray:
        """So many draws of p[m, x, a]."""
        drawn = rng.standard_normal((count, len(self.effects)))
        effects = self.effects + solve_triangular(self.factor, drawn.T, lower=True, trans="T").T
        return self._rewards(effects, rng.standard_normal((count, *self.data.shape)))


def posterior(precision: FloatArray, weighted: FloatArray, scale: FloatArray) -> Posterior:
    """That of data with `precision`[x, a], which times the mean of p - scale/2 is `weighted`; the likeliest of all."""
    fits = [fit(precision, weighted, scale, *deviations) for deviations in itertools.product(_BETWEEN, _OWN)]
    return max(fits, key=lambda fit: fit[0])[1]


def fit(
    precision: FloatArray, weighted: FloatArray, scale: FloatArray, between: float, own: float
) -> tuple[float, Posterior]:
    """The log-likelihood of two deviations, of v and of w, and the posterior by them."""
    states, actions = precision.shape
    prior = np.repeat([_COMMON, _COMMON, between], [1, states, actions]) ** -2.0
    apart = (own * scale) ** 2 + np.zeros_like(precision)
    seen = precision > 0
    weights = precision / (1.0 + precision * apart)  # of data around the effects: 1 / (1/precision + apart)
    data = np.divide(weighted, precision, out=np.zeros_like(weighted), where=seen)
    squares, pulls = weights * scale**2, weights * scale * data
    by_state, by_action = squares.sum(axis=1), squares.sum(axis=0)
    matrix = np.diag(prior)
    matrix += np.block(
        [
            [np.array([[squares.sum()]]), by_state[None], by_action[None]],
            [by_state[:, None], np.diag(by_state), squares],
            [by_action[:, None], squares.T, np.diag(by_action)],
        ]
    )
    pull = np.concatenate([[pulls.sum()], pulls.sum(axis=1), pulls.sum(axis=0)])
    factor = cholesky(matrix, lower=True)
    effects = cho_solve((factor, True), pull)
    fit = float(pull @ effects - (weights * data**2).sum() + np.log(prior).sum() - 2 * np.log(np.diag(factor)).sum())
    fit += float(np.log(weights[seen] / precision[seen]).sum())
    weight = precision * apart / (1.0 + precision * apart)
    return fit / 2, Posterior(
        effects=effects,
        factor=factor,
        data=data,
        shrinkage=weight,
        variance=apart * (1.0 - weight),
        scale=scale,
    )


class ContextualBandit(Learner):
    """Thompson sampling on counts of one random step; `first` is the fewest users of a batch.

    Every batch plays scores drawn from the posterior. One of all users who are left has nobody to learn for, and plays
    the posterior's mean.
    """

    name: ClassVar[str] = "contextual-bandit"
    problems = (StepProblem, Problem)
    problem: StepProblem

    def __init__(self, problem: Problem, seed: Seed, first: int = 30) -> None:
        self.first = checks.whole("first", first, least=1)
        super().__init__(StepProblem.of(problem) if isinstance(problem, Problem) else problem, seed, first=self.first)
        shape = (self.problem.n_states, self.problem.n_actions)
        self.precision, self._weighted = np.zeros(shape), np.zeros(shape)
        self._noise = 0.0  # variance of a counter's
        self._earned = (0.0, 0.0)  # in a step of the last batch, and the variance of that
        self._posterior = posterior(self.precision, self._weighted, self.problem.scale)

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """See `Learner`."""
        return {"first": min_users}

    @property
    def query(self) -> CountQuery:
        """The state, action and reward bit of one step."""
        return CountQuery.everything(self.problem)

    @property
    def released(self) -> Mixture:
        """The posterior's mean as a policy: what is best by all that was learned."""
        return Mixture(self._posterior.mean[None], [1.0], self._family)

    @property
    def _family(self) -> Scores:
        return Scores(self.problem.n_states, self.problem.n_actions)

    @property
    def max_batches(self) -> int:
        """As many as there would be without noise."""
        played = batches = 0
        while played < self.problem.episodes:
            played, batches = played + self._users(played, 0.0), batches + 1
        return batches

    def _users(self, played: int, noise: float) -> int:
        """Users of the next batch: too few would be lost in the noise, and too few to be left are taken along."""
        cells, left = self.problem.n_states * self.problem.n_actions, self.problem.episodes - played
        least = math.ceil(max(self.first, cells * max(_MIN_USERS, _DEVIATIONS * math.sqrt(noise)), _GROWTH * played))
        return left if left < 2 * least else least

    def expect(self, noise: Noise) -> None:
        """Size the first batch by that noise."""
        if self.batches_observed == 0 and not self.waits:
            self._noise = noise.variance

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        users = self._users(self.episodes_played, self._noise)
        if users == self.episodes_left and self.batches_observed:
            return users, self.released, self.query
        drawn = self._posterior.sample(_POLICIES, self.rng)
        return users, Mixture(drawn, np.full(_POLICIES, 1 / _POLICIES), self._family), self.query

    def _learn(self, release: Release) -> None:
        """Take in what users of each state and action were paid.

        Of m users y0 were not paid and y1 were, each with noise of variance s^2. With a guess c of p, y1 - c (y0 + y1)
        is m (p - c) with variance m p(1-p) + s^2 (c^2 + (1-c)^2); m itself is known from y0 + y1, which is trusted the
        less the more of it may be noise.
        """
        noise, mean = release.noise.variance, self._posterior.mean
        unpaid, paid = np.moveaxis(release.values.reshape(*mean.shape, 2), -1, 0)
        counted = unpaid + paid
        met = np.where(counted > 0, counted - 2 * noise / np.maximum(counted, 1e-9), 0.0).clip(min=0.0)
        guess = mean.clip(0.0, 1.0)
        bernoulli = np.maximum(guess * (1 - guess), _MIN_VARIANCE)
        variance = met * bernoulli + noise * (guess**2 + (1 - guess) ** 2)
        weight = np.divide(met, variance, out=np.zeros_like(met), where=met > 0)
        self.precision += weight * met
        self._weighted += weight * (paid - guess * counted + met * (guess - 0.5 * self.problem.scale))
        self._posterior = posterior(self.precision, self._weighted, self.problem.scale)
        self._noise, users = noise, release.batch.users
        share = min(1.0, max(0.0, float(paid.sum()) / users))
        self._earned = share, share * (1 - share) / users + paid.size * noise / users**2

    def view(self) -> View:
        """What an episode of the last batch earned."""
        if not self.batches_observed:
            return View()
        share, variance = self._earned
        value, error = share * self.problem.steps, _SHOWN * math.sqrt(variance) * self.problem.steps
        text = f"of the policies played last, give or take {_SHOWN:g} standard errors"
        return View(
            Estimate.within(self.problem.steps, value=value, low=value - error, high=value + error, description=text)
        )

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        values = {"noise": self._noise, "earned": list(self._earned)}
        return values, {"precision": self.precision, "weighted": self._weighted}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        for name, mine in self._state()[1].items():
            saved = arrays.get(name)
            fits = saved is not None and (saved.shape, saved.dtype) == (mine.shape, mine.dtype)
            if saved is None or not fits or not np.isfinite(saved).all() or (name == "precision" and saved.min() < 0):
                raise StateMismatchError(f"The saved state has no fitting {name}; use bytes that save() returned.")
        numbers = [values["noise"], *values["earned"]]
        if len(numbers) != 3 or not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise StateMismatchError("The saved state has no fitting noise; use bytes that save() returned.")
        self.precision, self._weighted = np.array(arrays["precision"]), np.array(arrays["weighted"])
        self._noise, self._earned = float(numbers[0]), (float(numbers[1]), float(numbers[2]))
        self._posterior = posterior(self.precision, self._weighted, self.problem.scale)
