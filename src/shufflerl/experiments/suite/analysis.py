"""What the suite's results say: a line per learner and contest, where nobody learns, ratios between learners.

A contest is a cell of the suite's table: an environment, a budget and a number of episodes. Its yardstick is what
never learning costs: the regret of users who act uniformly at random, computed exactly from the MDP. **Nobody learns**
in a contest when no learner's mean regret is below `LEARNS` of it; such contests are marked, and averages are given
with and without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shufflerl.errors import InvalidInputError
from shufflerl.experiments.cells import Result, canonical
from shufflerl.experiments.compare import Estimate, interval
from shufflerl.experiments.suite.definition import CONTENDERS, ENVIRONMENTS, Environments
from shufflerl.mdp import MDP

#: A learner learns where its mean regret is below this share of that of acting at random.
LEARNS = 0.8
#: The learner that others are compared with, and the budgets over which ratios are averaged.
CHAMPION = "optimistic"
STRICT = 1.0


@dataclass(frozen=True)
class Line:
    """One learner's regrets in a contest; `learns` says whether the mean is below `LEARNS` of never learning."""

    learner: str
    seeds: int
    regret: Estimate
    median: float
    tail: float  # 95th percentile over seeds
    learns: bool
    switches: float
    seconds: float  # of one run, on the mean


@dataclass(frozen=True)
class Contest:
    """An environment at a budget (None: no privacy) and a number of episodes, with a line for each learner."""

    environment: str
    epsilon: float | None
    episodes: int
    never: float  # regret of acting at random
    lines: Mapping[str, Line]

    @property
    def learned(self) -> bool:
        """Whether anybody learns here."""
        return any(line.learns for line in self.lines.values())

    def ratio(self, rival: str, champion: str = CHAMPION) -> float:
        """How many times the champion's mean regret the rival's is."""
        return self.lines[rival].regret.mean / self.lines[champion].regret.mean


@dataclass(frozen=True)
class Standing:
    """How a rival compares with the champion over the contests at budgets up to `STRICT`.

    `worst` is its smallest ratio over all budgets, and `worst_in` where: below 1 the rival is better there.
    """

    rival: str
    ratio: float  # geometric mean over contests where somebody learns
    ratio_everywhere: float  # over all contests
    worst: float
    worst_in: Contest


@dataclass(frozen=True)
class Report:
    """The suite's contests in order, and what they come to."""

    contests: tuple[Contest, ...]

    @property
    def learners(self) -> tuple[str, ...]:
        """The contenders that every contest has, in order."""
        return tuple(name for name in CONTENDERS if all(name in contest.lines for contest in self.contests))

    @property
    def standings(self) -> list[Standing]:
        """Of each rival of the champion; empty if that one was not run."""
        if CHAMPION not in self.learners:
            return []
        return [self._standing(rival) for rival in self.learners if rival != CHAMPION]

    def _standing(self, rival: str) -> Standing:
        strict = [contest for contest in self.contests if contest.epsilon is not None and contest.epsilon <= STRICT]
        worst = min(self.contests, key=lambda contest: contest.ratio(rival))
        return Standing(
            rival,
            geometric_mean(contest.ratio(rival) for contest in strict if contest.learned),
            geometric_mean(contest.ratio(rival) for contest in strict),
            worst.ratio(rival),
            worst,
        )

    @property
    def longest_tail(self) -> tuple[float, Contest] | None:
        """The largest 95th percentile over median of the champion where it learns, and where that is."""
        tails = [
            (contest.lines[CHAMPION].tail / contest.lines[CHAMPION].median, contest)
            for contest in self.contests
            if CHAMPION in self.learners and contest.lines[CHAMPION].learns
        ]
        return max(tails, key=lambda tail: tail[0], default=None)

    def rows(self) -> list[dict[str, Any]]:
        """A flat row per learner and contest."""
        return [
            {
                "environment": contest.environment,
                "epsilon": contest.epsilon,
                "episodes": contest.episodes,
                "never_learning": contest.never,
                "nobody_learns": not contest.learned,
                **{key: value for key, value in asdict(line).items() if key != "regret"},
                **asdict(line.regret),
            }
            for contest in self.contests
            for line in contest.lines.values()
        ]


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


