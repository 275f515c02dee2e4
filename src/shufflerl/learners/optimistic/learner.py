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
from shufflerl.mdp import Mixture, Problem
from shufflerl.seeding import Seed

#: The interval shown around the estimated value is so many standard errors to either side.
_SHOWN = 2.0


class Optimistic(Learner):
    """Optimism in at most 79 batches, 40 with noise, sized by the noise and the problem; its constants were tuned.

    Two numbers are for networks, where every batch costs its messages and is to mix some least number of users:
    `batches` is how many there are at most after the first, or twice as many if there is no noise, `first` how many
    users the first batch has. That one is asked to learn how strong the noise is, by which all others are sized. Above
    its default, `first` is also the minimum of later batches; only if there are fewer users in all is the one batch
    smaller.
    """

    name: ClassVar[str] = "optimistic"

    def __init__(self, problem: Problem, seed: Seed, batches: int = 39, first: int = C.first) -> None:
        self.batches = checks.whole("batches", batches, least=1, most=1000)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, batches=self.batches, first=self.first)
        self.query = CountQuery.everything(problem)
        users = problem.episodes if problem.episodes < self.first + self._least else self.first
        self.sizes: IntArray = np.array([users], dtype=np.int64)
        self.model = Model(problem)
        self.noise = 0.0  # its variance on a counter if every counter is asked
        self.variances: FloatArray = np.zeros(1)  # the same if users touch one counter, two, up to all

    @property
    def most_batches(self) -> int:
        """The first, and those after it if there is no noise."""
        return 1 + 2 * self.batches

    @property
    def _least(self) -> int:
        """The fewest users of any batch, if somebody minds."""
        return self.first if self.first > C.first else 0

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        from shufflerl.learners.optimistic.planner import plan_batch

        users = int(self.sizes[self.batches_observed])
        model, problem = self.model, self.problem
        policies: PolicyArray = np.empty((C.policies, problem.horizon, problem.n_states), dtype=np.int32)
        shares = np.empty(C.policies)
        asked = self.query.asked.copy()
        count = plan_batch(
            model.rows,
            model.start,
            float(users),
            float(self.episodes_left - users),
            self.noise,
            self.variances,
            smallest_try(math.sqrt(self.noise)),
            self.rng.random((C.policies, *model.visits.shape)),
            policies,
            shares,
            asked,
        )
        asked[1, 0] |= problem.start is None  # nothing else tells where users begin
        query = self.query
        if asked.sum() < query.touched_counters:
            query = CountQuery(problem, np.flatnonzero(asked[0]).tolist(), np.flatnonzero(asked[1]).tolist())
        return users, _merged(policies[:count], shares[:count] / users), query

    def _learn(self, release: Release) -> None:
        self.model.add(release)
        self.variances = np.array(release.variance_range or (release.noise.variance,))
        self.noise = float(self.variances[-1])
        assert self._waiting is not None
        left = self.episodes_left - self._waiting.users
        if self.batches_observed == 0 and left:
            self.sizes = np.append(self.sizes, schedule(left, release.noise.sd, self.batches, self._least))

    def view(self) -> View:
        """The estimated value of what is played now, or was last; None where the first state's law is not told."""
        from shufflerl.learners.optimistic.planner import policy_estimate

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
        meaning = f"of the policies played {when}, give or take {_SHOWN:g} standard errors by the learner's own model"
        return View(
            Estimate.within(self.problem.horizon, value=value, low=value - error, high=value + error, meaning=meaning)
        )

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        values = {"sizes": self.sizes.tolist(), "noise": self.noise, "variances": self.variances.tolist()}
        return values, self.model.state()

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        model = Model(self.problem)
        model.load_state(arrays)
        sizes = np.array(values["sizes"], dtype=np.int64)
        planned = sizes.sum() == self.problem.episodes or (model.is_new and len(sizes) == 1)
        variances = np.array(values["variances"], dtype=np.float64)
        noises = [values["noise"], *variances]
        if not planned or sizes.min() < 1 or not all(math.isfinite(noise) and noise >= 0 for noise in noises):
            raise StateMismatchError("The saved state has no fitting sizes or noise; use bytes that save() returned.")
        self.model, self.sizes = model, sizes
        self.noise, self.variances = values["noise"], variances


def _merged(policies: PolicyArray, weights: FloatArray) -> Mixture:
    """Policies in order, each once with all of its weight: as numpy.unique, which takes longer than all planning."""
    together: dict[bytes, float] = {}
    for policy, weight in zip(policies.astype(">i4"), weights, strict=True):
        together[policy.tobytes()] = together.get(policy.tobytes(), 0.0) + float(weight)
    order = sorted(together)
    distinct = np.frombuffer(b"".join(order), dtype=">i4").reshape(-1, *policies.shape[1:])
    return Mixture(distinct, [together[policy] for policy in order])


def smallest_try(noise: float) -> float:
    """How many users stand out of a counter's noise of that deviation; a few if there is none.

    >>> smallest_try(20.0), smallest_try(0.0)
    (180.0, 2.0)
    """
    return max(float(C.first if noise else C.fewest), C.deviations * noise)


def schedule(episodes: int, noise: float, batches: int, least: int = 0) -> IntArray:
    """Sizes of all batches after the first, which add up to the episodes left.

    They grow geometrically from the smallest try, as many as there is room for, up to `batches` or without noise twice
    as many. None has fewer than `least` users, if there are as many: what batches have beyond that is scaled to add up.

    >>> schedule(1000, 20.0, 39)
    array([180, 189, 200, 210, 221])
    """
    smallest = max(smallest_try(noise), float(least))
    count = max(1, min(batches if noise else 2 * batches, int(episodes / smallest)))
    sizes = smallest * _growth(episodes / smallest, count) ** np.arange(count)
    least = least if least * len(sizes) < episodes else 0
    beyond = sizes - least
    scale = (episodes - least * len(sizes)) / max(np.sum(beyond), 1.0)
    ends = np.rint(np.cumsum(beyond) * scale).astype(np.int64)
    ends += least * np.arange(1, len(sizes) + 1)
    ends[-1] = episodes
    in_turn: IntArray = np.diff(ends, prepend=0)
    return in_turn


def _growth(total: float, count: int) -> float:
    """The g >= 1 at which 1 + g + ... + g^(count-1) is the total."""
    low, high = 1.0, max(2.0, total)
    while high - low > 1e-12 * high:
        g = (low + high) / 2
        low, high = (g, high) if count * math.log(g) < math.log1p(total * (g - 1)) else (low, g)
    return low
