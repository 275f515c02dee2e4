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
from shufflerl.errors import InvalidInputError
from shufflerl.learners.base import Estimate, Learner, View
from shufflerl.learners.policy_search.cma import CMAES
from shufflerl.learners.policy_search.constants import C
from shufflerl.learners.policy_search.estimates import ArmEstimates
from shufflerl.learners.policy_search.features import state_features
from shufflerl.learners.policy_search.window import ReturnWindow
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import Noise
from shufflerl.policies import Network
from shufflerl.returns import ReturnProblem, ReturnQuery
from shufflerl.seeding import Seed

#: The error of a running mean beside that of one batch.
_SETTLED = math.sqrt(C.memory / (2 - C.memory))


@dataclass
class _Progress:
    """Plain numbers of a search, which a saved state holds as they are."""

    phase: str = "range"  # range -> search -> check -> commit
    low: float = 0.0  # of the window of returns
    high: float = 1.0
    checked: tuple[float, float] = (1e300, -1e300)  # the window of the last check, empty before
    noise: float | None = None  # variance on each counter
    users: float = 0.0  # of the next batch
    base: float = 0.0  # users that noise asks for at least
    value: float | None = None  # running return
    error: float = 0.0  # of one batch's return
    lowest: float = math.inf  # running return of this search
    highest: float = -math.inf
    waited: float = 0.0  # batches since it was higher than ever
    track: list[list[float]] = field(default_factory=list)  # users of this search so far and the running return
    risen: bool = False  # whether returns have left the lowest
    stalled: bool = False  # whether one user for each policy, without noise, has led no further
    signal: float | None = None  # running variance of the arms' true returns
    reliability: float | None = None
    spread: list[float] = field(default_factory=list)  # arms' estimated returns, in order


