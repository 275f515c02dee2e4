"""The learner: it sizes batches, has them planned and takes their releases in."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import StateMismatchError
from shufflerl.learners.base import Estimate, Learner, View
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.model import Model
from shufflerl.learners.optimistic.planner import Outlook, plan_batch, policy_estimate
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import Noise
from shufflerl.seeding import Seed

#: The interval shown around the estimated value is so many standard errors to either side.
_SHOWN = 2.0


class Optimistic(Learner):
    """Optimism in few batches, sized by their number, the noise and the users in all; its constants were tuned.

    `batches` is how many there are at most, unless told otherwise 40, or 80 without noise: the fewer, the larger the
    first of them. `first` is for networks, where a batch is to mix some least number of users: above its default it is
    the minimum of every batch, unless there are fewer users in all. Who is not told of the noise before (`expect`) asks
    so many first to learn of it.
    """

    name: ClassVar[str] = "optimistic"
    problem: Problem

    def __init__(self, problem: Problem, seed: Seed, batches: int | None = None, first: int = C.first) -> None:
        self.batches = None if batches is None else checks.whole("batches", batches, least=1, most=1000)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, batches=self.batches, first=self.first)
        self.query = CountQuery.everything(problem)
        alone = self.batches == 1 or problem.episodes < self.first + self._least
        self.sizes: IntArray = np.array([problem.episodes if alone else self.first], dtype=np.int64)
        self.model = Model(problem)
        self.noise_variance = 0.0  # its variance on a counter if every counter is asked
        self.variances: FloatArray = np.zeros(1)  # the same if users touch one counter, two, up to all

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """See `Learner`."""
        return {"first": min_users} if users is None else {"first": min_users, "batches": 10}

    @property
    def max_batches(self) -> int:
        """As many as were asked for, or else those without noise."""
        return self.batches or C.exact_batches

    @property
    def _least(self) -> int:
        """The fewest users of any batch, if somebody minds."""
        return self.first if self.first > C.first else 0

    def expect(self, noise: Noise) -> None:
        """Size all batches by that noise, before the first of them."""
        if self.batches_observed == 0 and not self.waits:
            self.noise_variance = noise.variance
            self.sizes = self._sizes(self.problem.episodes, noise, 0)

    def _sizes(self, episodes: int, noise: Noise, played: int) -> IntArray:
        batches = self.batches or (C.batches if noise.variance else C.exact_batches)
        return schedule(episodes, noise.sd, batches - played, self._least)

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        users = int(self.sizes[self.batches_observed])
        model, problem, query = self.model, self.problem, self.query
        following = float(self.sizes[self.batches_observed + 1 :][:1].sum())
        left, smallest = float(self.episodes_left - users), smallest_try(math.sqrt(self.noise_variance))
        terms = Outlook(float(users), left, self.noise_variance, smallest, following)
        # Few batches stand for the 40 that there are unless told otherwise: each of 10 for 4.
        parts = max(1.0, C.batches / self.batches) if self.batches and self.noise_variance else 1.0
        ties = self.rng.random((C.policies + round((parts - 1.0) * C.probes), *model.visits.shape))
        policies, shares, asked = plan_batch(model.rows, model.start, terms, self.variances, ties)
        asked[1, 0] |= problem.start is None  # nothing else tells where users begin
        if asked.sum() < query.touched_counters:
            query = CountQuery(problem, np.flatnonzero(asked[0]).tolist(), np.flatnonzero(asked[1]).tolist())
        return users, _merged(policies, shares / users), query

    def _learn(self, release: Release) -> None:
        self.model.add(release)
        self.variances = np.array(release.variance_range or (release.noise.variance,))
        self.noise_variance = float(self.variances[-1])
        assert self._waiting is not None
        left = self.episodes_left - self._waiting.users
        if self.sizes.sum() < self.problem.episodes:
            self.sizes = np.append(self.sizes, self._sizes(left, release.noise, 1))

    def view(self) -> View:
        """The estimated value of what is played now, or was last; None where the first state's law is not told."""
        playing, start = self.playing, self.problem.start
        if playing is None or start is None or self.batches_observed == 0:
            return View()
        rows = self.model.rows
        value = error = 0.0
        for policy, weight in zip(playing.policies.copy(), playing.weights, strict=True):
            mean, variance = policy_estimate(rows, policy)
            value += weight * float(start @ mean)
            error += weight * _SHOWN * math.sqrt(float(start @ variance))  # as if all erred together
        when = "now" if self.waits else "last"
        text = f"of the policies played {when}, give or take {_SHOWN:g} standard errors by the learner's own model"
        return View(
            Estimate.within(self.problem.horizon, value=value, low=value - error, high=value + error, description=text)
        )

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        values = {"sizes": self.sizes.tolist(), "noise": self.noise_variance, "variances": self.variances.tolist()}
        return values, self.model.state()

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        model = Model(self.problem)
        model.load_state(arrays)
        sizes = np.array(values["sizes"], dtype=np.int64)
        planned = sizes.sum() == self.problem.episodes or (len(sizes) == 1 and not model.visits.any())
        variances = np.array(values["variances"], dtype=np.float64)
        each = [values["noise"], *variances]
        if not planned or sizes.min() < 1 or not all(math.isfinite(noise) and noise >= 0 for noise in each):
            raise StateMismatchError("The saved state has no fitting sizes or noise; use bytes that save() returned.")
        self.model, self.sizes = model, sizes
        self.noise_variance, self.variances = values["noise"], variances


