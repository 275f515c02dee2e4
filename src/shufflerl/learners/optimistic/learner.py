"""Optimism on all that the releases tell, and second looks at what bad luck may have dismissed.

After every release the posterior of all rows is made anew (`posterior`), and the next batch is planned
on it (`looks`): a mixture of a few policies.

Most users play what is best if every row is as good as it may be worth finding out. How optimistic is that?
A rival that seems worse by z of its standard errors s costs n s z if n users try it. With R users still to come it
gains R s psi(z) on average, psi(z) = phi(z) - z Phi(-z) the mean of what a standard normal has above z. So it is worth
a try up to the z where psi(z) / z = n / R: far when few try and much is left, not at all in the last batch, which
commits by itself.

Some users look back, at times two in five: they play the best policy but for one step, or but for the way to one row,
where they try what gains most by the same reckoning with just as many users as it takes. An action that was unlucky
once is tried again that way; without looks some runs never recover.

A batch asks for no more counters than are worth their noise (`asking`).
"""

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
from shufflerl.learners.optimistic.posterior import Posterior
from shufflerl.mdp import Mixture, Problem
from shufflerl.seeding import Seed

#: How many deviations of a counter's noise the second batch has in users: the most, and the least where the most would
#: leave room for fewer than so many batches. The smallest try has this part of it.
_DEVIATIONS, _LEAST, _ROOM, _TRY = 9.0, 8.0, 20.0, 8.0 / 9.0
#: The interval shown around the estimated value is so many standard errors to either side.
_SHOWN = 2.0
#: Users of the first batch unless more are asked for, and the fewest of others and of tries; the same without noise.
_FIRST, _FEWEST = 4, 2