def random_value(mdp: MDP) -> float:
    """Expected reward of an episode of uniformly random actions."""
    value = mdp.rewards[-1].mean(axis=-1)
    for h in range(mdp.horizon - 2, -1, -1):
        value = (mdp.rewards[h] + mdp.transitions[h] @ value).mean(axis=-1)
    return float(mdp.start @ value)


def analyse(results: Iterable[Result], environments: Environments = ENVIRONMENTS) -> Report:
    """The report of the suite's results, or of those of a part of it."""
    names = {canonical(environment): name for name, environment in environments.items()}
    learners = {contender.learner: name for name, contender in CONTENDERS.items()}
    runs: dict[tuple[str, float | None, int], dict[str, list[Result]]] = {}
    for result in results:
        setting = result.cell.setting
        place = names.get(canonical((setting.env, setting.env_parameters)))
        if place is None or setting.learner not in learners or result.regret is None:
            raise InvalidInputError(f"{result.cell} is no run of the suite; give the results of its cells.")
        lines = runs.setdefault((place, setting.epsilon, setting.episodes), {})
        lines.setdefault(learners[setting.learner], []).append(result)
    return Report(tuple(_contest(*key, lines) for key, lines in runs.items()))


def _contest(environment: str, epsilon: float | None, episodes: int, lines: dict[str, list[Result]]) -> Contest:
    first = next(iter(lines.values()))[0].cell
    truth = first.setting.environment(first.seed)
    assert isinstance(truth, MDP)
    never = episodes * (truth.optimal_value - random_value(truth))
    ordered = {name: _line(name, lines[name], never) for name in CONTENDERS if name in lines}
    return Contest(environment, epsilon, episodes, never, ordered)


def _line(name: str, runs: list[Result], never: float) -> Line:
    regrets = np.array([run.regret for run in runs], dtype=np.float64)
    return Line(
        learner=name,
        seeds=len(runs),
        regret=interval(regrets),
        median=float(np.median(regrets)),
        tail=float(np.quantile(regrets, 0.95)),
        learns=bool(regrets.mean() < LEARNS * never),
        switches=float(np.mean([run.switches for run in runs])),
        seconds=float(np.mean([run.seconds for run in runs])),
    )


#: (scale, batch), and the geometric mean over environments of its regret relative to the best choice in each.
Ranking = list[tuple[dict[str, float], float]]


def ranking(results: Iterable[Result]) -> dict[float | None, Ranking]:
    """For every budget the choices of parameters, best first."""
    regrets: dict[float | None, dict[str, dict[str, list[float]]]] = {}
    chosen: dict[str, dict[str, float]] = {}
    for result in results:
        setting = result.cell.setting
        assert result.regret is not None
        choice = canonical(setting.learner_parameters)
        chosen[choice] = setting.learner_parameters
        by_place = regrets.setdefault(setting.epsilon, {}).setdefault(choice, {})
        by_place.setdefault(canonical([setting.env, setting.env_parameters]), []).append(result.regret)
    return {epsilon: _ranked(by_choice, chosen) for epsilon, by_choice in regrets.items()}


def _ranked(regrets: dict[str, dict[str, list[float]]], chosen: dict[str, dict[str, float]]) -> Ranking:
    means = {
        choice: {place: float(np.mean(runs)) for place, runs in by_place.items()}
        for choice, by_place in regrets.items()
    }
    places = next(iter(means.values())).keys()
    best = {place: min(by_place[place] for by_place in means.values()) for place in places}
    scores = {
        choice: geometric_mean(by_place[place] / best[place] for place in places) for choice, by_place in means.items()
    }
    return [(chosen[choice], score) for choice, score in sorted(scores.items(), key=lambda item: item[1])]
