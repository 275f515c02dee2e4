"""One setting, many seeds: what `shufflerl run` does, as functions."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shufflerl import attacks, checks, envs, learners, privatizers
from shufflerl.compiling import compiler_clock
from shufflerl.counts import CountQuery
from shufflerl.errors import InvalidInputError
from shufflerl.history import History
from shufflerl.loop import Progress, learn
from shufflerl.mdp import MAX_EPISODES, MDP
from shufflerl.population import CountPopulation, Population, TrajectoryPopulation
from shufflerl.privacy.certificate import Certificate


@dataclass(frozen=True)
class Setting:
    """What to run, all by name and keyword."""

    env: str
    learner: str
    privatizer: str
    episodes: int
    epsilon: float | None = None
    delta: float | None = None
    env_parameters: dict[str, Any] = field(default_factory=dict)
    learner_parameters: dict[str, Any] = field(default_factory=dict)
    privatizer_parameters: dict[str, Any] = field(default_factory=dict)
    #: Users who lie, if any do: {"attack": a name of `attacks`, "share": of all users}.
    liars: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.whole("episodes", self.episodes, least=1, most=MAX_EPISODES)

    def environment(self, seed: int) -> MDP | envs.GymSimulator:
        """The environment that a seed's run lives in."""
        return envs.make(self.env, checks.whole("seed", seed, least=0), **self.env_parameters)


@dataclass(frozen=True, eq=False)
class Run:
    """One seed's run; `records` are its learner's, `seconds` how long it learned, without compilation."""

    seed: int
    optimal_value: float | None
    history: History
    certificate: Certificate | None
    records: list[dict[str, Any]]
    seconds: float


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that a seed's run needs, made and checked; nothing has been played yet."""

    population: Population
    learner: learners.Learner
    privatizer: privatizers.Privatizer
    optimal_value: float | None

    @property
    def certificate(self) -> Certificate | None:
        """What the run guarantees to its users."""
        return self.privatizer.certificate(CountQuery.everything(self.learner.problem))


def prepare(setting: Setting, seed: int) -> Prepared:
    """Environment, users, noise and learner, which draw streams of their own from the one seed."""
    environment = setting.environment(seed)
    population: Population
    if isinstance(environment, MDP):
        population, optimal_value = CountPopulation(environment, seed), environment.optimal_value
    else:
        population, optimal_value = TrajectoryPopulation(environment, seed), None
    problem = environment.problem(setting.episodes)
    learner = learners.make(setting.learner, problem, seed, **setting.learner_parameters)
    privatizer = privatizers.make(
        setting.privatizer,
        learner,
        epsilon=setting.epsilon,
        delta=setting.delta,
        seed=seed,
        **setting.privatizer_parameters,
    )
    if setting.liars:
        if not isinstance(environment, MDP):
            raise InvalidInputError("Liars must know the environment; choose one that has a transition table.")
        population = attacks.LyingPopulation(environment, **setting.liars, episodes=setting.episodes, seed=seed)
        if setting.privatizer == "shuffle" and setting.privatizer_parameters.get("noise", "users") == "users":
            privatizer = attacks.Shouting(privatizer, population)
    return Prepared(population, learner, privatizer, optimal_value)


def run(setting: Setting, seed: int, progress: Progress | None = None) -> Run:
    """Run a setting once."""
    made = prepare(setting, seed)
    began = time.perf_counter()
    with compiler_clock() as compiling:
        history = learn(made.learner, made.population, made.privatizer, progress=progress)
        seconds = time.perf_counter() - began - compiling()
    return Run(seed, made.optimal_value, history, made.certificate, made.learner.records, seconds)


def run_seeds(
    setting: Setting, seeds: Iterable[int], progress: Callable[[int, int, int], None] | None = None
) -> Iterator[Run]:
    """Run a setting for each seed; `progress` is called with (seed, episodes played, episodes in all)."""
    for seed in seeds:
        yield run(setting, seed, None if progress is None else functools.partial(progress, seed))


def described(name: str, parameters: dict[str, Any]) -> str:
    """A name with the parameters that were chosen for it."""
    chosen = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f"{name} ({chosen})" if chosen else name


def summary(setting: Setting, runs: list[Run]) -> dict[str, Any]:
    """The figures of a setting as JSON values."""
    regrets = np.array([run.history.total_regret for run in runs])
    optima = [run.optimal_value for run in runs if run.optimal_value is not None]
    known = bool(optima)
    earned = float(np.mean([run.history.reward.sum() for run in runs])) / setting.episodes
    return {
        "env": setting.env,
        "env_parameters": setting.env_parameters,
        "learner": setting.learner,
        "learner_parameters": setting.learner_parameters,
        "privatizer": setting.privatizer,
        "privatizer_parameters": setting.privatizer_parameters,
        "epsilon": setting.epsilon,
        "delta": setting.delta,
        "episodes": setting.episodes,
        "seeds": len(runs),
        "first_seed": runs[0].seed,
        "regret": {
            "mean": float(regrets.mean()) if known else None,
            "sd": float(regrets.std(ddof=1)) if known and len(runs) > 1 else None,
            "per_seed": regrets.tolist() if known else [None] * len(runs),
        },
        "reward_per_episode": None if math.isnan(earned) else earned,
        "switches": {"mean": float(np.mean([run.history.switches for run in runs]))},
        "optimal_value": float(np.mean(optima)) if known else None,
        "certificate": None if runs[0].certificate is None else runs[0].certificate.as_dict(),
        "trace": runs[0].records or None,
        "seconds": sum(run.seconds for run in runs),
    }
