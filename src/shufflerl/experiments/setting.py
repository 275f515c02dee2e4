"""One setting, many seeds: what `shufflerl run` does, as functions."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shufflerl import attacks, checks, envs, learners, privatizers
from shufflerl.compiling import compiler_clock
from shufflerl.errors import InvalidInputError
from shufflerl.history import History
from shufflerl.loop import Progress, learn
from shufflerl.mdp import MAX_EPISODES, MDP, UNIT, Units
from shufflerl.population import CountPopulation, Population, ReturnPopulation, StepPopulation, TrajectoryPopulation
from shufflerl.privacy.certificate import Certificate
from shufflerl.registry import UserEntry
from shufflerl.seeding import stream
from shufflerl.steps import StepProblem

#: Episodes of the policy deployed last, which are played after the run.
FINAL_EPISODES = 100


@dataclass(frozen=True)
class Setting:
    """What to run, all by name and keyword.

    Environment, learner and privatizer may also be given as they are, if they stand at the top of a module: they are
    then known by where they are found, such as "my_module:MyLearner".
    """

    env: str
    learner: str
    privatizer: str
    episodes: int
    epsilon: float | None
    delta: float | None
    env_parameters: dict[str, Any]
    learner_parameters: dict[str, Any]
    privatizer_parameters: dict[str, Any]
    #: Users who lie, if any do: {"attack": a name of `attacks`, "share": of all users}.
    liars: dict[str, Any]

    def __init__(
        self,
        env: str | Callable[..., MDP | envs.GymSimulator],
        learner: str | Callable[..., learners.Learner],
        privatizer: str | Callable[..., privatizers.Privatizer],
        episodes: int,
        epsilon: float | None = None,
        delta: float | None = None,
        env_parameters: dict[str, Any] | None = None,
        learner_parameters: dict[str, Any] | None = None,
        privatizer_parameters: dict[str, Any] | None = None,
        liars: dict[str, Any] | None = None,
    ) -> None:
        values: dict[str, Any] = {
            "env": envs.ENVIRONMENTS.name(env),
            "learner": learners.LEARNERS.name(learner),
            "privatizer": privatizers.PRIVATIZERS.name(privatizer),
            "episodes": checks.whole("episodes", episodes, least=1, most=MAX_EPISODES),
            "epsilon": epsilon,
            "delta": delta,
            "env_parameters": env_parameters or {},
            "learner_parameters": learner_parameters or {},
            "privatizer_parameters": privatizer_parameters or {},
            "liars": liars or {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def own(self) -> tuple[UserEntry, ...]:
        """What of it is the user's own."""
        named = {self.env: envs.ENVIRONMENTS, self.learner: learners.LEARNERS, self.privatizer: privatizers.PRIVATIZERS}
        entries = (registry.entry(name) for name, registry in named.items())
        return tuple(entry for entry in entries if isinstance(entry, UserEntry))

    def environment(self, seed: int) -> envs.Environment:
        """The environment that a seed's run lives in."""
        return envs.make(self.env, checks.whole("seed", seed, least=0), **self.env_parameters)


@dataclass(frozen=True, eq=False)
class Run:
    """One seed's run; `records` are its learner's, `seconds` how long it learned, without compilation.

    What it earned and lost is as inside, with rewards of 0 to 1; `units` are the environment's own. `final_return` is
    the mean of 100 fresh episodes of the policy deployed last, in the environment's own units; None where rewards are
    bits and regret or what was earned says as much.
    """

    seed: int
    optimal_value: float | None
    history: History
    certificate: Certificate | None
    records: list[dict[str, Any]]
    seconds: float
    final_return: float | None
    units: Units = UNIT
    shape: tuple[int, int, int] = (0, 0, 0)  # steps, states, actions


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that a seed's run needs, made and checked; nothing has been played yet."""

    environment: envs.Environment
    population: Population
    learner: learners.Learner
    privatizer: privatizers.Privatizer
    optimal_value: float | None
    units: Units

    @property
    def certificate(self) -> Certificate | None:
        """What the run guarantees to its users."""
        return self.privatizer.certificate(self.learner.widest_query)


