"""Which transitions there can be, as ragged rows: time and memory go with their number, not with X*A*X.

A problem whose support is known may have few next states per row (h, x, a); a table [h, x, a, x'] of it would be
nearly all zeros. Whatever there is one number of per possible transition stands in one flat array, row after row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray, StateArray
from shufflerl.errors import InvalidInputError


class Dynamics(NamedTuple):
    """A tabular model as compiled code takes it: the rows of a `Layout`, rewards[h, x, a] and the law of the start.

    Transitions have a layer fewer than rewards. Rows may sum to less than one: what is missing earns nothing.
    `transition_rewards` are the means given where each transition leads; none if that says nothing of the reward.
    """

    row_starts: IntArray
    successors: StateArray
    probabilities: FloatArray
    rewards: FloatArray
    start: FloatArray
    transition_rewards: FloatArray


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Row i, in order of (h, x, a), leads to the states successors[row_starts[i]:row_starts[i+1]], which increase.

    `shape` is (layers, states, actions); `rows` are (row_starts, successors), or None where every row leads
    everywhere: what is known when nothing is. Use `of` and `of_successors`, which check what they are given.
    """

    shape: tuple[int, int, int]
    rows: tuple[IntArray, StateArray] | None = None

    @classmethod
    def of(cls, support: ArrayLike, shape: tuple[int, int, int]) -> Layout:
        """From truth values support[h, x, a, x']."""
        given: BoolArray = checks.plain("support", support)
        table = (*shape, shape[1])
        if given.dtype != np.bool_ or given.shape != table:
            raise InvalidInputError(
                f"support has shape {given.shape} and type {given.dtype}; expected {table} of bool."
            )
        lengths = given.sum(axis=-1)
        if not lengths.all():
            where = [int(i) for i in np.argwhere(lengths == 0)[0]]
            raise InvalidInputError(f"support{where} allows no next state; expected at least one.")
        if given.all():
            return cls(shape)
        return cls(shape, (_starts(lengths), checks.frozen((np.flatnonzero(given) % shape[1]).astype(np.int32))))

    @classmethod
    def of_successors(cls, successors: ArrayLike) -> Layout:
        """From next states successors[h, x, a, i], as many of every row, increasing in i."""
        given = checks.plain("successors", successors)
        if given.ndim != 4 or not np.issubdtype(given.dtype, np.integer) or given.shape[-1] == 0:
            raise InvalidInputError(
                f"successors has shape {given.shape} and type {given.dtype}; expected whole numbers [h, x, a, i]."
            )
        layers, states, actions, branching = given.shape
        if (given < 0).any() or (given >= states).any() or (np.diff(given) <= 0).any():
            raise InvalidInputError(f"A row of successors is not increasing numbers of states below {states}.")
        shape = (layers, states, actions)
        if branching == states:
            return cls(shape)
        return cls(shape, (_starts(np.full(shape, branching)), checks.frozen(given.ravel().astype(np.int32))))

    def __repr__(self) -> str:
        return f"Layout({self.shape}, {self.size:,} transitions)"

    @property
    def is_complete(self) -> bool:
        """Whether every row leads everywhere."""
        return self.rows is None

    @cached_property
    def size(self) -> int:
        """How many transitions there can be."""
        return int(np.prod(self.shape)) * self.shape[1] if self.rows is None else len(self.rows[1])

    @cached_property
    def row_starts(self) -> IntArray:
        """Where the transitions of each row begin, and where the last row ends."""
        if self.rows is None:
            return _starts(np.full(self.shape, self.shape[1]))
        return self.rows[0]

    @cached_property
    def successors(self) -> StateArray:
        """The state that each transition leads to."""
        if self.rows is None:
            after = np.tile(np.arange(self.shape[1], dtype=np.int32), int(np.prod(self.shape)))
            after.setflags(write=False)
            return after
        return self.rows[1]

    @cached_property
    def step_starts(self) -> IntArray:
        """Where the transitions of each layer begin, and where the last ends."""
        return self.row_starts[:: self.shape[1] * self.shape[2]]

    @cached_property
    def positions(self) -> IntArray:
        """Where each transition stands in the flattened table [h, x, a, x']; they increase."""
        rows = np.repeat(np.arange(int(np.prod(self.shape))), np.diff(self.row_starts))
        return rows * self.shape[1] + self.successors

    @cached_property
    def support(self) -> BoolArray | None:
        """Truth values [h, x, a, x'], None where everything can occur."""
        return None if self.is_complete else checks.frozen(self.table(np.ones(self.size, dtype=np.bool_)))

    def same(self, other: Layout) -> bool:
        """Whether the same transitions can occur."""
        return self is other or (self.shape == other.shape and self.digest == other.digest)

    def steps(self, chosen: tuple[int, ...]) -> Layout:
        """The rows of some layers only."""
        if len(chosen) == self.shape[0]:
            return self
        shape = (len(chosen), *self.shape[1:])
        if self.rows is None:
            return Layout(shape)
        lengths = np.diff(self.row_starts).reshape(self.shape)[list(chosen)]
        return Layout(shape, (_starts(lengths), checks.frozen(self.take(self.successors, chosen))))

    def take(self, values: NDArray[Any], chosen: tuple[int, ...]) -> NDArray[Any]:
        """Of one number per transition, those of some layers."""
        if len(chosen) == self.shape[0]:
            return values
        starts = self.step_starts
        return np.concatenate([values[starts[h] : starts[h + 1]] for h in chosen] or [values[:0]])

    def table(self, values: NDArray[Any]) -> NDArray[Any]:
        """values[..., transition] as values[..., h, x, a, x'], zero where nothing leads; a view if that is nowhere."""
        shape = (*values.shape[:-1], *self.shape, self.shape[1])
        if self.is_complete:
            return values.reshape(shape)
        table = np.zeros((*values.shape[:-1], int(np.prod(shape[-4:]))), dtype=values.dtype)
        table[..., self.positions] = values
        return table.reshape(shape)

    def find(self, positions: NDArray[Any]) -> tuple[IntArray, BoolArray]:
        """Which transition stands at each position of the flattened table, and whether any does."""
        if self.is_complete:
            return positions, np.ones(positions.shape, dtype=np.bool_)
        found = np.minimum(np.searchsorted(self.positions, positions), len(self.positions) - 1)
        return found, self.positions[found] == positions

    @cached_property
    def digest(self) -> str | None:
        """A short name for what is known to be impossible; None when nothing is."""
        if self.rows is None:
            return None
        content = hashlib.sha256(repr(self.shape).encode() + self.row_starts.tobytes())
        content.update(self.successors.tobytes())
        return content.hexdigest()[:16]


def _starts(lengths: IntArray) -> IntArray:
    return checks.frozen(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
