"""Users of a batch, from a handful to all phones on earth, at two budgets. Nothing is run: the protocol says it."""

from __future__ import annotations

STATES, ACTIONS, HORIZON = 4, 2, 6
EPSILONS = (0.1, 1.0)
USERS = {
    "full": tuple(round(10 ** (half / 2)) for half in range(2, 21)),
    "quick": tuple(10**power for power in range(1, 11, 3)),
}