def prepare(setting: Setting, seed: int) -> Prepared:
    """Environment, users, noise and learner, which draw streams of their own from the one seed."""
    environment = setting.environment(seed)
    population: Population
    if isinstance(environment, MDP):
        population, optimal_value = CountPopulation(environment, seed), environment.optimal_value
    elif isinstance(environment, envs.Player):
        population, optimal_value = ReturnPopulation(environment, seed), None
    elif isinstance(environment, envs.SensingTiles):
        population, optimal_value = StepPopulation(environment, seed), None
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
        if isinstance(learner.problem, StepProblem):
            raise InvalidInputError("Liars tell whole episodes; choose a learner of tables.")
        population = attacks.LyingPopulation(environment, **setting.liars, episodes=setting.episodes, seed=seed)
        if setting.privatizer == "shuffle" and setting.privatizer_parameters.get("noise", "users") == "users":
            privatizer = attacks.Flooding(privatizer, population)
    return Prepared(
        environment=environment,
        population=population,
        learner=learner,
        privatizer=privatizer,
        optimal_value=optimal_value,
        units=environment.units,
    )


def run(setting: Setting, seed: int, progress: Progress | None = None) -> Run:
    """Run a setting once."""
    made = prepare(setting, seed)
    began = time.perf_counter()
    with compiler_clock() as compiling:
        history = learn(made.learner, made.population, made.privatizer, progress=progress)
        seconds = time.perf_counter() - began - compiling()
    return Run(
        seed=seed,
        optimal_value=made.optimal_value,
        history=history,
        certificate=made.certificate,
        records=made.learner.records,
        seconds=seconds,
        final_return=_final_return(made.environment, history, seed),
        units=made.units,
        shape=made.learner.widest_query.dimensions,
    )


def _final_return(environment: object, history: History, seed: int) -> float | None:
    if not isinstance(environment, envs.Player | envs.SensingTiles):
        return None
    last = history.mixture(len(history) - 1)
    given = np.full(FINAL_EPISODES, int(last.weights.argmax()))
    # Fresh episodes: no learner has seen any of this stream.
    return float(environment.returns(last, given, stream(seed, "environment")).mean())


#: Problems of fewer counters take no time to speak of.
LARGE = 500_000


def expected_seconds(setting: Setting, seed: int) -> float | None:
    """About how long a run will take, by its first batch; None for problems that are not large."""
    made = prepare(setting, seed)
    if made.learner.widest_query.size < LARGE:
        return None
    began = time.perf_counter()
    with compiler_clock() as compiling:
        learn(made.learner, made.population, made.privatizer, batches=1)
        return (time.perf_counter() - began - compiling()) * made.learner.max_batches


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
    figures: dict[str, Any] = {
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
        "final_return": {
            "mean": None if runs[0].final_return is None else float(np.mean([run.final_return for run in runs])),
            "per_seed": [run.final_return for run in runs],
        },
        "switches": {"mean": float(np.mean([run.history.switches for run in runs]))},
        "optimal_value": float(np.mean(optima)) if known else None,
        "certificate": None if runs[0].certificate is None else runs[0].certificate.as_dict(),
        "trace": runs[0].records or None,
        "seconds": sum(run.seconds for run in runs),
    }
    return figures | {"own_units": _in_own_units(figures, runs[0].units)}


def _in_own_units(figures: dict[str, Any], units: Units) -> dict[str, Any] | None:
    """The same where the environment has units of its own."""
    if units.ours:
        return None

    def each(convert: Callable[[float], float], value: float | None) -> float | None:
        return None if value is None else convert(value)

    return {
        "reward_low": units.low,
        "reward_high": units.high,
        "regret": {key: each(units.difference, figures["regret"][key]) for key in ("mean", "sd")},
        "reward_per_episode": each(units.value, figures["reward_per_episode"]),
        "optimal_value": each(units.value, figures["optimal_value"]),
    }