class Optimistic(Learner):
    """Optimism in at most 79 batches, 40 with noise, sized by the noise and the problem; its constants were tuned.

    Two numbers are for networks, where every batch costs its messages and is to mix some least number of users:
    `batches` is how many there are at most after the first, or twice as many if there is no noise, `first` how many
    users the first batch has. That one is asked to learn how strong the noise is, by which all others are sized. Where
    `first` is above its default, no other batch has fewer users either; only if there are fewer in all is the one batch
    smaller.
    """

    name: ClassVar[str] = "optimistic"

    def __init__(self, problem: Problem, seed: Seed, batches: int = 39, first: int = _FIRST) -> None:
        self.batches = checks.whole("batches", batches, least=1, most=1000)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, batches=self.batches, first=self.first)
        self.query = CountQuery.everything(problem)
        users = problem.episodes if problem.episodes < self.first + self._least else self.first
        self.sizes: IntArray = np.array([users], dtype=np.int64)
        self.posterior = Posterior(problem)
        self.noise = 0.0  # its variance on a counter if every counter is asked
        self.noise_each = 0.0  # and how much of that every one more which users touch adds

    @property
    def most_batches(self) -> int:
        """The first, and those after it if there is no noise."""
        return 1 + _unnoisy(self.batches)

    @property
    def _least(self) -> int:
        """The fewest users of any batch, if somebody minds."""
        return self.first if self.first > _FIRST else 0

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        from shufflerl.learners.optimistic.detours import LARGER
        from shufflerl.learners.optimistic.looks import MOST, plan_batch

        users = int(self.sizes[self.batches_observed])
        fewest = _FEWEST if self.batches_observed and self.noise == 0.0 else _FIRST
        posterior, problem = self.posterior, self.problem
        policies: PolicyArray = np.empty((MOST, problem.horizon, problem.n_states), dtype=np.int32)
        shares = np.empty(MOST)
        asked = self.query.asked.copy()
        count = plan_batch(
            posterior.rows,
            posterior.start,
            float(users),
            float(self.episodes_left - users),
            kept_until(LARGER * users, self.sizes[self.batches_observed + 1 :]),
            self.noise,
            self.noise_each,
            max(float(fewest), _TRY * heard(problem.episodes, math.sqrt(self.noise))),
            self.rng.random((MOST, *posterior.visits.shape)),
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
        self.posterior.add(release)
        alone, self.noise = release.variance_range or (release.noise.variance, release.noise.variance)
        self.noise_each = (self.noise - alone) / max(1, self.query.touched_counters - 1)
        assert self._waiting is not None
        left = self.episodes_left - self._waiting.users
        if self.batches_observed == 0 and left:
            self.sizes = np.append(self.sizes, schedule(left, release.noise.sd, self.batches, self._least))

    def view(self) -> View:
        """The estimated value of what is played now, or was last; None where the first state's law is not told."""
        from shufflerl.learners.optimistic.optimism import policy_estimate

        playing, start, posterior = self.playing, self.problem.start, self.posterior
        if playing is None or start is None or self.batches_observed == 0:
            return View()
        value = error = 0.0
        for policy, weight in zip(playing.policies, playing.weights, strict=True):
            mean, variance = policy_estimate(posterior.rows, policy)
            value += weight * float(start @ mean)
            error += weight * _SHOWN * math.sqrt(float(start @ variance))  # as if all erred together
        when = "now" if self.waits else "last"
        meaning = f"of the policies played {when}, give or take {_SHOWN:g} standard errors by the learner's own model"
        return View(Estimate.within(self.problem.horizon, value, value - error, value + error, meaning))

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {
            "sizes": self.sizes.tolist(),
            "noise": self.noise,
            "noise_each": self.noise_each,
        }, self.posterior.memory()

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        posterior = Posterior(self.problem)
        posterior.recall(arrays)
        self.posterior = posterior
        sizes = np.array(values["sizes"], dtype=np.int64)
        planned = sizes.sum() == self.problem.episodes or (posterior.is_new and len(sizes) == 1)
        noises = values["noise"], values["noise_each"]
        if not planned or sizes.min() < 1 or not all(math.isfinite(noise) and noise >= 0 for noise in noises):
            raise StateMismatchError("The saved state has no fitting sizes or noise; use bytes that save() returned.")
        self.sizes = sizes
        self.noise, self.noise_each = noises


def _merged(policies: PolicyArray, weights: FloatArray) -> Mixture:
    """Policies in order, each once with all of its weight: as numpy.unique, which takes longer than all planning."""
    together: dict[bytes, float] = {}
    for policy, weight in zip(policies.astype(">i4"), weights, strict=True):
        together[policy.tobytes()] = together.get(policy.tobytes(), 0.0) + float(weight)
    order = sorted(together)
    distinct = np.frombuffer(b"".join(order), dtype=">i4").reshape(-1, *policies.shape[1:])
    return Mixture(distinct, [together[policy] for policy in order])


def schedule(episodes: int, noise: float, batches: int, least: int = 0) -> IntArray:
    """Sizes of all batches after the first, which add up to the episodes left.

    They grow geometrically from what is `heard` (and 4 users, or 2 without noise), as many as there is room for, up to
    `batches` or without noise twice as many. None has fewer than `least` users, if there are as many: what batches have
    beyond that is scaled to add up.

    >>> schedule(1000, 20.0, 39)
    array([160, 163, 165, 168, 171, 173])
    """
    smallest = max(float(_FIRST if noise else _FEWEST), heard(episodes, noise), float(least))
    count = max(1, min(batches if noise else _unnoisy(batches), int(episodes / smallest)))
    sizes = smallest * _growth(episodes / smallest, count) ** np.arange(count)
    least = least if least * len(sizes) < episodes else 0
    beyond = sizes - least
    scale = (episodes - least * len(sizes)) / max(np.sum(beyond), 1.0)
    ends = np.rint(np.cumsum(beyond) * scale).astype(np.int64)
    ends += least * np.arange(1, len(sizes) + 1)
    ends[-1] = episodes
    in_turn: IntArray = np.diff(ends, prepend=0)
    return in_turn


def heard(episodes: int, noise: float) -> float:
    """How many users are well heard through a counter's noise, of so many in all.

    >>> heard(20_000, 17.0), heard(20_000, 120.0), heard(20_000, 150.0)
    (153.0, 1000.0, 1200.0)
    """
    return min(_DEVIATIONS * noise, max(_LEAST * noise, episodes / _ROOM))


def kept_until(large: float, sizes: IntArray) -> float:
    """The part of all users of later batches that come after the first of at least so `large` a size; 0 without one.

    >>> kept_until(30.0, np.array([20, 30, 40, 60]))
    0.6666666666666666
    """
    ends = np.flatnonzero(sizes >= large)
    return float(sizes[ends[0] + 1 :].sum() / sizes.sum()) if len(ends) else 0.0


def _unnoisy(batches: int) -> int:
    """How many batches there are at most if there is no noise, which every release would add to what it tells."""
    return 2 * batches


def _growth(total: float, count: int) -> float:
    """The g >= 1 at which 1 + g + ... + g^(count-1) is the total."""
    low, high = 1.0, max(2.0, total)
    while high - low > 1e-12 * high:
        g = (low + high) / 2
        low, high = (g, high) if count * math.log(g) < math.log1p(total * (g - 1)) else (low, g)
    return low
