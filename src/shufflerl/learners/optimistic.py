"""Optimism on all that the releases tell: batches as long as what they try is known, mixtures where nothing is noisy.

After every release the posterior of all rows is made anew (`estimation/posterior.py`), and the next batch plays the
policy that is best if every row is as good as it may be worth finding out.

How optimistic? A rival that seems worse by z of its standard errors s costs n s z if a batch of n users tries it. With
R users still to come it gains R s psi(z) on average, psi(z) = phi(z) - z Phi(-z) the mean of what a standard normal
has above z. So it is worth a try up to the z where psi(z) / z = n / R: far when the batch is small and much is left,
not at all in the last batch, which commits by itself.

So it pays to try in small batches, and to play for long only what is known well: a policy gets as many users as add a
quarter to the visits of one of its decisions, but no fewer than it takes to be heard over the noise. An action that
was unlucky once is tried again in a short batch, and the more boldly the less it was seen and the more have played
since.

Without noise the counts of different policies do not disturb each other. Then a batch is a mixture: policies are
planned one after the other, each as if those before it had been played already.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.checks import FloatArray
from shufflerl.counts import CountQuery, Release
from shufflerl.estimation.posterior import Posterior
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture, PolicyArray, Problem
from shufflerl.seeding import Seed

#: How many deviations of a counter's noise the smallest batch has in users.
_DEVIATIONS = 8.0
#: Batches that run short grow by this much each, so that the last is reached.
_GROWTH = 1.5
#: The most policies in a batch without noise, beside the best so far.
_MIXED = 8


class Optimistic(Learner):
    """Optimism in at most 89 batches; everything follows from the noise and the size of the problem.

    Two numbers are for networks, where every batch costs its messages and is to mix some least number of users:
    `batches` is how many there are at most, `first` how many users the first batch has. That one is asked to learn how
    strong the noise is, by which all others are sized. No other batch has fewer users either; only if there are fewer
    in all is the one batch smaller.
    """

    name: ClassVar[str] = "optimistic"

    def __init__(self, problem: Problem, seed: Seed, batches: int = 89, first: int = 1) -> None:
        self.batches = checks.whole("batches", batches, least=1, most=1000)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, batches=self.batches, first=self.first)
        self.query = CountQuery.everything(problem)
        self.noise: float | None = None  # standard deviation of a counter, once a release has told it
        self.posterior = Posterior(problem, self.batches)

    @property
    def most_batches(self) -> int:
        """As many as allowed."""
        return self.batches

    @property
    def _smallest(self) -> float:
        """Users that a try takes to be heard over the noise."""
        return max(float(self.first), _DEVIATIONS * (self.noise or 0.0))

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        left, more = self.episodes_left, self.batches - self.batches_observed
        if self.noise == 0:
            growth = growth_to(self.problem.episodes / self._smallest, self.batches)
            users = self._rounded(max(self._smallest, share_of(left, growth, more)))
            return users, self._mixed(users), self.query
        least = self._rounded(max(self._smallest, share_of(left, _GROWTH, more)))
        policy, users, _ = self._policy(least, left - least, np.zeros_like(self.posterior.visits))
        return self._rounded(min(max(users, least), left)), Mixture.single(policy), self.query

    def _rounded(self, users: float) -> int:
        """A whole number of users, all that are left if no batch could follow."""
        whole = round(users)
        return whole if self.episodes_left - whole >= self._smallest else self.episodes_left

    def _mixed(self, users: int) -> Mixture:
        """Policies planned one after the other, each as if those before it had been played, and the best so far."""
        promised = np.zeros_like(self.posterior.visits)
        left, policies, given = users, [], []
        while left:
            last = len(policies) == _MIXED
            policy, enough, reached = self._policy(self._smallest, 0 if last else self.episodes_left - users, promised)
            policies.append(policy)
            given.append(left if last else min(round(enough), left))
            left -= given[-1]
            promised += (np.arange(promised.shape[-1]) == policy[..., None]) * (given[-1] * reached)[..., None]
        distinct, which = np.unique(np.array(policies), axis=0, return_inverse=True)
        return Mixture(distinct, np.bincount(which.ravel(), given) / users)

    def _policy(self, smallest: float, after: int, promised: FloatArray) -> tuple[PolicyArray, float, FloatArray]:
        """The optimistic policy, how many users it is worth, and how likely they are to reach each (h, x)."""
        from shufflerl.kernels.optimism import optimistic_policy, users_worth

        posterior, problem = self.posterior, self.problem
        shape = (problem.horizon, problem.n_states)
        policy: PolicyArray = np.empty(shape, dtype=np.int32)
        rows = problem.layout.row_starts, problem.layout.successors, posterior.probabilities
        optimistic_policy(
            *rows,
            posterior.prior,
            posterior.spread,
            posterior.sampling,
            posterior.noise,
            posterior.rewards,
            posterior.reward_variances,
            posterior.reward_differences,
            posterior.visits,
            promised,
            float(smallest),
            float(after),
            float(self.episodes_played),
            posterior.alike,
            self.rng.random(posterior.visits.shape),
            policy,
        )
        reached = np.empty(shape)
        start = np.full(problem.n_states, 1.0 / problem.n_states) if problem.start is None else problem.start
        visits = posterior.visits + promised
        users = users_worth(*rows, start, visits, policy, self._smallest, reached)
        return policy, users, reached

    def _learn(self, release: Release) -> None:
        self.posterior.add(release)
        if self.noise is None:
            self.noise = release.noise.sd

    def _memory(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {"noise": self.noise}, self.posterior.memory()

    def _recall(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.posterior.recall(arrays)
        self.noise = values["noise"]


def share_of(left: int, growth: float, batches: int) -> float:
    """The first of so many batches that grow geometrically and add up to the users left."""
    return left / batches if growth == 1 else left * (growth - 1) / (growth**batches - 1)


def growth_to(total: float, count: int) -> float:
    """The g >= 1 at which 1 + g + ... + g^(count-1) is the total."""
    low, high = 1.0, max(2.0, total)
    while high - low > 1e-12 * high:
        g = (low + high) / 2
        low, high = (g, high) if count * math.log(g) < math.log1p(total * (g - 1)) else (low, g)
    return low
