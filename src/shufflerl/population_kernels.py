"""Drawing users' episodes: the counts of many at once, or one by one.

NumPy generators are passed in; numba draws from them the same stream that NumPy would.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.compiling import compiled, inlined
from shufflerl.layout import Dynamics
from shufflerl.planning_kernels import row_of

#: Counts are added into whole numbers, or into the running sums of a learner.
Tally = IntArray | FloatArray


@compiled
def invert(left: float, probabilities: FloatArray) -> int:
    """The index at which the cumulative probabilities exceed a uniform number."""
    for i in range(len(probabilities) - 1):
        left -= probabilities[i]
        if left < 0:
            return i
    # Rounding may leave the last index with a probability of zero: fall back to the last that has one.
    last = len(probabilities) - 1
    while probabilities[last] == 0:
        last -= 1
    return last


@compiled
def draw_one(rng: Generator, probabilities: FloatArray) -> int:
    """One index; where there is no choice nothing is drawn."""
    return 0 if len(probabilities) == 1 else invert(rng.random(), probabilities)


@compiled
def split(rng: Generator, users: int, probabilities: FloatArray, parts: IntArray) -> None:
    """Write a Multinomial(users, probabilities) draw into `parts`, by conditional binomials."""
    parts[:] = 0
    if users == 1:
        parts[draw_one(rng, probabilities)] = 1
        return
    left = users
    mass = 1.0
    last = -1
    for i in range(len(probabilities)):
        if left == 0:
            return
        p = probabilities[i]
        if p > 0:
            share = min(1.0, p / mass) if mass > 0 else 1.0
            parts[i] = rng.binomial(left, share)
            left -= parts[i]
            mass -= p
            last = i
    parts[last] += left  # the probabilities sum to one only up to rounding


@compiled
def paid(rng: Generator, users: int, mean: float) -> int | np.int64:
    """How many of so many users draw the reward bit 1."""
    return rng.binomial(users, mean) if users > 1 else np.int64(rng.random() < mean)


@compiled
def add_counts(rng: Generator, dynamics: Dynamics, policy: PolicyArray, users: int, moves: Tally, pays: Tally) -> None:
    """Play `users` episodes of one policy and add their counts to moves[transition] and pays[h, x, a, r].

    Layer by layer: given how many users are where, their next states are multinomial and their reward bits binomial,
    given the next state where they depend on it. This is the exact joint law of the counts, at a cost that does not
    depend on the number of users. What is drawn does not depend on whether rows list transitions of probability zero.
    """
    horizon, states = policy.shape
    row_starts, successors, probabilities, rewards, start, transition_rewards = dynamics
    here = np.empty(states, dtype=np.int64)
    there = np.empty(states, dtype=np.int64)
    parts = np.empty(states, dtype=np.int64)
    split(rng, users, start, here)
    for h in range(horizon):
        there[:] = 0
        for x in range(states):
            n = here[x]
            if n == 0:
                continue
            a = policy[h, x]
            told = h + 1 < horizon and len(transition_rewards) > 0
            wins = np.int64(0) if told else paid(rng, n, rewards[h, x, a])
            if h + 1 < horizon:
                first, end = row_of(row_starts, rewards, h, x, a)
                law = probabilities[first:end]
                if n == 1:
                    i = invert(rng.random(), law) if states > 1 else 0
                    moves[first + i] += 1
                    there[successors[first + i]] += 1
                    if told:
                        wins = paid(rng, n, transition_rewards[first + i])
                else:
                    split(rng, n, law, parts[: end - first])
                    for i in range(end - first):
                        moves[first + i] += parts[i]
                        there[successors[first + i]] += parts[i]
                        if told and parts[i] > 0:
                            wins += paid(rng, parts[i], transition_rewards[first + i])
            pays[h, x, a, 1] += wins
            pays[h, x, a, 0] += n - wins
        here, there = there, here


@compiled
def add_mixture_counts(
    rng: Generator,
    dynamics: Dynamics,
    policies: PolicyArray,
    weights: FloatArray,
    users: int,
    moves: Tally,
    pays: Tally,
) -> None:
    """`add_counts` for users who are each given one of the policies at random."""
    given = np.empty(len(weights), dtype=np.int64)
    split(rng, users, weights, given)
    for m in range(len(weights)):
        if given[m] > 0:
            add_counts(rng, dynamics, policies[m], given[m], moves, pays)


@inlined
def _play(rng: Generator, dynamics: Dynamics, policy: PolicyArray, episode: tuple[IntArray, ...], i: int) -> int:
    """Write a user's states, actions and reward bits into the i-th rows, and return its return.

    Where there is no choice nothing is drawn.
    """
    row_starts, successors, probabilities, rewards, start, transition_rewards = dynamics
    states, actions, bits = episode
    x = draw_one(rng, start)
    won = 0
    for h in range(len(policy)):
        a = policy[h, x]
        states[i, h], actions[i, h] = x, a
        pays, mean = rng.random(), rewards[h, x, a]
        if h + 1 < len(policy) and len(start) > 1:
            first, end = row_of(row_starts, rewards, h, x, a)
            t = first + invert(rng.random(), probabilities[first:end])
            x = successors[t]
            if len(transition_rewards) > 0:
                mean = transition_rewards[t]
        bits[i, h] = pays < mean
        won += pays < mean
    return won


@compiled
def play_users(
    rng: Generator, dynamics: Dynamics, policies: PolicyArray, weights: FloatArray, users: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Whole episodes, one user after the other: states[i, h], actions[i, h], reward bits[i, h]."""
    states = np.empty((users, policies.shape[1]), dtype=np.int64)
    actions = np.empty_like(states)
    bits = np.empty_like(states)
    for i in range(users):
        _play(rng, dynamics, policies[draw_one(rng, weights)], (states, actions, bits), i)
    return states, actions, bits


@compiled
def play_returns(rng: Generator, dynamics: Dynamics, policy: PolicyArray, users: int) -> FloatArray:
    """The sums of reward bits of so many users who play the policy, one user after the other."""
    returns = np.empty(users)
    unseen = np.empty((1, len(policy)), dtype=np.int64)
    for i in range(users):
        returns[i] = _play(rng, dynamics, policy, (unseen, unseen, unseen), 0)
    return returns
