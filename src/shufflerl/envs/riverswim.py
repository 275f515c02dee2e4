"""RiverSwim, the paper's experiment: a small reward downstream, a large one upstream against the current."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP, homogeneous, permuted_actions

LEFT, RIGHT = 0, 1


def riverswim(rng: np.random.Generator, *, n_states: int = 4, horizon: int = 6, permuted: bool = False) -> MDP:
    """The paper's simplified RiverSwim; nothing in it is drawn at random unless it is `permuted`.

    Action 0 (left) always succeeds. Action 1 (right) fights the current: in the first state it moves on with
    probability 0.6 and else stays; in a middle state it moves on with 0.35, stays with 0.6 and drifts back with 0.05;
    in the last state it stays with 0.6 and drifts back with 0.4. Left pays 0.005 in the first state, right pays 1 in
    the last one. Episodes start in the first state. When `permuted`, which action is left and which is right is drawn
    for each (step, state): a learner then gains nothing from what it saw at other steps.

    >>> round(riverswim(np.random.default_rng(0)).optimal_value, 4)
    0.4758
    """
    states = checks.whole("n_states", n_states, least=2)
    if not isinstance(permuted, bool):
        raise InvalidInputError(f"permuted is {permuted!r}; expected True or False.")
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
    mdp = homogeneous(transitions, rewards, horizon, start=np.eye(states)[0])
    return permuted_actions(mdp, rng) if permuted else mdp
