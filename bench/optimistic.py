"""The optimistic learner: what it loses, how often it switches, and what it takes, beside limits.

Seeds 500 to 599 were used for nothing else. `python -m bench.optimistic NAME` is one measure of time and memory in a
process of its own; `run` starts them. Times are of the processor: what else the machine does is not counted.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from bench.measure import Figure, cpu_seconds, in_process, parties, print_measure, slowest_batch
from shufflerl import MDP, envs, learn
from shufflerl.history import History
from shufflerl.learners.optimistic import Optimistic

SEEDS = range(500, 600)
EPISODES = 20_000
#: Budget and the most mean regret on RiverSwim as it is, and with its actions permuted.
LIMITS = ((None, 20.0, 40.0), (5.0, 160.0, 420.0), (1.0, 470.0, 1050.0), (0.5, 760.0, 1750.0), (0.1, 2700.0, 5500.0))
LONG, LONG_LIMIT = 10**6, 900.0
MAX_SWITCHES = 88
#: Repeats of a timed run, of which the fastest counts.
REPEATS = 30


def run() -> list[Figure]:
    """Regret and switches on RiverSwim, with and without permuted actions; a run; batches of large problems."""
    return [*riverswim(), *times(), *scale()]


def riverswim() -> list[Figure]:
    """The mean regret of 100 seeds; its 95th percentile beside the median; the most switches."""
    cases = [(EPISODES, epsilon, False, limit) for epsilon, limit, _ in LIMITS]
    cases += [(EPISODES, epsilon, True, limit) for epsilon, _, limit in LIMITS]
    cases += [(LONG, 1.0, False, LONG_LIMIT)]
    figures, switches = [], 0
    for episodes, epsilon, permuted, limit in cases:
        runs = [play(table("riverswim", seed, permuted=permuted), seed, episodes, epsilon) for seed in SEEDS]
        regrets = [run.total_regret for run in runs]
        switches = max(switches, *(run.switches for run in runs))
        budget = "no privacy" if epsilon is None else f"epsilon={epsilon:g}"
        name = f"RiverSwim{' permuted' if permuted else ''}, K={episodes:,}, {budget}"
        tail = float(np.quantile(regrets, 0.95))
        figures += [
            Figure.under(limit, f"regret, {name}", "", float(np.mean(regrets))),
            Figure.at_most(3.0, "its 95th percentile", "", tail, float(np.median(regrets)), "median"),
        ]
    return [*figures, Figure.at_most(1.0, "switches, the most of all runs", "", switches, MAX_SWITCHES, "limit")]


def times() -> list[Figure]:
    """A whole run on RiverSwim after warm-up, the fastest of several."""
    figures = []
    for epsilon in (None, 1.0):
        action = partial(play, table("riverswim", 0), 500, EPISODES, epsilon)
        action()
        fastest = min(cpu_seconds(action) for _ in range(REPEATS))
        budget = "no privacy" if epsilon is None else f"epsilon={epsilon:g}"
        figures.append(Figure.under(40, f"a run, RiverSwim, K={EPISODES:,}, {budget}", "ms", 1e3 * fastest))
    return figures


def scale() -> list[Figure]:
    """The slowest batch of a run of all batches, and the memory of its process, users and noise included."""
    dense, dense_memory = in_process("bench.optimistic", "dense")
    sparse, sparse_memory = in_process("bench.optimistic", "sparse")
    return [
        Figure.under(0.6, "slowest batch, X=100 A=5 H=20, dense", "s", dense),
        Figure.under(2000, "its process", "MB", dense_memory),
        Figure.under(1.5, "slowest batch, X=1,000 A=5 H=20, 5 next states", "s", sparse),
        Figure.under(2000, "its process", "MB", sparse_memory),
    ]


def slowest_of(n_states: int, branching: int | None) -> float:
    """What the learner takes at most to plan a batch and to learn from it."""
    mdp = table("random", 7, n_states=n_states, n_actions=5, horizon=20, branching=branching)
    return slowest_batch(*parties(Optimistic, mdp, 500, 10**8, 1.0))


#: What `in_process` can measure: states, and next states of each.
MEASURES: dict[str, tuple[int, int | None]] = {"dense": (100, None), "sparse": (1000, 5)}


def play(mdp: MDP, seed: int, episodes: int, epsilon: float | None) -> History:
    """One run."""
    return learn(*parties(Optimistic, mdp, seed, episodes, epsilon))


def table(name: str, seed: int, **parameters: object) -> MDP:
    """An environment given as a table."""
    mdp = envs.make(name, seed, **parameters)
    assert isinstance(mdp, MDP)
    return mdp


if __name__ == "__main__":
    slowest_of(2, None)  # compile
    print_measure(partial(slowest_of, *MEASURES[sys.argv[1]]))