def _merged(policies: PolicyArray, weights: FloatArray) -> Mixture:
    """Policies in order, each once with all of its weight: as numpy.unique, which takes longer than all planning."""
    together: dict[bytes, float] = {}
    for policy, weight in zip(policies.astype(">i4"), weights, strict=True):
        together[policy.tobytes()] = together.get(policy.tobytes(), 0.0) + float(weight)
    order = sorted(together)
    distinct = np.frombuffer(b"".join(order), dtype=">i4").reshape(-1, *policies.shape[1:])
    return Mixture(distinct, [together[policy] for policy in order])


def smallest_try(noise_sd: float) -> float:
    """How many users stand out of a counter's noise of that deviation; a few if there is none.

    >>> smallest_try(20.0), smallest_try(0.0)
    (120.0, 2.0)
    """
    return max(float(C.first if noise_sd else C.fewest), C.deviations * noise_sd)


def schedule(episodes: int, noise_sd: float, batches: int, least: int = 0) -> IntArray:
    """Sizes of batches, at most so many and none of fewer than `least` users, which add up to the episodes.

    They grow from the smallest try, slowly at first: the logarithm of a size grows with the power 1.25 of its place.
    Where batches are few, so that each is many times the one before, the first is as many tries as it takes to be worth
    that, and with fewer than 13 the power is up to 2.2: the first mistakes are then made by fewer users.

    >>> schedule(1000, 20.0, 40)
    array([120, 121, 122, 124, 125, 128, 129, 131])
    """
    smallest = max(smallest_try(noise_sd), float(least))
    smallest *= max(1.0, C.opening * math.log(max(1.0, episodes / smallest)) / batches)
    count = max(1, min(batches, int(episodes / smallest)))
    places = (np.arange(count) / max(1, count - 1)) ** max(C.growth, 2.5 - batches / 10)
    low, high = 0.0, math.log(max(1.0, episodes / smallest))
    while high - low > 1e-12 * high:
        growth = (low + high) / 2
        low, high = (growth, high) if smallest * np.exp(growth * places).sum() < episodes else (low, growth)
    ends = np.floor(np.cumsum(smallest * np.exp(low * places)) + 0.5).astype(np.int64)
    ends[-1] = episodes
    sizes: IntArray = np.diff(ends, prepend=0)
    return sizes
