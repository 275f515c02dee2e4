"""What a policy of a table sees of its states: itself, and where it is known what leads where, its neighbours too."""

from __future__ import annotations

import math

import numpy as np

from shufflerl.arrays import FloatArray
from shufflerl.mdp import Problem

#: Steps of the random walk by which states are neighbours.
STEPS = 4.0

#: Of so many states at most neighbours are told: a matrix of them is inverted.
MAX_LINKED = 1000


def state_features(problem: Problem) -> FloatArray:
    """features[x, i]: what a policy of a table sees of state x.

    Where it is known which transitions there can be, a state's parameters also speak for its neighbours, by how often a
    random walk that ends at random visits those. Where nothing is known, each state stands for itself.
    """
    states = problem.n_states
    if problem.layout.is_complete or states > MAX_LINKED:
        return np.eye(states)
    rows = np.repeat(np.arange(len(problem.layout.row_starts) - 1), np.diff(problem.layout.row_starts))
    linked = np.eye(states)
    linked[rows // problem.n_actions % states, problem.layout.successors] = 1
    linked = np.maximum(linked, linked.T)
    walk = linked / linked.sum(axis=1, keepdims=True)
    visits = np.linalg.inv((1 + 1 / STEPS) * np.eye(states) - walk)
    features: FloatArray = visits / math.sqrt((visits**2).sum(axis=1).mean())
    return features
