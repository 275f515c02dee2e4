"""RiverSwim, the paper's experiment: a small reward downstream, a large one upstream against the current."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.mdp import MDP, homogeneous

LEFT, RIGHT = 0, 1


def riverswim(rng: np.random.Generator, *, n_states: int = 4, horizon: int = 6) -> MDP:
    """The paper's simplified RiverSwim; nothing in it is drawn at random.

    Action 0 (left) always succeeds. Action 1 (right) fights the current: in the first state it moves on with
    probability 0.6 and else stays; in a middle state it moves on with 0.35, stays with 0.6 and drifts back with 0.05;
    in the last state it stays with 0.6 and drifts back with 0.4. Left pays 0.005 in the first state, right pays 1 in
    the last one. Episodes start in the first state.

    >>> round(riverswim(np.random.default_rng(0)).optimal_value, 4)
    0.4758
    """
    del rng
    states = checks.whole("n_states", n_states, least=2)
    checks.table_size(checks.whole("horizon", horizon, least=1), states, 2)
    transitions = np.zeros((states, 2, states))
    for x in range(states):
        transitions[x, LEFT, max(x - 1, 0)] = 1.0
    for x in range(1, states - 1):
        transitions[x, RIGHT, x - 1 : x + 2] = 0.05, 0.6, 0.35
    transitions[0, RIGHT, :2] = 0.4, 0.6
    transitions[-1, RIGHT, -2:] = 0.4, 0.6
    rewards = np.zeros((states, 2))
    rewards[0, LEFT] = 0.005
    rewards[-1, RIGHT] = 1.0
    return homogeneous(transitions, rewards, horizon, start=np.eye(states)[0])
