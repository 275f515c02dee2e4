"""What the suite runs, as plain constants: environments, budgets, episodes, seeds and contenders.

Seeds that are reported were never tuned on: those are from `FIRST_TUNING_SEED` on. UCBVI was tuned on the `TUNING`
environments (other sizes, other draws), `optimistic` on some of those reported too (docs/optimistic.md says which).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shufflerl import checks
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.setting import Setting
from shufflerl.registry import nearest

#: Name, then the environment and its parameters. A random MDP is one `instance`, the same for all seeds; permuted
#: rivers and DeepSea rename their actions anew for every seed, which is the same problem for a learner that breaks
#: ties at random.
Environments = Mapping[str, tuple[str, dict[str, Any]]]

ENVIRONMENTS: Environments = {
    "RiverSwim 4/6": ("riverswim", {"n_states": 4, "horizon": 6}),
    "RiverSwim 4/6 permuted": ("riverswim", {"n_states": 4, "horizon": 6, "permuted": True}),
    "RiverSwim 6/12": ("riverswim", {"n_states": 6, "horizon": 12}),
    "RiverSwim 6/12 permuted": ("riverswim", {"n_states": 6, "horizon": 12, "permuted": True}),
    "DeepSea 5": ("deepsea", {"size": 5}),
    "DeepSea 7": ("deepsea", {"size": 7}),
    "dense": ("random", {"n_states": 5, "n_actions": 3, "horizon": 5, "instance": 1}),
    "dense homogeneous": ("random", {"n_states": 5, "n_actions": 3, "horizon": 5, "homogeneous": True, "instance": 2}),
    "sparse": ("random", {"n_states": 10, "n_actions": 3, "horizon": 8, "branching": 3, "instance": 3}),
    "sparse homogeneous": (
        "random",
        {"n_states": 10, "n_actions": 3, "horizon": 8, "branching": 3, "homogeneous": True, "instance": 4},
    ),
    "FrozenLake": ("gymnasium", {"id": "FrozenLake-v1", "horizon": 16}),
    "FrozenLake not slippery": (
        "gymnasium",
        {"id": "FrozenLake-v1", "horizon": 8, "options": '{"is_slippery": false}'},
    ),
    "spectrum access": ("spectrum", {"n_channels": 3, "horizon": 8}),
    "bandit": ("bandit", {"n_actions": 20, "instance": 5}),
}

TUNING: Environments = {
    "RiverSwim 5/8": ("riverswim", {"n_states": 5, "horizon": 8}),
    "RiverSwim 3/5 permuted": ("riverswim", {"n_states": 3, "horizon": 5, "permuted": True}),
    "DeepSea 4": ("deepsea", {"size": 4}),
    "dense": ("random", {"n_states": 6, "n_actions": 2, "horizon": 6, "instance": 101}),
    "sparse homogeneous": (
        "random",
        {"n_states": 8, "n_actions": 4, "horizon": 6, "branching": 2, "homogeneous": True, "instance": 102},
    ),
    "sparse": ("random", {"n_states": 12, "n_actions": 2, "horizon": 6, "branching": 3, "instance": 103}),
    "spectrum access": ("spectrum", {"n_channels": 2, "horizon": 6}),
    "bandit": ("bandit", {"n_actions": 10, "instance": 104}),
}

#: None is without privacy: true counts.
BUDGETS: tuple[float | None, ...] = (None, 5.0, 1.0, 0.5, 0.1)
DELTA = 1e-5
EPISODES = (20_000, 200_000, 1_000_000)
FIRST_SEED = 0
FIRST_TUNING_SEED = 10_000


@dataclass(frozen=True)
class Contender:
    """A learner with the privacy model it is made for."""

    learner: str
    privatizer: str

    def parameters(self, epsilon: float | None, episodes: int) -> dict[str, Any]:
        """What it is given beyond its defaults."""
        return tuned_ucbvi(epsilon, episodes) if self.learner == "ucbvi" else {}

    def setting(self, environment: tuple[str, dict[str, Any]], epsilon: float | None, episodes: int) -> Setting:
        """The contender in an environment, at a budget."""
        name, parameters = environment
        return Setting(
            env=name,
            learner=self.learner,
            privatizer="none" if epsilon is None else self.privatizer,
            episodes=episodes,
            epsilon=epsilon,
            delta=None if epsilon is None else DELTA,
            env_parameters=parameters,
            learner_parameters=self.parameters(epsilon, episodes),
        )


#: UCBVI with a trusted server that counts continually (matrix factorisation) is UCBVI-JDP: it need not trust a
#: shuffler less, but a server more, and has less noise per counter for it.
CONTENDERS: Mapping[str, Contender] = {
    "optimistic": Contender("optimistic", "shuffle"),
    "SDP-PE": Contender("sdp-pe", "shuffle"),
    "UCBVI-JDP": Contender("ucbvi", "central"),
}

#: The grid that UCBVI's scale and number of plans were chosen from. Without privacy more plans are better, and more
#: than 20,000 only take longer; with it every plan is a release, and many releases are much noise in their sums.
SCALES = (0.005, 0.02, 0.05, 0.2)
PLANS = {20_000: (2_000, 500, 100, 30), 200_000: (5_000, 2_000, 500, 100)}
MAX_PLANS = 20_000

#: The choice of (scale, plans) for each number of episodes and budget.
UCBVI_TUNED: dict[int, dict[float | None, tuple[float, int]]] = {
    20_000: {None: (0.02, 20_000), 5.0: (0.005, 500), 1.0: (0.005, 100), 0.5: (0.02, 100), 0.1: (0.005, 30)},
    200_000: {None: (0.05, 20_000), 5.0: (0.005, 5_000), 1.0: (0.005, 2_000), 0.5: (0.005, 500), 0.1: (0.005, 500)},
}


def tuned_ucbvi(epsilon: float | None, episodes: int) -> dict[str, Any]:
    """UCBVI's parameters as tuned at the largest K up to this one, or at the smallest."""
    nearest_tuned = max((steps for steps in UCBVI_TUNED if steps <= episodes), default=min(UCBVI_TUNED))
    return _ucbvi(*UCBVI_TUNED[nearest_tuned][epsilon], episodes)


