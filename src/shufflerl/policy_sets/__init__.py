"""Policy sets: which policies are still in the running. Constructed by name through `make`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.errors import StateMismatchError
from shufflerl.policy_sets.base import PolicySet

#: The policy sets there are.
KINDS = ("enumerated", "product")


def make(kind: str, horizon: int, n_states: int, n_actions: int, start: ArrayLike | None = None) -> PolicySet:
    """All deterministic policies of a problem of that shape.

    `enumerated` keeps every subset of them, for up to 2^24 policies; `product` keeps allowed actions per step and
    state, for any number. The law of the first state, where known, spares `enumerated` the policies that differ only
    in states where no episode starts.
    """
    if checks.choice("policy set", kind, KINDS) == "product":
        from shufflerl.policy_sets.product import ProductSet

        shape = tuple(
            checks.whole(name, size, least=1)
            for name, size in (("horizon", horizon), ("n_states", n_states), ("n_actions", n_actions))
        )
        return ProductSet(np.ones(shape, dtype=np.bool_))
    from shufflerl.policy_sets.enumerated import EnumeratedSet

    return EnumeratedSet.everything(horizon, n_states, n_actions, start)


def restore(
    kind: str,
    arrays: dict[str, NDArray[Any]],
    horizon: int,
    n_states: int,
    n_actions: int,
    start: ArrayLike | None = None,
) -> PolicySet:
    """The set whose `state()` gave these arrays; arrays of another kind or shape are refused."""
    full = make(kind, horizon, n_states, n_actions, start)
    try:
        return full.from_state(arrays)
    except (KeyError, ValueError) as reason:
        raise StateMismatchError(
            f"These arrays are not the state of a {kind} set of {horizon} steps, {n_states} states and {n_actions} "
            f"actions ({reason}); restore them into the problem they were saved for."
        ) from None


__all__ = ["KINDS", "PolicySet", "make", "restore"]
