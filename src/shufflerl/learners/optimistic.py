"""Optimism on all that the releases tell: one policy per batch, short second looks between long batches.

After every release the posterior of all rows is made anew (`estimation/posterior.py`), and the next batch plays the
policy that is best if every row is as good as it may be worth finding out.

How optimistic? A rival that seems worse by z of its standard errors s costs n s z if a batch of n users tries it. With
R users still to come it gains R s psi(z) on average, psi(z) = phi(z) - z Phi(-z) the mean of what a standard normal
has above z. So it is worth a try up to the z where psi(z) / z = n / R: far when the batch is small and much is left,
not at all in the last batch, which commits by itself.

So it pays to look back in small batches. An action that was unlucky once is tried again in one of the `looks`, short
batches between the long ones, where a try is cheap: without them some runs never recover.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.checks import FloatArray, IntArray
from shufflerl.counts import CountQuery, Release
from shufflerl.estimation.posterior import Posterior
from shufflerl.learners.base import Estimate, Learner, View
from shufflerl.mdp import Mixture, PolicyArray, Problem
from shufflerl.seeding import Seed

#: Bonuses are this much of a standard error times z. Less than one, since values add up over a path of rows that are
#: all taken at their best, which no run of luck would do.
OPTIMISM = 0.5
#: More in looks, which are to find what was dismissed wrongly, and the more the larger the batches have grown: so many
#: users will then suffer from it. From the first, by this much for every tenfold, up to the last.
_IN_FIRST_LOOKS, _TENFOLD, _IN_LAST_LOOKS = 0.8, 0.2, 1.2
#: How many deviations of a counter's noise the first long batch has in users.
_DEVIATIONS = 8.0
#: A look follows every second long batch of at least this many times the first, and has this share of its users.
_LONG, _LOOK = 8.0, 0.1
#: The interval shown around the estimated value is so many standard errors to either side.
_SHOWN = 2.0
#: Users of the first batch, and of the first long one without noise, unless more are asked for.
_FIRST = 4


class Optimistic(Learner):
    """Optimism in at most 89 batches; everything follows from the noise and the size of the problem.

    Two numbers are for networks, where every batch costs its messages and is to mix some least number of users:
    `batches` is how many long ones there are at most, `first` how many users the first batch has. That one is asked
    to learn how strong the noise is, by which all others are sized. Where `first` is above its default, no other batch
    has fewer users either; only if there are fewer in all is the one batch smaller.
    """

    name: ClassVar[str] = "optimistic"

    def __init__(self, problem: Problem, seed: Seed, batches: int = 59, first: int = _FIRST) -> None:
        self.batches = checks.whole("batches", batches, least=1, most=1000)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, batches=self.batches, first=self.first)
        self.query = CountQuery.everything(problem)
        users = problem.episodes if problem.episodes < self.first + self._least else self.first
        self.sizes: IntArray = np.array([users], dtype=np.int64)
        self.optimism: FloatArray = np.array([OPTIMISM])  # of each batch
        self.posterior = Posterior(problem, self.most_batches)

    @property
    def most_batches(self) -> int:
        """The first, the long ones, and a look after every second of these."""
        return 1 + self.batches + self.batches // 2

    @property
    def _least(self) -> int:
        """The fewest users of any batch, if somebody minds."""
        return self.first if self.first > _FIRST else 0

    def _plan(self) -> tuple[int, Mixture, CountQuery]:
        from shufflerl.kernels.optimism import optimistic_policy, worth_trying

        users = int(self.sizes[self.batches_observed])
        optimism = self.optimism[self.batches_observed]
        posterior, problem = self.posterior, self.problem
        policy: PolicyArray = np.empty((problem.horizon, problem.n_states), dtype=np.int32)
        optimistic_policy(
            *posterior.rows,
            posterior.reward_differences,
            posterior.visits,
            optimism * worth_trying(float(users), float(self.episodes_left - users)),
            float(users),
            posterior.alike,
            self.rng.random(posterior.visits.shape),
            policy,
        )
        return users, Mixture.single(policy), self.query

    def _learn(self, release: Release) -> None:
        self.posterior.add(release)
        assert self._waiting is not None
        left = self.episodes_left - self._waiting.users
        if self.batches_observed == 0 and left:
            sizes, optimism = schedule(left, release.noise.sd, self.batches, self._least)
            self.sizes, self.optimism = np.append(self.sizes, sizes), np.append(self.optimism, optimism)

    def view(self) -> View:
        """The estimated value of the policy played now, or last; None where the first state's law is not told."""
        from shufflerl.kernels.optimism import policy_estimate

        playing, start, posterior = self.playing, self.problem.start, self.posterior
        if playing is None or start is None or self.batches_observed == 0:
            return View()
        (policy,) = playing.policies
        mean, variance = policy_estimate(*posterior.rows, posterior.alike, policy)
        value, error = float(start @ mean), _SHOWN * math.sqrt(float(start @ variance))
        when = "now" if self.waits else "last"
        meaning = f"of the policy played {when}, give or take {_SHOWN:g} standard errors by the learner's own model"
        return View(Estimate.within(self.problem.horizon, value, value - error, value + error, meaning))

    def _memory(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        return {"sizes": self.sizes.tolist(), "optimism": self.optimism.tolist()}, self.posterior.memory()

    def _recall(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.posterior.recall(arrays)
        self.sizes = np.array(values["sizes"], dtype=np.int64)
        self.optimism = np.array(values["optimism"])


def schedule(episodes: int, noise: float, batches: int, least: int = 0) -> tuple[IntArray, FloatArray]:
    """Sizes of all batches after the first, which add up to the episodes left, and how optimistic each is.

    Long batches grow geometrically from 8 deviations of the noise (and 4 users), as many as there is room for; after
    every second of those with 8 times as many users comes a look with a tenth of its users. None has fewer than
    `least` users, if there are as many: what batches have beyond that is scaled to add up.

    >>> schedule(1000, 20.0, 59)[0]
    array([160, 163, 165, 168, 171, 173])
    """
    smallest = max(float(_FIRST), _DEVIATIONS * noise, float(least))
    count = max(1, min(batches, int(episodes / smallest)))
    sizes: list[float] = []
    optimism: list[float] = []
    for i, users in enumerate(smallest * _growth(episodes / smallest, count) ** np.arange(count)):
        sizes.append(users)
        optimism.append(OPTIMISM)
        grown = users / smallest / _LONG
        if i % 2 == 0 and grown >= 1 and i < count - 2:
            sizes.append(max(_LOOK * users, float(least)))
            optimism.append(min(_IN_LAST_LOOKS, _IN_FIRST_LOOKS + _TENFOLD * math.log10(grown)))
    least = least if least * len(sizes) < episodes else 0
    beyond = np.array(sizes) - least
    scale = (episodes - least * len(sizes)) / max(np.sum(beyond), 1.0)
    ends = np.rint(np.cumsum(beyond) * scale).astype(np.int64)
    ends += least * np.arange(1, len(sizes) + 1)
    ends[-1] = episodes
    return np.diff(ends, prepend=0), np.array(optimism)


def _growth(total: float, count: int) -> float:
    """The g >= 1 at which 1 + g + ... + g^(count-1) is the total."""
    low, high = 1.0, max(2.0, total)
    while high - low > 1e-12 * high:
        g = (low + high) / 2
        low, high = (g, high) if count * math.log(g) < math.log1p(total * (g - 1)) else (low, g)
    return low
