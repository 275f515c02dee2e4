"""MDPs drawn at random, for tests and for scaling in the number of states, actions and steps."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP


def random_mdp(
    rng: np.random.Generator,
    *,
    n_states: int = 5,
    n_actions: int = 3,
    horizon: int = 5,
    branching: int | None = None,
    homogeneous: bool = False,
) -> MDP:
    """Transition rows uniform over the simplex (Dirichlet of ones), mean rewards uniform in [0, 1], start in state 0.

    With `branching`, each (step, state, action) leads to that many next states, drawn at random and known as the
    MDP's support. With `homogeneous`, all steps share one draw.
    """
    states = checks.whole("n_states", n_states, least=1)
    actions = checks.whole("n_actions", n_actions, least=1)
    steps = checks.whole("horizon", horizon, least=1)
    checks.table_size(steps, states, actions)
    if branching is not None:
        branching = checks.whole("branching", branching, least=1, most=states)
    if not isinstance(homogeneous, bool):
        raise InvalidInputError(f"homogeneous is {homogeneous!r}; expected True or False.")

    drawn = 1 if homogeneous else steps
    rewards = rng.random((drawn, states, actions))
    # Exponentials divided by their sum are a Dirichlet of ones.
    weights = rng.standard_exponential((drawn, states, actions, states))
    support = None
    if branching is not None:
        order = rng.random(weights.shape).argsort(axis=-1)
        possible = np.zeros(weights.shape, dtype=np.bool_)
        np.put_along_axis(possible, order[..., :branching], True, axis=-1)
        weights *= possible
        support = np.broadcast_to(possible, (steps, *weights.shape[1:]))[:-1]
    transitions = np.broadcast_to(weights / weights.sum(axis=-1, keepdims=True), (steps, *weights.shape[1:]))[:-1]
    means = np.broadcast_to(rewards, (steps, states, actions))
    return MDP(transitions, means, start=np.eye(states)[0], support=support)
