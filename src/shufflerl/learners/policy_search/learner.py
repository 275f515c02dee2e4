"""The learner: every batch compares policies drawn around the mean, and the mean follows those that return most.

A user plays one of the batch's policies and is counted for it and for its return, rounded to one of a few points of a
window. So a replaced user changes two counters whatever the policies are, and noise does not grow with parameters,
horizon or observations. What noise does ask for is users: a batch has as many as let policies be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import checks
from shufflerl.arrays import FloatArray
from shufflerl.counts import Release
from shufflerl.learners.base import Estimate, Learner, View
from shufflerl.learners.policy_search.cma import CMAES
from shufflerl.mdp import Mixture, Problem
from shufflerl.policies import Network
from shufflerl.returns import ReturnProblem, ReturnQuery
from shufflerl.seeding import Seed


@dataclass(frozen=True)
class Constants:
    """One set for all problems, chosen on seeds from 1000 on (research/policy-search.md says what each is worth)."""

    arms: int = 12  # policies drawn around the mean in every batch
    points: int = 4  # of the window; more tell where returns are, and cost hardly any noise
    fine_points: int = 64  # where there is no noise
    variance: float = 0.05  # of an arm's estimate, in widths of the window: what the smallest batches are sized for
    certain: float = 0.5  # reliability of the arms' differences that later batches are sized for
    uncertain: float = 0.2  # below it a batch's arms are not followed
    growth: float = 1.2  # of batches at most, and of the step while there is nothing to follow
    farthest: float = 100.0  # step at which a search that found nothing begins anew
    top: float = 0.08  # share of returns at the highest point that the window keeps to,
    bottom: float = 0.04  # and at the lowest
    pace: float = 2.0  # of the window's ends, in widths for each share too many
    narrowest: float = 0.0025  # of the range of returns: the least window
    memory: float = 0.2  # weight of a batch in running estimates and in the averaged policy
    reserve: float = 0.1  # of all users, for a check of what was found and to play it
    ending: float = 0.05  # of the users left: a search that needs more in one batch ends


C = Constants()


@dataclass
class _Progress:
    """Plain numbers of a search, which a saved state holds as they are."""

    phase: str = "range"  # range -> search -> check -> commit
    low: float = 0.0  # of the window of returns
    high: float = 1.0
    noise: float | None = None  # variance on each counter
    users: float = 0.0  # of the next batch
    base: float = 0.0  # users that noise asks for at least
    value: float | None = None  # running return
    error: float = 0.0  # of one batch's return
    lowest: float = math.inf  # running return so far
    risen: bool = False  # whether returns have left it
    signal: float | None = None  # running variance of the arms' true returns
    reliability: float | None = None
    spread: list[float] = field(default_factory=list)  # arms' estimated returns, in order


class PolicySearch(Learner):
    """CMA-ES on noisy returns.

    `family` is "linear" or "mlp", with one hidden layer of `hidden` units. `first` is how many users the first batch
    has, and the fewest that any later one has: the noise is not known before. On a problem of states and actions it
    searches tables that do the same at every step: one logit for each state and action, or a network of the state.
    """

    name: ClassVar[str] = "policy-search"
    problems: ClassVar[tuple[type[Problem] | type[ReturnProblem], ...]] = (Problem, ReturnProblem)

    def __init__(
        self, problem: Problem | ReturnProblem, seed: Seed, *, family: str = "linear", hidden: int = 16, first: int = 24
    ) -> None:
        chosen = checks.choice("family", family, ("linear", "mlp"))
        units = checks.whole("hidden", hidden, least=1)
        self.first = checks.whole("first", first, least=1)
        super().__init__(problem, seed, family=chosen, hidden=units, first=self.first)
        layers = (units,) if chosen == "mlp" else ()
        if isinstance(problem, Problem):
            self.low: float = 0.0
            self.high: float = float(problem.horizon)
            self.network = Network(problem.n_states, max(2, problem.n_actions), layers)
        else:
            self.low = -math.inf if problem.low is None else problem.low
            self.high = math.inf if problem.high is None else problem.high
            self.network = Network(problem.inputs, problem.actions, layers, problem.head)
        self.search = CMAES(self.network.size, C.arms)
        self.progress = _Progress(users=float(self.first))
        self.draws = np.zeros((C.arms, self.network.size))
        self.average = np.zeros(self.network.size)
        self.candidates = np.zeros((1, self.network.size))
        if math.isfinite(self.low):
            self._begin(self.low, self.high)

    @property
    def most_batches(self) -> int:
        """Each has at least `first` users, but for the last."""
        return math.ceil(self.problem.episodes / self.first) + 1

    @property
    def widest_query(self) -> ReturnQuery:
        """All queries change two counters, whatever their size."""
        return ReturnQuery(C.arms, (0.0, 1.0))

    # What to ask.

    def _plan(self) -> tuple[int, Mixture, ReturnQuery]:
        progress, left = self.progress, self.episodes_left
        users = min(left, max(self.first, round(progress.users)))
        if left - users < max(self.first, progress.base):
            users = left
        if progress.phase in ("search", "check") and users == left and self.batches_observed:
            progress.phase, self.candidates = "commit", self.average[None]  # what is left is too few to learn from
        if progress.phase in ("range", "search"):
            self.draws = self.rng.standard_normal((C.arms, self.network.size))
            policies = self.search.place(self.draws)
        else:
            policies = self.candidates
        weights = np.full(len(policies), 1 / len(policies))
        return users, self._mixture(policies, weights), ReturnQuery(len(weights), self._points())

    def _points(self) -> tuple[float, ...]:
        progress = self.progress
        if progress.phase == "range":
            powers = [10.0 ** (i / 2) for i in range(-4, 13)]
            return (*(-power for power in reversed(powers)), 0.0, *powers)
        count = C.fine_points if progress.noise == 0 else C.points
        return tuple(np.linspace(progress.low, progress.high, count).tolist())

    def _mixture(self, parameters: FloatArray, weights: FloatArray) -> Mixture:
        problem = self.problem
        if isinstance(problem, ReturnProblem):
            return Mixture(parameters, weights, self.network)
        chosen = self.network.act(parameters[:, None].astype(np.float32), np.eye(problem.n_states))
        actions = np.minimum(chosen, problem.n_actions - 1).astype(np.int32)
        return Mixture(np.repeat(actions[:, None], problem.horizon, axis=1), weights)

    # What to make of the answer.

    def _learn(self, release: Release) -> None:
        progress, weights, users = self.progress, release.batch.mixture.weights, release.batch.users
        assert isinstance(release.batch.query, ReturnQuery)
        points, noise = np.array(release.batch.query.points), release.noise.variance
        counts = release.values.reshape(len(weights), len(points))
        progress.noise = noise
        progress.base = max(self.first, C.arms * _users_per_arm(noise))
        if progress.phase == "range":
            self._set_range(points, counts.sum(axis=0), users)
            return
        if progress.phase == "search" and 2 * users < progress.base:
            progress.users = progress.base  # the first batch: too few for its noise, which is known now
            return
        told = _Told.of(counts, users * weights, noise)
        width = float(points[-1] - points[0])
        progress.error = width * told.error
        returned = float(points[0] + width * told.mean)
        progress.spread = (points[0] + width * np.sort(np.clip(told.mean + told.arms, 0, 1))).tolist()
        left = self.episodes_left - users
        if progress.phase == "search":
            self._follow(told)
            self._judge(returned)
            self._size(told, width, left)
            self._watch(counts.sum(axis=0) / users)
        else:
            progress.value = returned
            if progress.phase == "check":
                best = int(told.arms.argmax())
                progress.phase, self.candidates = "commit", self.candidates[best : best + 1]
            progress.users = max(progress.base, left / 8)

    def _begin(self, low: float, high: float) -> None:
        """Search with this window, and none that is much narrower."""
        self.progress.phase, self.progress.low, self.progress.high = "search", low, high
        self.narrowest = C.narrowest * (high - low)

    def _set_range(self, points: FloatArray, counts: FloatArray, users: int) -> None:
        """From where returns were found beyond the noise, a window that holds them all."""
        progress, noise = self.progress, self.progress.noise or 0.0
        found = counts > max(0.02 * users, 4 * math.sqrt(noise * C.arms))
        if not found.any():  # the noise drowned them: ask more users
            progress.users = 2 * max(progress.users, progress.base)
            return
        middle = float(np.average(points[found], weights=counts[found]))
        half = 1.5 * float(np.abs(points[found] - middle).max()) + 0.1
        self._begin(middle - half, middle + half)
        progress.users = progress.base

    def _follow(self, told: _Told) -> None:
        """Move the mean towards the better arms, if they can be told apart; look further where there are none."""
        progress, search = self.progress, self.search
        progress.reliability = told.reliability
        if progress.reliability >= C.uncertain:
            search.update(self.draws, told.arms)
            self.average += C.memory * (search.mean - self.average)
        elif self._stuck(told):
            search.sigma *= C.growth
            if search.sigma > C.farthest:
                self.search = CMAES(self.network.size, C.arms)

    def _stuck(self, told: _Told) -> bool:
        """Whether nearly all policies return the least there is, and always did: there is nothing to follow yet."""
        return not self.progress.risen and told.law[0] > 1 - 2 / C.arms

    def _judge(self, returned: float) -> None:
        """Keep the running return, and whether it has ever risen."""
        progress = self.progress
        progress.value = _running(progress.value, returned)
        progress.lowest = min(progress.lowest, progress.value)
        if progress.value - progress.lowest > 3 * progress.error * math.sqrt(C.memory / (2 - C.memory)):
            progress.risen = True

    def _size(self, told: _Told, width: float, left: int) -> None:
        """As many users as tell arms apart that differ as they did lately; if that is too many, the search ends.

        Where there is nothing to follow there is nothing to size batches by, and many small ones try more policies.
        """
        progress = self.progress
        assert progress.value is not None
        progress.signal = _running(progress.signal, width**2 * told.signal)
        if self._stuck(told):
            progress.users = progress.base
        else:
            wanted = C.arms * told.users_for(progress.signal / width**2 * (1 - C.certain) / C.certain)
            progress.users = min(max(progress.base, wanted), C.growth * max(progress.base, progress.users))
        most = max(8 * progress.base, C.ending * left)
        done = progress.value > self.high - 0.02 * (self.high - self.low)  # nothing is left to gain
        late = left < C.reserve * self.problem.episodes
        if done or late or (progress.risen and progress.users > most):
            progress.phase, self.candidates = "check", np.stack([self.search.mean, self.average])
            progress.users = 4 * progress.base

    def _watch(self, shares: FloatArray) -> None:
        """Let the window's ends keep to where a few of the returns are: outwards where more are, inwards where fewer.

        Noise on an arm's return goes with the window's width; but returns beyond its lower end count too little.
        """
        progress, width = self.progress, self.progress.high - self.progress.low
        down, up = (
            width * min(max(C.pace * (float(share) - kept), -0.5), 1.0)
            for share, kept in ((shares[0], C.bottom), (shares[-1], C.top))
        )
        low, high = progress.low - down, progress.high + up
        short = max(0.0, self.narrowest - (high - low)) / 2
        low, high = max(low - short, self.low), min(high + short, self.high)
        progress.low, progress.high = min(low, self.high - self.narrowest), max(high, self.low + self.narrowest)

    # What to tell and to remember.

    @property
    def released(self) -> Mixture:
        """The policy that the learner would end with now."""
        policy = self.candidates[0] if self.progress.phase == "commit" else self.average
        return self._mixture(policy[None], np.ones(1))

    def view(self) -> View:
        """The running return of the policies that users play, and how far those are apart."""
        progress = self.progress
        details = {
            "phase": progress.phase,
            "family": self.network.kind,
            "parameters": self.network.size,
            "arms": progress.spread,
            "reliability": progress.reliability,
            "users": self.episodes_played,
        }
        if progress.value is None:
            return View(None, details)
        value, error = progress.value, 2 * progress.error
        low, value, high = (min(max(x, self.low), self.high) for x in (value - error, value, value + error))
        meaning = "of the policies that users play, all together; two standard errors of a batch on each side"
        return View(Estimate(value, low, high, meaning), details)

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        search, arrays = self.search.state()
        values = {"search": search, "progress": _encoded(asdict(self.progress)), "narrowest": self.narrowest}
        own = {"draws": self.draws, "average": self.average, "candidates": self.candidates}
        return values, {**{f"search.{name}": array for name, array in arrays.items()}, **own}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.search = CMAES(self.network.size, C.arms)
        prefix = "search."
        self.search.load_state(
            values["search"], {name.removeprefix(prefix): array for name, array in arrays.items() if prefix in name}
        )
        self.progress, self.narrowest = _Progress(**_decoded(values["progress"])), values["narrowest"]
        self.draws, self.average, self.candidates = (arrays[n] for n in ("draws", "average", "candidates"))


@dataclass(frozen=True)
class _Told:
    """What noisy counts tell: the mean over all arms and each arm's distance from it, in widths of the window."""

    mean: float
    error: float  # of the mean
    arms: FloatArray
    variance: float  # of an arm's distance
    inherited: float  # the share of the arms' own differences that is in this variance
    law: FloatArray  # of returns over points
    noise: float  # variance on each counter

    @property
    def signal(self) -> float:
        """Variance of the arms' own differences: what users and noise do not explain.

        Users' returns are spread as those of all arms together, of which the arms' own differences are a part.
        """
        return max((float(self.arms.var(ddof=1)) - self.variance) / (1 - self.inherited), 0.0)

    @property
    def reliability(self) -> float:
        """The share of the arms' differences that is their own."""
        return self.signal / max(float(self.arms.var(ddof=1)), 1e-12)

    def users_for(self, variance: float) -> float:
        """Users per arm that give its distance such a variance, within a tenth; a million if none do."""
        tilt = _tilt(self.law)
        users = 1.0
        while users < 1e6 and users**2 * float((tilt**2 / (users * self.law + self.noise + 1e-9)).sum()) * variance < 1:
            users *= 1.1
        return users

    @classmethod
    def of(cls, counts: FloatArray, expected: FloatArray, noise: float) -> _Told:
        """From counts[arm, point] of so many expected users of each arm.

        Arms are compared by the linear estimate of least variance for small shifts of the law of returns over points,
        q: with x its points, weights are q (x - mean) / (users q + noise), between "each user alike", right without
        noise, and "each counter alike", right where noise is all. That users draw their arms themselves cancels to
        first order, as what is expected of each point goes with the users that an arm is estimated to have.
        """
        users, count = float(expected.sum()), counts.shape[1]
        points = np.linspace(0.0, 1.0, count)
        floor = min(0.02, math.sqrt(noise * len(counts)) / users)
        law = np.maximum(counts.sum(axis=0) / users, floor)
        law /= law.sum()
        mean = float(law @ points)
        around = points - mean
        total = max(float(law @ around**2), 1e-6)
        each = expected[:, None]
        spread = each * law + noise + 1e-9
        tilt = _tilt(law)
        weights = tilt / spread
        weights /= np.maximum(each * (weights @ tilt)[:, None], 1e-12)
        # The users of each arm: what was drawn where it is known, what was expected where noise hides it.
        trust = expected / (expected + count * noise)
        there = np.maximum(expected + trust * (counts.sum(axis=1) - expected), 0.0)
        scale = np.where(there > 0, expected / np.maximum(there, 0.5), 0.0)
        return cls(
            mean=mean,
            error=math.sqrt(total / users + noise * len(counts) * float((around**2).sum()) / users**2),
            arms=scale * ((counts - there[:, None] * law) * weights).sum(axis=1),
            variance=float((weights**2 * spread).sum(axis=1).mean()),
            inherited=min(0.9, float((weights**2 * each * law).sum(axis=1).mean()) / total),
            law=law,
            noise=noise,
        )


def _tilt(law: FloatArray) -> FloatArray:
    """How each point's share changes as the mean of a law over points moves: by exponential tilting."""
    around = np.linspace(0.0, 1.0, len(law))
    around = around - law @ around
    tilted: FloatArray = law * around / max(float(law @ around**2), 1e-6)
    return tilted


def _running(before: float | None, now: float) -> float:
    """A running mean."""
    return now if before is None else before + C.memory * (now - before)


def _users_per_arm(noise: float) -> int:
    """As few as give an arm's estimate the variance that batches are sized for, were returns spread evenly."""
    per_user = 0.1
    return math.ceil((per_user + math.sqrt(per_user**2 + 2 * noise * C.variance)) / (2 * C.variance))


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Infinities as text: JSON has none."""
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in values.items()}


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in ("inf", "-inf") else value for name, value in values.items()}
