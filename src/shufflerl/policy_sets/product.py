"""Product sets: at every step and state some actions are allowed, whatever is done elsewhere."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.errors import InvalidInputError
from shufflerl.policy_sets import product_kernels as kernels
from shufflerl.policy_sets.base import PolicySet, Search, read_only

#: Up to this share of transitions that are not zero, it pays to list them before many searches.
_SPARSE = 0.25


class ProductSet(PolicySet):
    """The policies that take an allowed action at every step and state; every question is a dynamic program.

    Elimination drops an action of a cell (h, x) when every policy of the set that takes it there is bad enough to be
    eliminated. From the same policies, a product set so keeps all that an enumerated one keeps, and perhaps more. Ties
    are broken uniformly among the best actions of each cell.

    >>> ProductSet(np.ones((2, 3, 2), dtype=bool)).log2_size
    6.0
    """

    kind = "product"

    def __init__(self, allowed: ArrayLike) -> None:
        given = np.asarray(allowed)
        if given.dtype != np.bool_ or given.ndim != 3 or 0 in given.shape:
            raise InvalidInputError(
                f"allowed has shape {given.shape} and type {given.dtype}; expected allowed[h, x, a] of bool."
            )
        super().__init__(*given.shape)
        empty = ~given.any(axis=-1)
        if empty.any():
            h, x = (int(i) for i in np.argwhere(empty)[0])
            raise InvalidInputError(f"No action is left at step {h} in state {x}; a policy set needs at least one.")
        self.allowed: BoolArray = checks.frozen(given)

    @property
    def log2_size(self) -> float:
        """The logarithm to base 2 of the number of policies."""
        return float(np.log2(self.allowed.sum(axis=-1)).sum())

    def without(self, drop: ArrayLike) -> ProductSet:
        """The set without the actions drop[h, x, a]; refused if that leaves some step and state with none."""
        given = np.asarray(drop)
        if given.dtype != np.bool_ or given.shape != self.shape:
            raise InvalidInputError(
                f"drop has shape {given.shape} and type {given.dtype}; expected {self.shape} of bool."
            )
        return ProductSet(self.allowed & ~given)

    def state(self) -> dict[str, NDArray[Any]]:
        """The allowed actions."""
        return {"allowed": self.allowed}

    def from_state(self, arrays: dict[str, NDArray[Any]]) -> Self:
        """The set with these allowed actions."""
        if arrays["allowed"].shape != self.shape:
            raise InvalidInputError(f"allowed has shape {arrays['allowed'].shape}; expected {self.shape}")
        return type(self)(arrays["allowed"])

    def _best(
        self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, rng: np.random.Generator
    ) -> tuple[PolicyArray, float]:
        policy, value = kernels.best(transitions, rewards, start, self.allowed, rng)
        return policy, value

    def _search(self, transitions: FloatArray, start: FloatArray) -> Search:
        if np.count_nonzero(transitions) > _SPARSE * transitions.size:
            return super()._search(transitions, start)
        rows = kernels.nonzeros(transitions)

        def search(rewards: FloatArray, rng: np.random.Generator) -> tuple[PolicyArray, float]:
            policy, value = kernels.best_sparse(*rows, read_only(rewards), start, self.allowed, rng)
            return policy, value

        return search

    def _policy_cover(
        self, transitions: FloatArray, start: FloatArray, step: int, rng: np.random.Generator
    ) -> tuple[PolicyArray, FloatArray]:
        policies, reach = kernels.policy_cover(transitions, start, self.allowed, step, rng)
        return policies, reach

    def _reachable(self, transitions: FloatArray, start: FloatArray) -> BoolArray:
        reachable: BoolArray = kernels.reachable(transitions, start, self.allowed)
        return reachable

    def _eliminate(self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, margin: float) -> Self:
        drop = kernels.hopeless_actions(transitions, rewards, start, self.allowed, margin)
        return type(self)(self.allowed & ~drop) if drop.any() else self

    def _contains(self, policies: PolicyArray) -> BoolArray:
        inside = np.take_along_axis(self.allowed[None], policies[..., None].astype(np.intp), axis=-1)
        return np.asarray(inside[..., 0].all(axis=(1, 2)))
