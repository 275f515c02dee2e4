"""DeepSea of bsuite: one treasure, found only by moving right at every step."""

from __future__ import annotations

import numpy as np

from shufflerl import checks
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MDP

#: What moving right all the way costs in bsuite's units, in which the treasure is worth 1.
MOVE_COST = 0.01


def deepsea(rng: np.random.Generator, *, size: int = 8, randomize_actions: bool = True) -> MDP:
    """A size x size grid: the state is the column, the step is the row, and the horizon is `size`.

    A diver starts in column 0 and moves one column left or right at every step. bsuite's rewards are -c for moving
    right, c = 0.01/size, and 1 more for moving right in the last column. Here every reward is raised by c, so that
    moving left pays c, moving right nothing and the treasure 1: values are bsuite's plus 0.01, policies compare as
    there, and V* = 1. Which of the two actions means right is drawn for each (step, state), as in bsuite, or is
    action 1 everywhere when `randomize_actions` is false.
    """
    cells = checks.whole("size", size, least=1)
    checks.table_size(cells + 1, cells, 2)
    if not isinstance(randomize_actions, bool):
        raise InvalidInputError(f"randomize_actions is {randomize_actions!r}; expected True or False.")
    steps, columns = np.indices((cells, cells))
    right = rng.integers(2, size=(cells, cells)) if randomize_actions else np.ones((cells, cells), dtype=np.int64)

    transitions = np.zeros((cells, cells, 2, cells))
    transitions[steps, columns, right, np.minimum(columns + 1, cells - 1)] = 1.0
    transitions[steps, columns, 1 - right, np.maximum(columns - 1, 0)] = 1.0
    rewards = np.zeros((cells, cells, 2))
    rewards[steps, columns, 1 - right] = MOVE_COST / cells
    rewards[steps, columns, right] = columns == cells - 1
    return MDP(transitions[:-1], rewards, start=np.eye(cells)[0])
