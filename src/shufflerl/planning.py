"""Planning and evaluation under any (transitions, rewards) pair, true or estimated.

`transitions[h, x, a, x']` has H-1 layers and `rewards[h, x, a]` has H, as in `MDP`. Nothing here asks rows to sum to
one: in an absorbing model the missing mass has gone where no reward is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shufflerl import planning_kernels as kernels
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.layout import Dynamics, Layout
from shufflerl.mdp import MDP, Mixture
from shufflerl.policies import Scores


def optimal_q(transitions: FloatArray, rewards: FloatArray) -> FloatArray:
    """Q*[h, x, a]: the best expected reward from step h on when action a is taken in state x."""
    q: FloatArray = kernels.optimal_q(_dynamics(transitions, rewards, _UNASKED))
    return q


def greedy(q: FloatArray, rng: np.random.Generator) -> PolicyArray:
    """A policy greedy for Q, ties broken uniformly at random.

    Index order would favour low actions, which on some environments are the good ones (docs/corrections.md, 9).
    """
    best = q == q.max(axis=-1, keepdims=True)
    choice: PolicyArray = np.where(best, rng.random(q.shape), -1.0).argmax(axis=-1).astype(np.int32)
    return choice


def policy_values(transitions: FloatArray, rewards: FloatArray, start: FloatArray, policies: PolicyArray) -> FloatArray:
    """Expected reward of an episode for each of policies[m, h, x]."""
    values: FloatArray = kernels.policy_values(_dynamics(transitions, rewards, start), policies)
    return values


def visit_probabilities(transitions: FloatArray, start: FloatArray, policies: PolicyArray) -> FloatArray:
    """visits[m, h, x]: the probability that policy m is in state x at step h."""
    visits: FloatArray = kernels.visit_probabilities(transitions, start, policies)
    return visits


def occupancy(transitions: FloatArray, start: FloatArray, mixture: Mixture, actions: int) -> FloatArray:
    """occupancy[h, x, a]: the probability that a user given the mixture takes action a in state x at step h."""
    weighted = mixture.weights[:, None, None] * visit_probabilities(transitions, start, mixture.policies)
    return np.stack([np.where(mixture.policies == a, weighted, 0.0).sum(axis=0) for a in range(actions)], axis=-1)


def mixture_value(mdp: MDP, mixture: Mixture) -> float:
    """Expected reward of an episode of one user given the mixture: of tables, or of scores at every step."""
    if isinstance(mixture.family, Scores):
        mixture = mixture.as_tables(mdp.horizon)
    values = kernels.policy_values(mdp.dynamics, mixture.policies)
    return float(mixture.weights @ values)


def _dynamics(transitions: FloatArray, rewards: FloatArray, start: FloatArray) -> Dynamics:
    """A table as rows that lead everywhere."""
    layout = _layout(transitions.shape[:3])
    return Dynamics(layout.row_starts, layout.successors, transitions.reshape(-1), rewards, start, _UNASKED)


#: What no plan asks for: the law of the start, and what transitions tell of rewards.
_UNASKED = np.empty(0)
#: Those of the last few shapes, as plans are made over and over for the same one.
_layout = lru_cache(maxsize=4)(Layout)
