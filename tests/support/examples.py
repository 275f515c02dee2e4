"""Small problems that many tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from shufflerl import planning
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.counts import Batch, CountQuery
from shufflerl.learners.optimistic.model import Model
from shufflerl.learners.optimistic.rows import Rows
from shufflerl.mdp import MDP, Mixture


def random_mdp(
    seed: int, horizon: int = 3, states: int = 3, actions: int = 2, *, sparse: bool = False, start: int | None = None
) -> MDP:
    """A dense MDP, or one where each row reaches only some states, known as its support."""
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.ones(states), size=(horizon - 1, states, actions))
    support = None
    if sparse:
        support = rng.random(transitions.shape) < 0.6
        support[..., 0] |= ~support.any(axis=-1)
        transitions = np.where(support, transitions, 0.0)
        transitions /= transitions.sum(axis=-1, keepdims=True)
    first = rng.dirichlet(np.ones(states)) if start is None else np.eye(states)[start]
    return MDP(transitions, rng.random((horizon, states, actions)), first, support)


def telling_mdp(seed: int, horizon: int = 3, states: int = 3, actions: int = 2, *, sparse: bool = False) -> MDP:
    """An MDP whose rewards depend on where a transition leads."""
    made = random_mdp(seed, horizon, states, actions, sparse=sparse)
    paid = np.random.default_rng(seed + 1).random(made.transitions.shape).round()
    rewards = np.append((made.transitions * paid).sum(axis=-1).clip(0, 1), made.rewards[-1:], axis=0)
    return MDP(made.transitions, rewards, made.start, made.support).paying(paid)


def unsteered_mdp(seed: int, horizon: int = 3, states: int = 3, actions: int = 2) -> MDP:
    """An MDP whose states no action changes."""
    made = random_mdp(seed, horizon, states, actions)
    moves = np.broadcast_to(made.transitions[:, :, :1], made.transitions.shape)
    return MDP(moves, made.rewards, made.start)


def random_mixture(mdp: MDP, size: int, seed: int) -> Mixture:
    rng = np.random.default_rng(seed)
    policies = rng.integers(mdp.n_actions, size=(size, mdp.horizon, mdp.n_states))
    return Mixture(policies, rng.dirichlet(np.ones(size)))


def full_batch(mdp: MDP, users: int, mixture: Mixture | None = None, index: int = 0) -> Batch:
    query = CountQuery.everything(mdp.problem(max(users, 1)))
    return Batch(index, users, mixture or random_mixture(mdp, 1, 0), query)


def all_policies(mdp: MDP) -> PolicyArray:
    cells = mdp.horizon * mdp.n_states
    flat = np.array(list(itertools.product(range(mdp.n_actions), repeat=cells)), dtype=np.int32)
    return flat.reshape(-1, mdp.horizon, mdp.n_states)


def all_trajectories(mdp: MDP, policy: PolicyArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Every trajectory of a policy with its probability, by enumeration."""
    rows, weights = [], []
    for states in itertools.product(range(mdp.n_states), repeat=mdp.horizon):
        for rewards in itertools.product((0, 1), repeat=mdp.horizon):
            weight = mdp.start[states[0]]
            for h, (x, r) in enumerate(zip(states, rewards, strict=True)):
                a = policy[h, x]
                paid = mdp.rewards[h, x, a]
                if h + 1 < mdp.horizon:
                    weight *= mdp.transitions[h, x, a, states[h + 1]]
                    paid = mdp.reward_given(h, x, a, states[h + 1])
                weight *= paid if r else 1 - paid
            rows.append((states, [policy[h, x] for h, x in enumerate(states)], rewards))
            weights.append(weight)
    xs, actions, bits = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return xs, actions, bits, np.array(weights)


def mostly_slow(cases: Iterable[tuple[Any, ...]], quick: int) -> list[Any]:
    """Cases of a test as parameters, of which but the first few are for `make test` alone."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (number >= quick)) for number, case in enumerate(cases)]


mdps = st.builds(
    random_mdp,
    seed=st.integers(0, 2**32 - 1),
    horizon=st.integers(1, 4),
    states=st.integers(1, 4),
    actions=st.integers(1, 3),
    sparse=st.booleans(),
)


def estimated_rows(mdp: MDP) -> Rows:
    """Rows as if the estimates were right; as writable as estimates are, or kernels would be compiled again."""
    rows = Model(mdp.problem(100)).rows
    return rows._replace(probabilities=mdp.probabilities.copy(), rewards=mdp.rewards.copy())


def gaps(mdp: MDP) -> FloatArray:
    """How far each action is behind the best of its state."""
    q = planning.optimal_q(mdp.layout.table(mdp.probabilities), mdp.rewards)
    gap: FloatArray = q.max(axis=-1, keepdims=True) - q
    return gap
