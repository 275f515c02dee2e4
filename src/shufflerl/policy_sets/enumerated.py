"""Enumerated sets: any subset of the deterministic policies, one number per policy."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray, PolicyArray
from shufflerl.errors import InvalidInputError
from shufflerl.planning import visit_probabilities
from shufflerl.policy_sets import enumerated_kernels as kernels
from shufflerl.policy_sets.base import PolicySet, read_only
from shufflerl.policy_sets.product import ProductSet

#: The most policies an enumerated set tells apart, as a power of two.
MAX_LOG2 = 24
Codes = NDArray[np.int32]
#: Policies whose values are computed before a search, so that it starts with something to beat.
_SAMPLED = 256


class EnumeratedSet(PolicySet):
    """The policies that survived, each kept or eliminated on its own.

    Policies that differ only where no policy can get are one policy: the set remembers in which cells (h, x) its
    policies were ever told apart, and one code for every way its policies act there. The digit of weight A^k of a code
    is the action in the k-th of those cells, which count by steps, then states. Elsewhere they may do as they please.

    Takes 4 bytes per policy told apart (at most 64 MB), and about 20 while it eliminates (at most 350 MB). Ties are
    broken uniformly among the policies that the model tells apart; before any elimination, as in product sets.

    >>> EnumeratedSet.everything(2, 3, 2).log2_size
    6.0
    """

    kind = "enumerated"

    def __init__(self, possible: BoolArray, n_actions: int, cells: BoolArray, codes: Codes) -> None:
        super().__init__(possible.shape[0], possible.shape[1], n_actions)
        self._possible = possible
        self._cells = cells
        self._codes = _fixed(codes)
        self._last_codes: tuple[bytes, Codes] | None = None

    @classmethod
    def everything(cls, horizon: int, n_states: int, n_actions: int, start: ArrayLike | None = None) -> Self:
        """All policies; with the law of the first state, not told apart where no episode starts."""
        steps = checks.whole("horizon", horizon, least=1)
        states = checks.whole("n_states", n_states, least=1)
        actions = checks.whole("n_actions", n_actions, least=1)
        possible = np.ones((steps, states), dtype=np.bool_)
        if start is not None:
            possible[0] = checks.probabilities("start", start, (states,)) > 0
        size = int(possible.sum()) * math.log2(actions)
        if size > MAX_LOG2:
            raise InvalidInputError(
                f"There are 2^{size:.1f} policies of {steps} steps, {states} states and {actions} actions, and at most "
                f"2^{MAX_LOG2} can be enumerated. Use the policy set 'product', which takes any number."
            )
        return cls(possible, actions, np.zeros_like(possible), np.zeros(1, dtype=np.int32))

    @property
    def log2_size(self) -> float:
        """The logarithm to base 2 of the number of policies, all cells counted."""
        free = self._cells.size - int(self._cells.sum())
        return math.log2(len(self._codes)) + free * math.log2(self.n_actions)

    def state(self) -> dict[str, NDArray[Any]]:
        """Where policies are told apart, and one bit for each way to act there."""
        mark = np.zeros(self.n_actions ** int(self._cells.sum()), dtype=np.bool_)
        mark[self._codes] = True
        return {"cells": self._cells, "active": np.packbits(mark)}

    def from_state(self, arrays: dict[str, NDArray[Any]]) -> Self:
        """The set of these active policies."""
        cells, active = arrays["cells"], arrays["active"]
        if cells.dtype != np.bool_ or cells.shape != self._cells.shape or (cells & ~self._possible).any():
            raise InvalidInputError(f"cells has shape {cells.shape}; expected cells of this problem")
        count = self.n_actions ** int(cells.sum())
        if active.dtype != np.uint8 or active.shape != (-(-count // 8),) or not active.any():
            raise InvalidInputError(f"active has shape {active.shape}; expected one bit for each of {count} policies")
        codes = np.flatnonzero(np.unpackbits(active, count=count)).astype(np.int32)
        return type(self)(self._possible, self.n_actions, cells, codes)

    def _best(
        self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, rng: np.random.Generator
    ) -> tuple[PolicyArray, float]:
        if self._is_full:
            return self._hull._best(transitions, rewards, start, rng)
        cells = self._cells_that_matter(transitions, start)
        codes = self._codes_over(cells)
        model = self._pack(cells, transitions, rewards, start)
        sample = np.sort(codes[rng.integers(len(codes), size=_SAMPLED)])
        known = kernels.enumerated_values(_fixed(sample), model).max()
        place, value = kernels.enumerated_best(codes, model, self._hull.allowed[cells], known, rng)
        return self._policies(cells, codes[[place]], rng)[0], value

    def _policy_cover(
        self, transitions: FloatArray, start: FloatArray, step: int, rng: np.random.Generator
    ) -> tuple[PolicyArray, FloatArray]:
        if self._is_full:
            return self._hull._policy_cover(transitions, start, step, rng)
        cells, codes, chances, who = self._cover_codes(transitions, start, step, rng)
        reach = np.zeros((self.n_states, self.n_actions))
        reach[cells[step]] = chances
        places = np.full(reach.shape, -1)
        places[cells[step]] = who
        found = places.ravel()
        policies = np.empty((len(found), self.horizon, self.n_states), dtype=np.int32)
        policies[found >= 0] = self._policies(cells, codes[found[found >= 0]], rng)
        # Where no policy gets, all tie.
        anyone = self._codes[rng.integers(len(self._codes), size=int((found < 0).sum()))]
        policies[found < 0] = self._policies(self._cells, anyone, rng)
        return policies, reach

    def _reachable(self, transitions: FloatArray, start: FloatArray) -> BoolArray:
        reachable = self._hull._reachable(transitions, start)
        if self._is_full:
            return reachable
        # Where a few policies get is reachable; where the hull cannot get is not. What is between is looked up.
        rng = np.random.default_rng(0)  # decides how much is looked up, not the answer
        some = self._policies(self._cells, self._codes[rng.integers(len(self._codes), size=_SAMPLED)], rng)
        seen = visit_probabilities(transitions, start, some) > 0
        certain = np.stack([(seen & (some == a)).any(axis=0) for a in range(self.n_actions)], axis=-1)
        for step in np.flatnonzero((certain != reachable).any(axis=(1, 2))):
            cells, _, chances, _ = self._cover_codes(transitions, start, int(step), rng)
            reachable[step, cells[step]] = chances > 0
        return reachable

    def _eliminate(self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, margin: float) -> Self:
        rng = np.random.default_rng(0)  # for ties, which have one value
        low = -self._hull._best(transitions, read_only(-rewards), start, rng)[1]
        if self._hull._best(transitions, rewards, start, rng)[1] - low < margin:
            return self
        cells = self._cells_that_matter(transitions, start)
        codes = self._codes_over(cells)
        values = kernels.enumerated_values(codes, self._pack(cells, transitions, rewards, start))
        bad = np.subtract(values.max(), values, out=values) >= margin
        if not bad.any():
            return self
        apart = self._cells | cells
        if (apart == cells).all():
            return type(self)(self._possible, self.n_actions, cells, codes[~bad])
        gone = np.zeros(self.n_actions ** int(cells.sum()), dtype=np.bool_)
        gone[codes[bad]] = True
        everyone = self._codes_over(apart)
        return type(self)(
            self._possible, self.n_actions, apart, everyone[~gone[_recode(everyone, apart, cells, self.n_actions)]]
        )

    def _contains(self, policies: PolicyArray) -> BoolArray:
        weights = self.n_actions ** np.arange(int(self._cells.sum()))
        codes = policies[:, self._cells].astype(np.int64) @ weights
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        return np.asarray(self._codes[places] == codes)

    def _start(self, start: FloatArray) -> FloatArray:
        given = super()._start(start)
        surprising = (given > 0) & ~self._possible[0]
        if surprising.any():
            x = int(np.flatnonzero(surprising)[0])
            raise InvalidInputError(
                f"start[{x}] is positive, but this set was made for episodes that never start in state {x}."
            )
        return given

    @property
    def _is_full(self) -> bool:
        return not self._cells.any()

    @cached_property
    def _hull(self) -> ProductSet:
        """The smallest product set that contains this one."""
        allowed = np.ones(self.shape, dtype=np.bool_)
        allowed[self._cells] = kernels.used_actions(self._codes, int(self._cells.sum()), self.n_actions)
        return ProductSet(allowed)

    def _cells_that_matter(self, transitions: FloatArray, start: FloatArray) -> BoolArray:
        """Where some policy can get under the model."""
        return np.asarray(self._hull._reachable(transitions, start).any(axis=-1))

    def _codes_over(self, cells: BoolArray) -> Codes:
        """The distinct ways in which policies of the set act in the given cells, as ascending codes over those."""
        if (cells == self._cells).all():
            return self._codes
        key = cells.tobytes()
        if self._last_codes is None or self._last_codes[0] != key:
            shared = cells & self._cells
            codes = self._codes
            if (shared != self._cells).any():
                codes = _recode(codes, self._cells, shared, self.n_actions)
                codes = _distinct(codes, self.n_actions ** int(shared.sum()))
            free = cells & ~shared
            if free.any():
                ways = np.arange(self.n_actions ** int(free.sum()), dtype=np.int32)
                codes = _recode(codes, shared, cells, self.n_actions)
                codes = (codes[:, None] + _recode(ways, free, cells, self.n_actions)).ravel()
                codes.sort()
            self._last_codes = key, _fixed(codes)
        return self._last_codes[1]

    def _policies(self, cells: BoolArray, codes: Codes, rng: np.random.Generator) -> PolicyArray:
        """For each way to act in the given cells a policy of the set that does so, at random among all that do."""
        policies = rng.integers(self.n_actions, size=(len(codes), self.horizon, self.n_states), dtype=np.int32)
        if len(codes) and (self._cells & ~cells).any():
            shared = cells & self._cells
            wanted = _recode(codes, cells, shared, self.n_actions)
            have = _recode(self._codes, self._cells, shared, self.n_actions)
            members = np.empty(len(wanted), dtype=np.int64)
            for way in np.unique(wanted):
                alike = np.flatnonzero(have == way)
                members[wanted == way] = alike[rng.integers(len(alike), size=int((wanted == way).sum()))]
            policies[:, self._cells] = self._actions(self._codes[members], self._cells)
        policies[:, cells] = self._actions(codes, cells)
        return policies

    def _actions(self, codes: Codes, cells: BoolArray) -> IntArray:
        weights = self.n_actions ** np.arange(int(cells.sum()))
        return codes[:, None] // weights % self.n_actions

    def _cover_codes(
        self, transitions: FloatArray, start: FloatArray, step: int, rng: np.random.Generator
    ) -> tuple[BoolArray, Codes, FloatArray, IntArray]:
        """The cells up to `step` that matter, the codes over them, reach[j, a] in the cells of `step`, and by whom."""
        cells = self._cells_that_matter(transitions, start)
        cells[step + 1 :] = False
        codes = self._codes_over(cells)
        model = self._pack(cells, transitions, np.zeros(self.shape), start)
        size = self.n_actions ** int(model.first[step])
        prefixes = _fixed(_distinct(codes % size, size))
        place = np.zeros(size, dtype=np.int32)
        place[prefixes] = np.arange(len(prefixes))
        visits = kernels.prefix_visits(prefixes, step, model)
        reach, found = kernels.policy_cover(codes, size, place, visits, self.n_actions, rng)
        return cells, codes, reach, found

    def _pack(self, cells: BoolArray, transitions: FloatArray, rewards: FloatArray, start: FloatArray) -> kernels.Cells:
        """The model in the terms of the kernels."""
        first = np.concatenate([[0], np.cumsum(cells.sum(axis=1))])
        moves = np.zeros((int(cells.sum()), self.n_actions, self.n_states))
        for h in range(self.horizon - 1):
            ahead = transitions[h][cells[h]][..., cells[h + 1]]
            moves[first[h] : first[h + 1], :, : ahead.shape[-1]] = ahead
        return kernels.Cells(first, moves, rewards[cells], start[cells[0]])


def _fixed(codes: Codes) -> Codes:
    codes.setflags(write=False)
    return codes


def _recode(codes: Codes, source: BoolArray, target: BoolArray, actions: int) -> Codes:
    """Codes over the source cells as codes over the target cells: actions in cells of both, zero elsewhere."""
    if (source == target).all():
        return codes
    rank = np.cumsum(target.ravel()) - 1
    weights = np.where(target.ravel(), actions ** np.maximum(rank, 0), 0)[source.ravel()]
    half = len(weights) // 2
    low, high = _sums(weights[:half], actions), _sums(weights[half:], actions)
    return low[codes % len(low)] + high[codes // len(low)]


def _sums(weights: IntArray, actions: int) -> Codes:
    """For each code over some cells, the sum of its digits times these weights."""
    sums = np.zeros(1, dtype=np.int32)
    for weight in weights:
        sums = (np.arange(actions, dtype=np.int32)[:, None] * np.int32(weight) + sums).ravel()
    return sums


def _distinct(codes: Codes, size: int) -> Codes:
    """The codes, all below `size`, in ascending order and each once."""
    mark = np.zeros(size, dtype=np.bool_)
    mark[codes] = True
    return np.flatnonzero(mark).astype(np.int32)
