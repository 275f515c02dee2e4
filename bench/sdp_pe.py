"""SDP-PE: what it loses, whether the optimum survives, and what it takes, beside limits and peers.

Seeds 500 to 599 were used for nothing else: constants were chosen on 10000 to 10100, tests use 0 to 11.
`python -m bench.sdp_pe NAME` is one measure of time and memory in a process of its own; `run` starts them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import optimize, sparse

from bench.measure import DELTA, Figure, in_process, medians, parties, print_measure, seconds, slowest_batch
from shufflerl import MDP, envs, learn, policy_sets
from shufflerl.arrays import BoolArray
from shufflerl.experiments.setting import Setting, run_seeds
from shufflerl.history import History
from shufflerl.learners.sdp_pe import SDPPE

SEEDS = range(500, 600)
PEER_SEEDS = range(500, 510)
EPISODES = 20_000
#: Budget and the most regret on RiverSwim.
LIMITS = ((None, 300.0), (5.0, 1150.0), (1.0, 3600.0), (0.5, 5100.0))


def run() -> list[Figure]:
    """Regret, survival and switches on RiverSwim and the bandit; time and memory of both policy sets; peers."""
    return [*riverswim(), *bandit(), *times(), *in_processes(), *enumeration(), *oracle()]


# What it loses.


@dataclass(frozen=True)
class Outcome:
    """The runs of many seeds, put together."""

    regret: float  # the mean
    survival: float  # share of runs that kept an optimal policy
    switches: int  # the most

    @classmethod
    def of(cls, environment: Callable[[int], MDP], seeds: Iterable[int], epsilon: float | None) -> Outcome:
        """Run `practical` with its defaults."""
        regrets, kept, switches = [], [], []
        for seed in seeds:
            mdp = environment(seed)
            history, learner = play(mdp, seed, EPISODES, epsilon)
            _, best = learner.policies.best(mdp.transitions, mdp.rewards, mdp.start, np.random.default_rng(0))
            regrets.append(history.total_regret)
            kept.append(math.isclose(best, mdp.optimal_value))
            switches.append(history.switches)
        return cls(float(np.mean(regrets)), float(np.mean(kept)), max(switches))


def riverswim() -> list[Figure]:
    """Regret, survival and switches on RiverSwim, beside UCBVI with a server that is trusted with every trajectory."""
    figures = []
    for epsilon, limit in LIMITS:
        outcome = Outcome.of(lambda _: table("riverswim"), SEEDS, epsilon)
        name = f"RiverSwim, {'no privacy' if epsilon is None else f'epsilon={epsilon:g}'}"
        peer = "UCBVI, no privacy" if epsilon is None else "UCBVI, trusted server"
        figures += [
            Figure.under(limit, f"regret, {name}", "", outcome.regret, ucbvi_regret("riverswim", epsilon), peer),
            Figure.at_least(0.99, f"optimum survives, {name}", "of runs", outcome.survival, 1.0, "always"),
            Figure.at_most(1.0, f"switches, {name}", "", outcome.switches, 90, "limit"),
        ]
    return figures


def bandit() -> list[Figure]:
    """The bandit of 20 arms at epsilon 1, every seed with arms of its own."""
    outcome = Outcome.of(lambda seed: table("bandit", seed), SEEDS, 1.0)
    peer = ucbvi_regret("bandit", 1.0)
    return [
        Figure.under(1600, "regret, bandit, epsilon=1", "", outcome.regret, peer, "UCBVI, trusted server"),
        Figure.at_least(0.95, "optimum survives, bandit, epsilon=1", "of runs", outcome.survival, 1.0, "always"),
    ]


def ucbvi_regret(environment: str, epsilon: float | None) -> float:
    """The mean regret of UCBVI at the same budget, which noises running sums at a trusted server."""
    if epsilon is None:
        setting = Setting(environment, "ucbvi", "none", EPISODES)
    else:
        setting = Setting(environment, "ucbvi", "central", EPISODES, epsilon, DELTA)
    return float(np.mean([run.history.total_regret for run in run_seeds(setting, PEER_SEEDS)]))


def play(mdp: MDP, seed: int, episodes: int, epsilon: float | None, **options: Any) -> tuple[History, SDPPE]:
    """One run."""
    learner, population, privatizer = parties(partial(SDPPE, **options), mdp, seed, episodes, epsilon)
    return learn(learner, population, privatizer), learner


def table(name: str, seed: int | None = None, **parameters: Any) -> MDP:
    """An environment given as a table."""
    mdp = envs.make(name, seed, **parameters)
    assert isinstance(mdp, MDP)
    return mdp


# What it takes.


def times() -> list[Figure]:
    """Whole runs on RiverSwim at epsilon 1, the median of seeds."""
    mdp = table("riverswim")

    def paper(policies: str) -> Callable[[int], float]:
        return lambda seed: seconds(lambda: play(mdp, seed, 10**17, 1.0, constants="paper", policies=policies))

    measures = (lambda seed: seconds(lambda: play(mdp, seed, EPISODES, 1.0)), paper("enumerated"), paper("product"))
    for measure in measures:
        measure(0)
    practical, enumerated, product = medians(5, *measures)
    return [
        Figure.under(0.1, "a run, product set, practical, K=20,000", "s", practical),
        Figure.under(6, "a run, enumerated set, the paper's constants, K=1e17", "s", enumerated),
        Figure.under(0.5, "a run, product set, the paper's constants, K=1e17", "s", product),
    ]


def in_processes() -> list[Figure]:
    """Time and peak memory, each in a process of its own."""
    (printed, _), (apart, apart_memory), (stage, stage_memory) = (in_process("bench.sdp_pe", name) for name in MEASURES)
    large = "stage, product set, X=100 A=5 H=20, K=20,000, no privacy"
    return [
        Figure.under(6, "a run, enumerated set, the paper's constants, K=20,000", "s", printed),
        Figure.under(6, "a run, enumerated set, 2^24 policies told apart, K=20,000", "s", apart),
        Figure.under(1500, "its process", "MB", apart_memory),
        Figure.under(1, f"slowest {large}", "s", stage),
        Figure.under(500, "its process", "MB", stage_memory),
    ]


def enumerated_printed() -> float:
    """RiverSwim with the printed constants, which eliminate nothing at this K."""
    return seconds(lambda: play(table("riverswim"), 500, EPISODES, None, constants="paper"))


def enumerated_apart() -> float:
    """A dense MDP that starts anywhere, constants small enough to eliminate at this K: every policy is evaluated."""
    dense = table("random", 7, n_states=4, n_actions=2, horizon=6)
    mdp = MDP(dense.transitions, dense.rewards, start=np.full(4, 0.25))
    return seconds(lambda: play(mdp, 500, EPISODES, None, constants="paper", c=3e-5, c1=1e-3))


def large_stage() -> float:
    """The slowest stage of a run: what the learner takes to plan and to learn, without the users."""
    mdp = table("random", 7, n_states=100, n_actions=5, horizon=20)
    return slowest_batch(*parties(SDPPE, mdp, 500, EPISODES, None))


#: What `in_process` can measure.
MEASURES: dict[str, Callable[[], float]] = {
    "enumerated-printed": enumerated_printed,
    "enumerated-apart": enumerated_apart,
    "large-stage": large_stage,
}


# Peers.


def enumeration() -> list[Figure]:
    """Eliminate from 2^18 policies: evaluate and compare every one, compiled and in plain NumPy."""
    dense = table("random", 7, n_states=3, n_actions=2, horizon=6)
    start = np.full(3, 1 / 3)
    mdp = MDP(dense.transitions, dense.rewards, start=start)
    every = policy_sets.make("enumerated", 6, 3, 2)
    margin = 0.5

    def ours() -> policy_sets.PolicySet:
        return every.eliminate(mdp.transitions, mdp.rewards, start, margin)

    assert round(2 ** ours().log2_size) == np.count_nonzero(survivors(mdp, margin))
    mine, peer = medians(5, lambda _: 1e3 * seconds(ours), lambda _: 1e3 * seconds(lambda: survivors(mdp, margin)))
    return [Figure.at_most(0.1, "eliminate, 2^18 policies", "ms", mine, peer, "NumPy, all at once")]


def survivors(mdp: MDP, margin: float) -> BoolArray:
    """Which of all deterministic policies stay, in plain NumPy."""
    codes = np.arange(mdp.n_actions ** (mdp.horizon * mdp.n_states))
    digits = mdp.n_actions ** np.arange(mdp.horizon * mdp.n_states)
    policies = (codes[:, None] // digits % mdp.n_actions).reshape(-1, mdp.horizon, mdp.n_states)
    states = np.arange(mdp.n_states)
    values = mdp.rewards[-1, states, policies[:, -1]]
    for h in reversed(range(mdp.horizon - 1)):
        ahead = np.einsum("mxy,my->mx", mdp.transitions[h, states, policies[:, h]], values)
        values = mdp.rewards[h, states, policies[:, h]] + ahead
    expected = values @ mdp.start
    return np.asarray(expected > expected.max() - margin)


def oracle() -> list[Figure]:
    """The best policy of RiverSwim's product set: a dynamic program, and HiGHS on the occupancy polytope."""
    mdp = table("riverswim")
    everything = policy_sets.make("product", mdp.horizon, mdp.n_states, mdp.n_actions)
    rng = np.random.default_rng(0)
    program = occupancy_program(mdp)

    def ours() -> float:
        return everything.best(mdp.transitions, mdp.rewards, mdp.start, rng)[1]

    def highs() -> float:
        return -float(optimize.linprog(**program, method="highs").fun)

    assert math.isclose(ours(), highs(), rel_tol=1e-6)
    mine, peer = medians(5, lambda _: 1e3 * seconds(ours, 1000), lambda _: 1e3 * seconds(highs, 20))
    return [Figure.at_most(0.1, "best policy of a product set, RiverSwim", "ms", mine, peer, "HiGHS, built before")]


def occupancy_program(mdp: MDP) -> dict[str, Any]:
    """Maximise expected reward over d[h, x, a] >= 0 whose users enter every (h, x) as often as they leave it."""
    horizon, states, actions = mdp.rewards.shape
    flow = np.zeros((horizon, states, *mdp.rewards.shape))
    for h in range(horizon):
        flow[h, np.arange(states), h, np.arange(states)] = 1.0
        if h:
            flow[h, :, h - 1] = -mdp.transitions[h - 1].transpose(2, 0, 1)
    entering = np.zeros((horizon, states))
    entering[0] = mdp.start
    return {
        "c": -mdp.rewards.ravel(),
        "A_eq": sparse.csr_array(flow.reshape(horizon * states, horizon * states * actions)),
        "b_eq": entering.ravel(),
    }


if __name__ == "__main__":
    measure = MEASURES[sys.argv[1]]
    measure()  # compile
    print_measure(measure)
