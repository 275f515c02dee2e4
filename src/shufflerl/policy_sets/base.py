"""The contract of a policy set: the policies still in the running, and the questions SDP-PE asks about them.

Models are given as `transitions[h, x, a, x']` with H-1 layers, whose rows may sum to less than one: what is missing is
in an absorbing state that earns nothing. `rewards[h, x, a]` may be any finite numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.errors import InvalidInputError

#: Rewards and a random stream in; the best policy and its value out.
Search = Callable[[FloatArray, np.random.Generator], tuple[PolicyArray, float]]


class PolicySet(ABC):
    """A set of deterministic policies, never empty. A value: what removes policies returns another set."""

    kind: ClassVar[str]

    def __init__(self, horizon: int, n_states: int, n_actions: int) -> None:
        self.horizon = checks.whole("horizon", horizon, least=1)
        self.n_states = checks.whole("n_states", n_states, least=1)
        self.n_actions = checks.whole("n_actions", n_actions, least=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(2^{self.log2_size:g} policies)"

    @property
    @abstractmethod
    def log2_size(self) -> float:
        """The logarithm to base 2 of the number of policies in the set, all steps and states counted."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, states and actions."""
        return self.horizon, self.n_states, self.n_actions

    def best(
        self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, rng: np.random.Generator
    ) -> tuple[PolicyArray, float]:
        """A policy of the set with the highest value under the model, and that value; ties are broken at random."""
        return self._best(self._transitions(transitions), self._rewards(rewards), self._start(start), rng)

    def search(self, transitions: FloatArray, start: FloatArray) -> Search:
        """`best` for one model and rewards to come: what depends on the model alone is done once."""
        return self._search(self._transitions(transitions), self._start(start))

    def policy_cover(
        self, transitions: FloatArray, start: FloatArray, step: int, rng: np.random.Generator
    ) -> tuple[PolicyArray, FloatArray]:
        """For every (x, a) a policy of the set most likely to be in x at `step` and to take a there.

        Returns policies[x * A + a, h, x'] and reach[x, a], that likelihood. Only transitions before `step` are read.
        Whatever leaves the likelihood as it is, such as all actions after `step`, is drawn at random.
        """
        step = checks.whole("step", step, least=0, most=self.horizon - 1)
        return self._policy_cover(self._transitions(transitions), self._start(start), step, rng)

    def reachable(self, transitions: FloatArray, start: FloatArray) -> BoolArray:
        """reachable[h, x, a]: whether some policy of the set gets there with positive probability under the model."""
        return self._reachable(self._transitions(transitions), self._start(start))

    def eliminate(self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, margin: float) -> Self:
        """The set without what is at least `margin` worse than its best under the model; itself if nothing is."""
        margin = checks.real("margin", margin, above=0.0)
        return self._eliminate(self._transitions(transitions), self._rewards(rewards), self._start(start), margin)

    def contains(self, policies: ArrayLike) -> BoolArray:
        """Which of policies[m, h, x] are in the set."""
        given = np.asarray(policies)
        if given.ndim != 3 or given.shape[1:] != self.shape[:2] or not np.issubdtype(given.dtype, np.integer):
            raise InvalidInputError(
                f"policies has shape {given.shape} and type {given.dtype}; expected whole numbers of shape "
                f"(any, {self.horizon}, {self.n_states})."
            )
        if ((given < 0) | (given >= self.n_actions)).any():
            raise InvalidInputError(f"policies uses actions outside 0..{self.n_actions - 1}.")
        return self._contains(given.astype(np.int32))

    @abstractmethod
    def state(self) -> dict[str, NDArray[Any]]:
        """Arrays from which `from_state` makes an equal set."""

    @abstractmethod
    def from_state(self, arrays: dict[str, NDArray[Any]]) -> Self:
        """The set of this problem whose `state` gave these arrays; a ValueError or KeyError if none did."""

    @abstractmethod
    def _best(
        self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, rng: np.random.Generator
    ) -> tuple[PolicyArray, float]: ...

    def _search(self, transitions: FloatArray, start: FloatArray) -> Search:
        return lambda rewards, rng: self._best(transitions, read_only(rewards), start, rng)

    @abstractmethod
    def _policy_cover(
        self, transitions: FloatArray, start: FloatArray, step: int, rng: np.random.Generator
    ) -> tuple[PolicyArray, FloatArray]: ...

    @abstractmethod
    def _reachable(self, transitions: FloatArray, start: FloatArray) -> BoolArray: ...

    @abstractmethod
    def _eliminate(self, transitions: FloatArray, rewards: FloatArray, start: FloatArray, margin: float) -> Self: ...

    @abstractmethod
    def _contains(self, policies: PolicyArray) -> BoolArray: ...

    def _transitions(self, transitions: FloatArray) -> FloatArray:
        horizon, states, actions = self.shape
        given = checks.array("transitions", transitions, (horizon - 1, states, actions, states))
        if given.size and given.min() < 0:
            raise InvalidInputError(f"transitions has an entry of {given.min():g}; expected none below 0.")
        return read_only(given)

    def _rewards(self, rewards: FloatArray) -> FloatArray:
        return read_only(checks.array("rewards", rewards, self.shape))

    def _start(self, start: FloatArray) -> FloatArray:
        return read_only(checks.probabilities("start", start, (self.n_states,)))


def read_only(values: FloatArray) -> FloatArray:
    """The same numbers, read-only: kernels are compiled once for such arrays and not again for writable ones."""
    view = values.view()
    view.setflags(write=False)
    return view
