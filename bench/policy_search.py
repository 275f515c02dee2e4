"""Policy search: users that each task takes under each noise, beside its target and `cma` on exact returns.

A run reaches its target with the batch after which the mean of its last five policies does (20 fresh episodes each),
and fails if it never does, or if the policy it deploys last (100 fresh episodes) is below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, TypeVar

import joblib
import numpy as np

from bench.measure import Figure, cpu_seconds
from shufflerl import envs, privatizers
from shufflerl.envs.players import ControlTask, Player
from shufflerl.envs.sensing import SpectrumSensing
from shufflerl.experiments.setting import Setting, prepare
from shufflerl.experiments.setting import run as run_seed
from shufflerl.learners.policy_search import PolicySearch
from shufflerl.mdp import MDP, Mixture
from shufflerl.planning import mixture_value
from shufflerl.policies import Network
from shufflerl.population import ReturnPopulation

#: Seeds that had no part in choosing the learner's constants; the first twenty from each of 0 to 900 are used up, and
#: the lake was seen on the others once, before its users were drawn as Gymnasium's.
DELTA, SEEDS, FEW, LAKE_SEEDS = 1e-6, range(950, 970), range(950, 960), range(970, 990)
RECENT, FRESH, FINAL = 5, 20, 100
#: Users of every run, of this learner and of `cma`; at epsilon 1/2 twice as many.
USERS = 50_000
#: But of the widest perceptron, which plays long.
WIDE = 20_000

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What is to be reached: a return, and in how many users by either law of noise at epsilon 1."""

    id: str
    goal: float
    servers: int
    users: int
    hidden: int | None = None

    @property
    def name(self) -> str:
        """Task and family."""
        return self.id.partition("-")[0] + ("" if self.hidden is None else f", MLP of {self.hidden}")


TASKS = (
    Task("CartPole-v1", 475, 3_500, 6_000),
    Task("CartPole-v1", 475, 5_500, 9_000, hidden=16),
    Task("MountainCar-v0", -115, 12_000, 18_000),
    Task("Acrobot-v1", -100, 12_000, 20_000),
)

#: Privatizers by the model that they stand for, with their parameters.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "servers": ("shuffle", {"noise": "servers"}),
    "users": ("shuffle", {}),
    "central": ("central", {}),
    "local": ("local-sampled", {}),
}


def each(one: Callable[[int], T], seeds: range) -> list[T]:
    """What every seed gives, on as many processes as there are processors."""
    results: list[T] = joblib.Parallel(n_jobs=joblib.cpu_count())(joblib.delayed(one)(seed) for seed in seeds)
    return results


def run() -> list[Figure]:
    """Users to reach and hold a return at epsilon 1 and 1/2, and without privacy beside `cma`; width; spectrum."""
    return list(figures())


def figures() -> Iterator[Figure]:
    """One after the other, the most telling first."""
    at_one: dict[tuple[str, str], float] = {}
    for model in ("servers", "users"):
        for task in TASKS:
            target = getattr(task, model)
            found = users_to_reach(task, model, 1.0, USERS)
            at_one[task.name, model] = found.median
            yield found.figure(f"{task.name} >= {task.goal:g}, eps=1, noise by {model}", target)
    for model in ("servers", "users"):
        for task in (TASKS[0], TASKS[2]):
            target = 2 * getattr(task, model)
            found = users_to_reach(task, model, 0.5, 2 * USERS, seeds=FEW)
            yield found.figure(f"{task.name} >= {task.goal:g}, eps=1/2, noise by {model}", target)
    for task in TASKS:
        peer = median(each(partial(cma_users, task), SEEDS))
        found = users_to_reach(task, "none", None, USERS)
        yield found.figure(f"{task.name} >= {task.goal:g}, no privacy", 1.5 * peer, f"1.5 x cma {peer:,.0f}")
    narrow = at_one[TASKS[1].name, "users"]
    wide = users_to_reach(Task("CartPole-v1", 475, 0, 0, hidden=256), "users", 1.0, WIDE, seeds=FEW)
    yield wide.figure("CartPole, MLP of 1,537 parameters beside 97", 1.5 * narrow, f"1.5 x {narrow:,.0f}")
    yield spectrum(8)
    yield from frozen_lake()
    yield cpu()


@dataclass(frozen=True)
class Reached:
    """Users that each seed took, infinite where it failed."""

    users: list[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.users)

    def figure(self, what: str, target: float, peer: str = "target") -> Figure:
        """Reached if the median is within the target and no seed failed."""
        failed = sum(math.isinf(users) for users in self.users)
        good = self.median <= target and not failed
        said = f"at most {target:,.0f}, none of {len(self.users)} failed" + f" ({failed} did)" * bool(failed)
        return Figure(what, "users", self.median, target, peer, said, good)


def users_to_reach(task: Task, model: str, epsilon: float | None, episodes: int, seeds: range = SEEDS) -> Reached:
    """Median users of one setting."""
    return Reached(each(partial(_reach, task, model, epsilon, episodes), seeds))


