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
    """One set for all problems, chosen on seeds from 1000 on; docs/policy-search.md says what each is worth."""

    arms: int = 12  # policies drawn around the mean in every batch
    points: int = 4  # of the window; more tell how wide it should be, and cost hardly any noise
    fine_points: int = 64  # where there is no noise
    variance: float = 0.1  # of an arm's estimate, in widths of the window: what batches are sized for
    reach: float = 3.5  # deviations of returns on each side of the window's middle
    uncertain: float = 0.3  # below such reliability an update is skipped, the step and the batch grow
    certain: float = 0.6  # above it batches shrink
    growth: float = 1.1
    most: float = 20.0  # times the size that noise asks for
    patience: float = 25.0  # batches of that size without a better return, and half of the users so far
    settling: int = 4  # batches before returns are compared with the first
    waiting: float = 0.05  # of all users, before a search among many of them ends
    finer: int = 2  # times that batches are doubled when returns stay the same, before the search ends
    averaging: float = 0.2  # weight of a batch's mean in the averaged policy


C = Constants()

#: The least variance of returns, in widths of the window, that can be told from rounding and noise.
_FLAT = 0.003


@dataclass
class _Progress:
    """Plain numbers of a search, which a saved state holds as they are."""

    phase: str = "range"  # range -> search -> check -> commit
    middle: float = 0.0  # of the window of returns
    half: float = 1.0  # its half-width
    noise: float | None = None  # variance on each counter
    users: float = 0.0  # of the next batch
    base: float = 0.0  # users that noise asks for
    value: float | None = None  # running return
    doubt: float = 0.0  # its variance
    error: float = 0.0  # of one batch's return
    first: float = -math.inf  # return of the first batch
    best: float = -math.inf
    best_users: int = 0
    restarts: int = 0
    finer: int = 0  # how often batches were doubled for what is left to gain
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
            self.progress.phase = "search"
            self.progress.middle, self.progress.half = (self.low + self.high) / 2, (self.high - self.low) / 2
        self.finest = 0.002 * self.progress.half  # no window is narrower

    @property
    def most_batches(self) -> int:
        """Each has at least `first` users, but for the last."""
        return math.ceil(self.problem.episodes / self.first) + 1

    @property
    def widest_query(self) -> ReturnQuery:
        """All queries cost the same."""
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
        low, high = self._window()
        count = C.fine_points if progress.noise == 0 else C.points
        return tuple(np.linspace(low, high, count).tolist())

    def _window(self) -> tuple[float, float]:
        """Returns from where to where are told apart; within the range, where that is known, and around the middle."""
        progress = self.progress
        half = min(progress.half, progress.middle - self.low, self.high - progress.middle)
        return progress.middle - half, progress.middle + half

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
        points, noise = np.array(release.batch.query.points), release.noise.variance
        counts = release.values.reshape(len(weights), len(points))
        progress.noise = noise
        progress.base = max(self.first, C.arms * _users_per_arm(noise) * 2**progress.finer)
        if progress.phase == "range":
            self._set_range(points, counts.sum(axis=0), users)
            return
        if progress.phase == "search" and 2 * users < progress.base:
            progress.users = progress.base  # the first batch: too few for its noise, which is known now
            return
        told = _Told.of(counts, users * weights, noise)
        width = points[-1] - points[0]
        progress.error = width * told.error
        returned = points[0] + width * told.mean
        progress.spread = (points[0] + width * np.sort(np.clip(told.mean + told.arms, 0, 1))).tolist()
        if progress.phase == "search":
            self._move(told)
            self._judge(returned)
            self._watch(returned, width * told.deviation)
        else:
            progress.value = returned
            if progress.phase == "check":
                best = int(told.arms.argmax())
                progress.phase, self.candidates = "commit", self.candidates[best : best + 1]
            left = self.episodes_left - release.batch.users
            progress.users = max(C.most * progress.base, left / 4)

    def _set_range(self, points: FloatArray, counts: FloatArray, users: int) -> None:
        """From where returns were found beyond the noise, a window that holds them all."""
        progress, noise = self.progress, self.progress.noise or 0.0
        found = counts > max(0.02 * users, 4 * math.sqrt(noise * C.arms))
        if not found.any():  # the noise drowned them: ask more users
            progress.users = 2 * max(progress.users, progress.base)
            return
        progress.middle = float(np.average(points[found], weights=counts[found]))
        progress.half = 1.5 * float(np.abs(points[found] - progress.middle).max()) + 0.1
        self.finest = 0.001 * progress.half
        progress.phase, progress.users = "search", progress.base

    def _move(self, told: _Told) -> None:
        """Follow the arms, if they can be told apart; else look further, with more users."""
        progress, arms = self.progress, told.arms
        progress.reliability = told.reliability
        if progress.reliability < C.uncertain:
            if told.flat:  # the window is still too wide to see anything
                return
            self.search.sigma *= C.growth
            if progress.noise:
                progress.users = min(progress.users * C.growth, C.most * progress.base)
        else:
            self.search.update(self.draws, arms)
            self.average += C.averaging * (self.search.mean - self.average)
            if progress.reliability > C.certain:
                progress.users /= C.growth
        progress.users = min(max(progress.users, progress.base), max(progress.base, self.problem.episodes / 20))

    def _judge(self, returned: float) -> None:
        """Whether returns still get better; if not, begin anew, or let the best candidates be checked."""
        progress, error = self.progress, self.progress.error**2
        if progress.value is None:
            progress.value, progress.doubt = returned, error
        # A Kalman filter of a return that may move by half an error between batches.
        progress.doubt = min(progress.doubt, 9 * error) + error / 4
        gain = progress.doubt / (progress.doubt + error)
        progress.value += gain * (returned - progress.value)
        progress.doubt *= 1 - gain
        played = self.episodes_played + round(progress.users)
        if self.batches_observed < C.settling:
            progress.first = progress.best = progress.value
            progress.best_users = played
        if progress.value > progress.best + math.sqrt(progress.doubt):
            progress.best, progress.best_users = progress.value, played
        episodes = self.problem.episodes
        stuck = progress.best - progress.first < 3 * progress.error
        patience = max(
            C.patience * (3 if stuck else 1) * progress.base, 0.5 * progress.best_users, C.waiting * episodes
        )
        if progress.value > self.high - 0.02 * (self.high - self.low):
            patience = 8 * progress.base  # nothing is left to gain
        if played - progress.best_users <= patience:
            return
        progress.best_users = played
        if not stuck and progress.finer < C.finer and patience > 8 * progress.base:
            progress.finer += 1
        elif stuck and progress.restarts < 3:
            self.search = CMAES(self.network.size, C.arms)
            self.average = np.zeros(self.network.size)
            progress.restarts += 1
        else:
            progress.phase, self.candidates = "check", np.stack([self.search.mean, self.average])
            progress.users = max(progress.users, 4 * progress.base)

    def _watch(self, returned: float, deviation: float) -> None:
        """Let the window follow the returns, a few deviations wide."""
        progress, wanted = self.progress, C.reach * deviation
        half = (progress.half + wanted) / 2 if wanted < progress.half else min(1.5 * progress.half, wanted)
        progress.half = max(half, self.finest)
        progress.middle = min(max(returned, self.low + self.finest), self.high - self.finest)

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
        values = {"search": search, "progress": _encoded(asdict(self.progress)), "finest": self.finest}
        own = {"draws": self.draws, "average": self.average, "candidates": self.candidates}
        return values, {**{f"search.{name}": array for name, array in arrays.items()}, **own}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.search = CMAES(self.network.size, C.arms)
        prefix = "search."
        self.search.load_state(
            values["search"], {name.removeprefix(prefix): array for name, array in arrays.items() if prefix in name}
        )
        self.progress, self.finest = _Progress(**_decoded(values["progress"])), values["finest"]
        self.draws, self.average, self.candidates = (arrays[n] for n in ("draws", "average", "candidates"))


