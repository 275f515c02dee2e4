"""MDPs drawn at random, for tests and for scaling in the number of states, actions and steps."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.arrays import IntArray
from shufflerl.envs.instances import of_instance
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
    instance: int | None = None,
) -> MDP:
    """Transition rows uniform over the simplex (Dirichlet of ones), mean rewards uniform in [0, 1], start in state 0.

    With `branching`, each (step, state, action) leads to that many next states, drawn at random and known as the
    MDP's support; time and memory then go with their number, not with the square of the states. With `homogeneous`,
    all steps share one draw. With `instance`, every seed has the same draw.
    """
    states = checks.whole("n_states", n_states, least=1)
    actions = checks.whole("n_actions", n_actions, least=1)
    steps = checks.whole("horizon", horizon, least=1)
    if branching is not None:
        branching = checks.whole("branching", branching, least=1, most=states)
    checks.table_size(steps, states, actions, branching or states)
    if not isinstance(homogeneous, bool):
        raise InvalidInputError(f"homogeneous is {homogeneous!r}; expected True or False.")

    rng = of_instance(rng, instance)
    drawn = (1 if homogeneous else steps, states, actions)
    means = np.broadcast_to(rng.random(drawn), (steps, states, actions))
    # Exponentials divided by their sum are a Dirichlet of ones.
    weights = rng.standard_exponential((*drawn, branching or states))
    weights /= weights.sum(axis=-1, keepdims=True)
    probabilities = np.broadcast_to(weights, (steps, *weights.shape[1:]))[:-1]
    start = np.eye(1, states)[0]
    if branching is None:
        return MDP(probabilities, means, start)
    successors = _subsets(rng, drawn, states, branching)
    return MDP.sparse(np.broadcast_to(successors, (steps, *successors.shape[1:]))[:-1], probabilities, means, start)


def _subsets(rng: np.random.Generator, shape: tuple[int, ...], states: int, size: int) -> IntArray:
    """subsets[..., i]: `size` of the states, increasing, every choice as likely.

    Floyd's way: of the first j+1 states take one at random, or state j if that one is taken already; j = X-size..X-1.
    """
    chosen = np.empty((*shape, size), dtype=np.int64)
    for i, j in enumerate(range(states - size, states)):
        pick = rng.integers(j + 1, size=shape)
        taken = (chosen[..., :i] == pick[..., None]).any(axis=-1)
        chosen[..., i] = np.where(taken, j, pick)
    chosen.sort(axis=-1)
    return chosen
