"""UCBVI's episodes, many per call: plan, play, count."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.compiling import compiled
from shufflerl.layout import Dynamics
from shufflerl.learners.ucbvi_kernels import Bonus, optimistic_policy
from shufflerl.planning_kernels import policy_value
from shufflerl.population_kernels import add_counts


@compiled
def add_noisy(sums: FloatArray, seen: FloatArray, noise: FloatArray) -> None:
    """Add what was seen and its noise to the sums, and forget it. In one loop: array expressions compile slowly."""
    total, part, added = sums.reshape(-1), seen.reshape(-1), noise.reshape(-1)
    for i in range(len(total)):
        total[i] += part[i] + added[i]
        part[i] = 0.0


@compiled
def play_episodes(
    planner: Generator,
    users: Generator,
    dynamics: Dynamics,
    moves: FloatArray,
    pays: FloatArray,
    noise_moves: FloatArray,
    noise_pays: FloatArray,
    added_variances: FloatArray,
    variance: float,
    bonus: Bonus,
    policies: PolicyArray,
    values: FloatArray,
) -> float:
    """One episode per entry of `policies` and `values`: plan, play one user, add its noisy counts to the sums.

    Rows lead everywhere, so that transitions stand in the order of `moves`. `policies[0]` comes in as the policy
    deployed so far. `noise_moves[t]` and `noise_pays[t]` are what the privatizer adds to the counts of episode t (no
    entries: nothing), by which the noise of the sums, of `variance` before the first episode, grows by
    `added_variances[t]`. Returns its variance after the last.
    """
    states = len(dynamics.start)
    value = np.empty(states)
    after = np.empty(states)
    noisy = len(noise_moves) > 0
    seen_moves = np.zeros_like(moves) if noisy else moves
    seen_pays = np.zeros_like(pays) if noisy else pays
    for t in range(len(policies)):
        policy = policies[t]
        if t > 0:
            for h, x in np.ndindex(policy.shape):
                policy[h, x] = policies[t - 1, h, x]
        optimistic_policy(planner, moves, pays, variance, bonus, policy, value, after)
        policy_value(dynamics, policy, value, after)
        total = 0.0
        for x in range(states):
            total += dynamics.start[x] * value[x]
        values[t] = total
        add_counts(users, dynamics, policy, 1, seen_moves.reshape(-1), seen_pays)
        if noisy:
            add_noisy(moves, seen_moves, noise_moves[t])
            add_noisy(pays, seen_pays, noise_pays[t])
            variance += added_variances[t]
    return variance