def _ucbvi(scale: float, plans: int, episodes: int) -> dict[str, Any]:
    return {"scale": scale, "batch": -(-episodes // plans)}


def cells(
    *,
    environments: Environments = ENVIRONMENTS,
    budgets: Iterable[float | None] = BUDGETS,
    episodes: Iterable[int] = EPISODES,
    contenders: Iterable[str] = tuple(CONTENDERS),
    seeds: int,
) -> list[Cell]:
    """Every run of the suite, or of a part of it."""
    count, episodes, contenders = checks.whole("seeds", seeds, least=1), tuple(episodes), tuple(contenders)
    if FIRST_SEED + count > FIRST_TUNING_SEED:
        raise InvalidInputError(f"seeds is {count}; expected at most {FIRST_TUNING_SEED}: those beyond were tuned on.")
    for name in contenders:
        if name not in CONTENDERS:
            raise UnknownNameError(f"There is no contender {name!r}.{nearest(name, CONTENDERS)}")
    return [
        Cell(CONTENDERS[name].setting(environment, epsilon, steps), seed)
        for steps in episodes
        for environment in environments.values()
        for epsilon in budgets
        for name in contenders
        for seed in range(FIRST_SEED, FIRST_SEED + count)
    ]


def tuning_cells(episodes: int, seeds: int) -> list[Cell]:
    """Every run that UCBVI's constants at a number of episodes are chosen by: the grid on the tuning environments."""
    if episodes not in PLANS:
        raise InvalidInputError(
            f"episodes is {episodes}; expected one of those tuned at: {', '.join(map(str, PLANS))}."
        )
    last = FIRST_TUNING_SEED + checks.whole("seeds", seeds, least=1)
    return [
        Cell(replace(setting, learner_parameters=_ucbvi(scale, plans, episodes)), seed)
        for environment in TUNING.values()
        for epsilon in BUDGETS
        for setting in [CONTENDERS["UCBVI-JDP"].setting(environment, epsilon, episodes)]
        for plans in ((MAX_PLANS,) if epsilon is None else PLANS[episodes])
        for scale in SCALES
        for seed in range(FIRST_TUNING_SEED, last)
    ]
