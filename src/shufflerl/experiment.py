"""One setting, many seeds: what `shufflerl run` does, as functions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shufflerl import checks, envs, learners, privatizers
from shufflerl.counts import CountQuery
from shufflerl.history import History
from shufflerl.loop import Progress, learn
from shufflerl.mdp import MDP
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

    def __post_init__(self) -> None:
        checks.whole("episodes", self.episodes, least=1)


@dataclass(frozen=True, eq=False)
class Run:
    """One seed's run."""

    seed: int
    optimal_value: float | None
    history: History
    certificate: Certificate | None
    seconds: float


def run(setting: Setting, seed: int, progress: Progress | None = None) -> Run:
    """Run a setting once. Environment, users, noise and learner get streams of their own, all from one seed."""
    checks.whole("seed", seed, least=0)
    for_env, for_users, for_noise, for_learner = np.random.SeedSequence(seed).spawn(4)
    environment = envs.make(setting.env, for_env, **setting.env_parameters)
    population: Population
    if isinstance(environment, MDP):
        population, optimal_value = CountPopulation(environment, for_users), environment.optimal_value
    else:
        population, optimal_value = TrajectoryPopulation(environment, for_users), None
    problem = environment.problem(setting.episodes)
    learner = learners.make(setting.learner, problem, for_learner, **setting.learner_parameters)
    privatizer = privatizers.make(
        setting.privatizer,
        learner,
        epsilon=setting.epsilon,
        delta=setting.delta,
        seed=for_noise,
        **setting.privatizer_parameters,
    )
    began = time.perf_counter()
    history = learn(learner, population, privatizer, progress=progress)
    seconds = time.perf_counter() - began
    return Run(seed, optimal_value, history, privatizer.certificate(CountQuery.everything(problem)), seconds)


def run_seeds(
    setting: Setting, seeds: Iterable[int], progress: Callable[[int, int, int], None] | None = None
) -> Iterator[Run]:
    """Run a setting for each seed; `progress` is called with (seed, episodes played, episodes in all)."""
    for seed in seeds:
        yield run(setting, seed, None if progress is None else functools.partial(progress, seed))


def summary(setting: Setting, runs: list[Run]) -> dict[str, Any]:
    """The figures of a setting as JSON values."""
    regrets = np.array([run.history.total_regret for run in runs])
    optima = [run.optimal_value for run in runs if run.optimal_value is not None]
    known = bool(optima)
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
        "reward_per_episode": float(np.mean([run.history.reward.sum() for run in runs])) / setting.episodes,
        "switches": {"mean": float(np.mean([run.history.switches for run in runs]))},
        "optimal_value": float(np.mean(optima)) if known else None,
        "certificate": None if runs[0].certificate is None else runs[0].certificate.as_dict(),
        "seconds": sum(run.seconds for run in runs),
    }
