"""A batch of a trillion users beside a batch of a thousand: counts are drawn at a cost independent of users."""

from __future__ import annotations

import numpy as np

from bench.measure import Figure, medians, seconds
from shufflerl import MDP, Batch, CountPopulation, CountQuery, Mixture, envs
from shufflerl.planning import greedy, optimal_q

FEW, MANY = 10**3, 10**12
CALLS, REPEATS = 500, 15


def run() -> list[Figure]:
    """Time of CountPopulation.play for 1e12 users and for 1e3, RiverSwim X=4 H=6, the optimal policy."""
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    population = CountPopulation(mdp, seed=1)
    policy = greedy(optimal_q(mdp.transitions, mdp.rewards), np.random.default_rng(2))
    query = CountQuery.everything(mdp.problem(MANY))
    few, many = (Batch(0, users, Mixture.single(policy), query) for users in (FEW, MANY))
    for batch in (few, many):
        population.play(batch)

    def per_batch(batch: Batch) -> float:
        return 1e3 * seconds(lambda: population.play(batch), CALLS)

    of_many, of_few = medians(REPEATS, lambda _: per_batch(many), lambda _: per_batch(few))
    return [
        Figure.at_most(2, "a batch of 1e12 users", "ms", of_many, of_few, "a batch of 1e3"),
        Figure.under(1, "a batch of 1e12 users", "ms", of_many),
        Figure.under(1, "a batch of 1e3 users", "ms", of_few),
    ]