@dataclass(frozen=True)
class _Told:
    """What noisy counts tell: the mean over all arms and each arm's distance from it, in widths of the window."""

    mean: float
    deviation: float  # of single returns
    error: float  # of the mean
    arms: FloatArray
    variance: float  # of an arm's distance
    inherited: float  # the share of the arms' own differences that is in this variance

    @property
    def flat(self) -> bool:
        """Whether returns are all alike in this window."""
        return self.deviation**2 <= _FLAT

    @property
    def reliability(self) -> float:
        """The share of the arms' differences that is their own: the variance that users and noise do not explain.

        Users' returns are spread as those of all arms together, of which the arms' own differences are a part.
        """
        seen = max(float(self.arms.var(ddof=1)), 1e-12)
        return (seen - self.variance) / (1 - self.inherited) / seen

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
        tilt = law * around / total
        weights = tilt / spread
        weights /= np.maximum(each * (weights @ tilt)[:, None], 1e-12)
        # The users of each arm: what was drawn where it is known, what was expected where noise hides it.
        trust = expected / (expected + count * noise)
        there = np.maximum(expected + trust * (counts.sum(axis=1) - expected), 0.0)
        scale = np.where(there > 0, expected / np.maximum(there, 0.5), 0.0)
        arms = scale * ((counts - there[:, None] * law) * weights).sum(axis=1)
        rounding = 0.17 / (count - 1) ** 2
        return cls(
            mean=mean,
            deviation=math.sqrt(max(total - rounding, _FLAT)),
            error=math.sqrt(total / users + noise * len(counts) * float((around**2).sum()) / users**2),
            arms=arms,
            variance=float((weights**2 * spread).sum(axis=1).mean()),
            inherited=min(0.9, float((weights**2 * each * law).sum(axis=1).mean()) / total),
        )


def _users_per_arm(noise: float) -> int:
    """As few as give an arm's estimate the variance that batches are sized for, were returns spread evenly."""
    per_user = 0.15
    return math.ceil((per_user + math.sqrt(per_user**2 + 2 * noise * C.variance)) / (2 * C.variance))


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Infinities as text: JSON has none."""
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in values.items()}


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in ("inf", "-inf") else value for name, value in values.items()}