class PolicySearch(Learner):
    """CMA-ES on noisy returns.

    `family` is "linear" or "mlp", with one hidden layer of `hidden` units. `first` is the fewest users that a batch
    has, and how many the first one has where the noise is not known before. On a problem of states and actions it
    searches tables that do the same at every step: one logit for each state and action, or a network of the state.
    There `highest` is the most that an episode returns, where that is known to be less than one reward for each step:
    what returns more counts as that.
    """

    name: ClassVar[str] = "policy-search"
    problems: ClassVar[tuple[type[Problem] | type[ReturnProblem], ...]] = (Problem, ReturnProblem)

    def __init__(
        self,
        problem: Problem | ReturnProblem,
        seed: Seed,
        *,
        family: str = "linear",
        hidden: int = 16,
        first: int = 4,
        highest: float | None = None,
    ) -> None:
        chosen = checks.choice("family", family, ("linear", "mlp"))
        units = checks.whole("hidden", hidden, least=1)
        self.first = checks.whole("first", first, least=1)
        if highest is not None:
            if not isinstance(problem, Problem):
                raise InvalidInputError("highest is for problems of states and actions; expected none here.")
            most = float(problem.horizon)
            highest = checks.real("highest", highest, above=1e-6 * most, below=most, closed=True)
        super().__init__(problem, seed, family=chosen, hidden=units, first=self.first, highest=highest)
        layers = (units,) if chosen == "mlp" else ()
        if isinstance(problem, Problem):
            self.low: float = 0.0
            self.high: float = float(problem.horizon) if highest is None else highest
            self.features = state_features(problem)
            self.network = Network(self.features.shape[1], max(2, problem.n_actions), layers)
        else:
            self.low = -math.inf if problem.low is None else problem.low
            self.high = math.inf if problem.high is None else problem.high
            self.network = Network(problem.inputs, problem.actions, layers, problem.head)
        self.progress = _Progress(users=float(self.first))
        self.champion = np.zeros((0, self.network.size))  # what the last check chose; none before
        self.candidates, self.scores = self.champion, np.zeros(0)  # in the check, and how they do
        self._search_anew()
        self.narrowest = 0.0
        if math.isfinite(self.low):
            self._begin(self.low, self.high)

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """See `Learner`."""
        return {"first": min_users}

    def _search_anew(self) -> None:
        """Forget all but what a check has chosen."""
        progress, size = self.progress, self.network.size
        self.search = CMAES(size, self._population)
        self.draws, self.averages, self.trail = np.zeros((0, size)), np.zeros((2, size)), np.zeros((0, size))
        progress.value, progress.lowest, progress.highest, progress.waited = None, math.inf, -math.inf, 0.0
        progress.risen, progress.stalled, progress.signal, progress.track = False, False, None, []
        progress.users = self._least

    def expect(self, noise: Noise) -> None:
        """Size the first batch by the noise that there will be."""
        if not self.batches_observed and not self.waits:
            self._set_noise(noise.variance)
            self._search_anew()

    def _set_noise(self, variance: float) -> None:
        """Know the noise on a counter, and by it how many users a batch needs."""
        self.progress.noise = variance
        self.progress.base = max(self.first, C.arms * _users_per_arm(variance))

    @property
    def _exact(self) -> bool:
        """Whether every user plays a policy of its own, as in CMA-ES on exact values: without noise, while it helps."""
        return self.progress.noise == 0 and not self.progress.stalled

    @property
    def _population(self) -> int:
        """Policies that one update compares: as many as the package `cma` has where there is no noise."""
        return 4 + int(3 * math.log(self.network.size)) if self.progress.noise == 0 else C.arms

    @property
    def _certain(self) -> float:
        """The reliability of arms that batches are sized for."""
        return C.certain if self.progress.noise else C.exact_certain

    @property
    def _least(self) -> float:
        """Users of the smallest batches of a search."""
        if self.progress.noise is None:
            return self.first
        return max(self.first, self._population) if self._exact else self.progress.base

    @property
    def max_batches(self) -> int:
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
            self.candidates = self._chosen[None]
            progress.phase = "commit"  # what is left is too few to learn from
        if progress.phase in ("range", "search"):
            self.draws = self._drawn()
            policies = self.search.place(self.draws)
        else:
            policies = self.candidates
        weights = np.full(len(policies), 1 / len(policies))
        return users, self._mixture(policies, weights), ReturnQuery(len(weights), self._points())

    def _drawn(self) -> FloatArray:
        """Standard normal draws of policies around the mean.

        Under noise they lie in pairs on both sides of it, so that chance does not move the mean where nothing is to
        be told; but for many parameters, of which twelve policies try few directions and six would try fewer.
        """
        size = self.network.size
        if self._exact or self.search.separable:
            return self.rng.standard_normal((C.pool if self._exact else C.arms, size))
        half = self.rng.standard_normal((C.arms // 2, size))
        return np.concatenate([half, -half])

    @property
    def _chosen(self) -> FloatArray:
        """The parameters that the learner would end with now."""
        best = self.candidates if self.progress.phase in ("check", "commit") else self.champion
        chosen: FloatArray = best[0] if len(best) else self.averages[0]
        return chosen

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
        chosen = self.network.act(parameters[:, None].astype(np.float32), self.features)
        actions = np.minimum(chosen, problem.n_actions - 1).astype(np.int32)
        return Mixture(np.repeat(actions[:, None], problem.horizon, axis=1), weights)

    # What to make of the answer.

    def _learn(self, release: Release) -> None:
        progress, weights, users = self.progress, release.batch.mixture.weights, release.batch.users
        assert isinstance(release.batch.query, ReturnQuery)
        points, noise = np.array(release.batch.query.points), release.noise.variance
        counts = release.values.reshape(len(weights), len(points))
        known = progress.noise is not None
        self._set_noise(noise)
        if progress.phase == "range":
            self._set_range(points, counts.sum(axis=0), users)
            return
        if not known:
            self._search_anew()  # the first batch was too few for its noise, which is known now
            return
        expected, draws = users * weights, self.draws
        if self._exact and progress.phase == "search":  # who played what is known, and most policies nobody did
            played = counts.any(axis=1)
            counts, draws, expected = counts[played], draws[played], counts[played].sum(axis=1)
        estimates = ArmEstimates.of(counts, expected, noise, unbiased=progress.phase != "search")
        width = float(points[-1] - points[0])
        progress.error = width * estimates.error
        returned = float(points[0] + width * estimates.mean)
        progress.spread = (points[0] + width * np.sort(np.clip(estimates.mean + estimates.arms, 0, 1))).tolist()
        left = self.episodes_left - users
        if progress.phase == "search":
            window = ReturnWindow(progress.low, progress.high, self.low, self.high, self.narrowest)
            shares, highest = counts.sum(axis=0) / users, estimates.mean + 2 * estimates.error
            progress.low, progress.high = window.adapted(shares, highest, exact=noise == 0)
            self._update_mean(draws, estimates, width)
            self._judge(returned, users)
            self._size(estimates, width)
            self.conclude(left)
        else:
            progress.value = returned
            if progress.phase == "check":
                self._halve_candidates(estimates, width, left)
            else:
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
        progress.users = self._least

    def _update_mean(self, draws: FloatArray, estimates: ArmEstimates, width: float) -> None:
        """Move the mean towards the better arms, if they can be told apart; look further where there are none.

        While the window still closes on where returns are, the next batch will tell more: only what is certain counts.
        """
        progress, search = self.progress, self.search
        progress.reliability = estimates.reliability
        settled = progress.high - progress.low > C.narrowing * width
        if (
            np.ptp(estimates.arms) > 0
            if self._exact
            else estimates.reliability >= (C.uncertain if settled else self._certain)
        ):
            search.update(draws, estimates.arms, ranked=self._exact)
            rates = np.array([1.0 if self._exact else C.memory, C.slow_memory])[:, None]
            self.averages = self.averages + rates * (search.mean - self.averages)
            if search.updates % C.trail == 0:
                self.trail = np.concatenate([self.trail[1 - C.trail :], [search.mean]])
        elif self._exact or self._stuck(estimates):
            search.sigma *= C.growth

    def _stuck(self, estimates: ArmEstimates) -> bool:
        """Whether nearly all policies return the least there is, and always did: there is nothing to follow yet."""
        return not self.progress.risen and estimates.law[0] > 1 - 2 / C.arms

    def _judge(self, returned: float, users: int) -> None:
        """Keep the running return, whether it has ever risen, and since when it is no better."""
        progress = self.progress
        progress.value = _running(progress.value, returned)
        error = progress.error * _SETTLED
        played = progress.track[-1][0] if progress.track else 0
        progress.track.append([played + users, progress.value])
        progress.lowest = min(progress.lowest, progress.value)
        if progress.value - progress.lowest > 3 * error:
            progress.risen = True
        progress.waited += min(1.0, users / progress.base)
        if progress.value > progress.highest + error:
            progress.highest, progress.waited = progress.value, 0.0

    def _size(self, estimates: ArmEstimates, width: float) -> None:
        """As many users as tell arms apart that differ as they did lately.

        Where there is nothing to follow there is nothing to size batches by, and many small ones try more policies.
        """
        progress = self.progress
        progress.signal = _running(progress.signal, width**2 * estimates.signal)
        if self._exact:
            return
        if self._stuck(estimates):
            progress.users = progress.base
        else:
            wanted = C.arms * estimates.users_for(progress.signal / width**2 * (1 - self._certain) / self._certain)
            progress.users = min(max(progress.base, wanted), C.growth * max(progress.base, progress.users))

    def conclude(self, left: int) -> None:
        """End a search that finds nothing better, is too costly or too late: check what it found, or begin anew.

        One without noise goes on first with several users for each policy, whose returns may differ by themselves.
        """
        progress, size = self.progress, self.problem.episodes
        assert progress.value is not None
        late = left < C.reserve * size
        costly = progress.users > max(8 * progress.base, C.batch_share * left)
        fallen = not progress.risen and progress.highest - progress.value > 3 * progress.error * _SETTLED
        slow = self._slow and (len(self.champion) > 0 or left > C.first_share * size)
        ended = slow or progress.waited > (C.hopeless if fallen else C.patience)
        if self._done or late or (progress.risen and (costly or ended)):
            progress.phase = "check"
            low, high = progress.checked  # or the one chosen before may be beyond the window
            progress.low, progress.high = min(progress.low, low), max(progress.high, high)
            self.candidates = np.concatenate([self.champion, self.averages, [self.search.mean], self.trail])
            self.scores = np.zeros(len(self.candidates))
            progress.users = self._checking(left)
        elif ended and not progress.risen:
            self._search_anew()
        elif self._exact and progress.waited > C.hopeless:
            progress.stalled, progress.users, progress.waited = True, progress.base, 0.0
            self._widen()

    @property
    def _slow(self) -> bool:
        """Whether the second half of its users brought the search hardly any of what it has risen by.

        Steps that get smaller make the mean over all policies better even where the search leads nowhere.
        """
        progress = self.progress
        if progress.noise == 0 or not progress.risen or len(progress.track) <= C.min_track:
            return False
        users, value = progress.track[-1]
        before = max((at for at in progress.track if at[0] <= users / 2), default=[0, progress.lowest])[1]
        return value - before < C.slow * (value - progress.lowest)

    def _widen(self) -> None:
        """Search around the mean again, with steps of a fifth of its length."""
        mean = self.search.mean
        self.search = CMAES(
            len(mean), self._population, C.restart_step * float(np.linalg.norm(mean)) / math.sqrt(len(mean))
        )
        self.search.mean = mean

    def _checking(self, left: int) -> float:
        """Users of a batch that checks: at last half of those left, before a tenth of those that the search took."""
        progress = self.progress
        if left < C.reserve * self.problem.episodes:
            return C.check_share * left
        searched = progress.track[-1][0] if progress.track else 0
        return max(4 * progress.base, C.min_check, C.early_share * searched)

    def _halve_candidates(self, estimates: ArmEstimates, width: float, left: int) -> None:
        """Sequential halving of what is checked."""
        progress = self.progress
        self.scores = self.scores + estimates.arms / (width * max(estimates.variance, 1e-12))
        better = np.argsort(-self.scores)[: (len(self.candidates) + 1) // 2]
        self.candidates, self.scores = self.candidates[better], self.scores[better]
        if len(self.candidates) > 1:
            progress.users = self._checking(left)
            return
        self.champion, progress.checked = self.candidates, (progress.low, progress.high)
        self.commit_or_search(left)

    def commit_or_search(self, left: int) -> None:
        """Play what was chosen, or look for a better one while that cost few users."""
        progress, size = self.progress, self.problem.episodes
        spent = size - left >= max(C.explored * size, C.explored_batches * progress.base)
        if spent or left <= 2 * C.reserve * size or self._done:
            progress.phase, self.candidates = "commit", self.champion
            progress.users = max(progress.base, left / 8)
        else:
            progress.phase = "search"
            self._search_anew()

    @property
    def _done(self) -> bool:
        """Whether nothing is left to gain."""
        assert self.progress.value is not None
        return self.progress.value > self.high - 0.02 * (self.high - self.low)

    # What to tell and to remember.

    _arrays: ClassVar[tuple[str, ...]] = ("draws", "averages", "trail", "champion", "candidates", "scores")

    @property
    def released(self) -> Mixture:
        """The policy that the learner would end with now."""
        return self._mixture(self._chosen[None], np.ones(1))

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
        own = {name: getattr(self, name) for name in self._arrays}
        return values, {**{f"search.{name}": array for name, array in arrays.items()}, **own}

    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        self.progress, self.narrowest = _Progress(**_decoded(values["progress"])), values["narrowest"]
        self.search = CMAES(self.network.size, self._population)
        prefix = "search."
        self.search.load_state(
            values["search"], {name.removeprefix(prefix): array for name, array in arrays.items() if prefix in name}
        )
        for name in self._arrays:
            setattr(self, name, arrays[name])


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