def _reach(task: Task, model: str, epsilon: float | None, episodes: int, seed: int) -> float:
    game = envs.make(task.id, seed)
    assert isinstance(game, Player)
    family = {} if task.hidden is None else {"family": "mlp", "hidden": task.hidden}
    learner = PolicySearch(game.problem(episodes), seed, **family)  # type: ignore[arg-type]
    name, parameters = MODELS[model]
    budget = {} if epsilon is None else {"epsilon": epsilon, "delta": DELTA, "seed": seed}
    serving = privatizers.make(name, learner, **budget, **parameters)  # type: ignore[arg-type]
    if noise := serving.expected_noise(learner.widest_query):
        learner.expect(noise)
    population, rng = ReturnPopulation(game, seed), np.random.default_rng(10**6 + seed)
    recent: list[float] = []
    reached = math.inf
    while (batch := learner.next_batch()) is not None:
        learner.observe(serving.release(population.play(batch)))
        if learner.progress.phase == "commit" and math.isfinite(reached):
            break  # it plays one policy to the end, which the rest would tell nothing more of
        if math.isinf(reached):
            recent = [*recent, _value(game, learner.released, FRESH, rng)][-RECENT:]
            if len(recent) == RECENT and np.mean(recent) >= task.goal:
                reached = learner.episodes_played
    return reached if _value(game, learner.released, FINAL, rng) >= task.goal else math.inf


def _value(game: Player, mixture: Mixture, episodes: int, rng: np.random.Generator) -> float:
    return float(game.returns(mixture, np.zeros(episodes, dtype=np.int64), rng).mean())


def cma_users(task: Task, seed: int) -> float:
    """Users that the package `cma` takes on exact returns, one episode for each of its policies."""
    game, rng = ControlTask(task.id), np.random.default_rng(seed)
    public = game.problem(1)
    family = Network(public.inputs, public.actions, () if task.hidden is None else (task.hidden,))
    options = {"seed": seed + 1, "verbose": -9, "CMA_diagonal": family.size > 30}
    search = import_module("cma").CMAEvolutionStrategy(np.zeros(family.size), 1.0, options)
    recent: list[float] = []
    played = 0
    while played < USERS:
        policies = np.array(search.ask())
        mixture = Mixture(policies, np.full(len(policies), 1 / len(policies)), family)
        returns = game.returns(mixture, np.arange(len(policies)), rng)
        search.tell(list(policies), (-returns).tolist())
        played += len(policies)
        now = Mixture(np.array(search.mean)[None], [1.0], family)
        recent = [*recent, _value(game, now, FRESH, rng)][-RECENT:]
        if len(recent) == RECENT and np.mean(recent) >= task.goal:
            return float(played)
    return math.inf


def spectrum(channels: int) -> Figure:
    """How far users get from the best fixed channel to the best policy known."""
    game = envs.make("spectrum-sensing", n_channels=channels)
    assert isinstance(game, SpectrumSensing)
    fixed, known = game.best_fixed(), game.best_known(50_000, np.random.default_rng(0))
    values = each(partial(_sensed, game), SEEDS)
    public = game.problem(1)
    family = Network(public.inputs, public.actions, head=public.head)
    likeliest = Mixture(np.eye(1, family.size), [1.0], family)
    untaught = _value(game, likeliest, 50_000, np.random.default_rng(0))
    shares = [(value - fixed) / (known - fixed) for value in [*values, untaught]]
    share = median(shares[:-1])
    what = f"spectrum sensing, {channels} channels, eps=1, 20,000 users: of the way to the best"
    said = f"at least 0.95; where it is likeliest to be heard, which learns nothing: {shares[-1]:.3f}"
    return Figure(what, "share", share, 0.95, "target", said, share >= 0.95)


def _sensed(game: SpectrumSensing, seed: int) -> float:
    """Mean return of the policy that 20,000 users end with."""
    made = prepare(Setting("spectrum-sensing", "policy-search", "shuffle", 20_000, 1.0, DELTA), seed)
    assert isinstance(made.learner, PolicySearch)
    if noise := made.privatizer.expected_noise(made.learner.widest_query):
        made.learner.expect(noise)
    while (batch := made.learner.next_batch()) is not None:
        made.learner.observe(made.privatizer.release(made.population.play(batch)))
    return _value(game, made.learner.released, 5_000, np.random.default_rng(seed))


def frozen_lake() -> Iterator[Figure]:
    """Regret and the policy deployed last, of 200,000 users of a large slippery lake."""
    lake = envs.make("FrozenLake8x8-v1")
    assert isinstance(lake, MDP)
    setting = Setting(
        "FrozenLake8x8-v1",
        "policy-search",
        "shuffle",
        200_000,
        1.0,
        DELTA,
        learner_parameters={"highest": 1},
        privatizer_parameters={"noise": "servers"},
    )
    runs = each(partial(run_seed, setting), LAKE_SEEDS)
    regret = median(one.history.total_regret for one in runs)
    value = median(mixture_value(lake, one.history.mixture(len(one.history) - 1)) for one in runs)
    yield Figure.under(50_000, "FrozenLake8x8, H=200, eps=1, K=200,000, noise by servers: regret", "reward", regret)
    yield Figure("the same: policy deployed last", "reward", value, 0.8, "target", "at least 0.8", value >= 0.8)


def cpu() -> Figure:
    """Processor seconds of a whole run."""
    setting = Setting("CartPole-v1", "policy-search", "shuffle", 15_000, 1.0, DELTA)
    spent = [cpu_seconds(lambda seed=seed: run_seed(setting, seed)) for seed in FEW[:5]]  # type: ignore[misc]
    return Figure.under(1.0, "CartPole, 15,000 users, eps=1", "CPU s", median(spent))


if __name__ == "__main__":
    for figure in figures():
        print(figure, flush=True)
