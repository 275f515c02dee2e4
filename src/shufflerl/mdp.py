"""Tabular episodic MDPs and the policies played on them, as checked, read-only values.

Steps, states and actions count from zero: h = 0..H-1, x = 0..X-1, a = 0..A-1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.checks import BoolArray, FloatArray
from shufflerl.errors import InvalidInputError

#: A deterministic policy is an array of actions[h, x]; many of them are one array [m, h, x].
PolicyArray = NDArray[np.int32]

#: More episodes than this would overflow the 64-bit counts.
MOST_EPISODES = 10**18


@dataclass(frozen=True, eq=False)
class MDP:
    """An episodic, finite-horizon, time-dependent MDP with rewards in {0, 1}.

    `transitions[h, x, a, x']` has H-1 layers: an episode ends after its H-th action, so the last action leads nowhere
    and nothing is spent on learning where. `rewards[h, x, a]` are the means of Bernoulli rewards, `start[x]` is the
    law of the first state. `support[h, x, a, x']`, where given, is public knowledge of which transitions can occur.

    >>> coin = MDP(transitions=np.empty((0, 1, 2, 1)), rewards=[[[0.2, 0.7]]], start=[1.0])
    >>> coin.horizon, coin.n_states, coin.n_actions
    (1, 1, 2)
    """

    transitions: FloatArray
    rewards: FloatArray
    start: FloatArray
    support: BoolArray | None = None

    def __init__(
        self, transitions: ArrayLike, rewards: ArrayLike, start: ArrayLike, support: ArrayLike | None = None
    ) -> None:
        rewards = checks.array("rewards", rewards, (-1, -1, -1))
        horizon, states, actions = rewards.shape
        if 0 in rewards.shape:
            raise InvalidInputError(f"rewards has shape {rewards.shape}; expected at least one step, state and action.")
        if ((rewards < 0) | (rewards > 1)).any():
            where = tuple(int(i) for i in np.argwhere((rewards < 0) | (rewards > 1))[0])
            raise InvalidInputError(
                f"rewards{list(where)} is {rewards[where]:.9g}; expected a mean reward in [0, 1]. Rescale the rewards."
            )
        layers = (horizon - 1, states, actions, states)
        transitions = checks.probabilities("transitions", transitions, layers)
        object.__setattr__(self, "transitions", checks.frozen(transitions))
        object.__setattr__(self, "rewards", checks.frozen(rewards))
        object.__setattr__(self, "start", checks.frozen(checks.probabilities("start", start, (states,))))
        if support is not None:
            support = _checked_support(support, layers)
            if (transitions[~support] > 0).any():
                where = tuple(int(i) for i in np.argwhere((transitions > 0) & ~support)[0])
                raise InvalidInputError(f"transitions{list(where)} is positive but support says it cannot occur.")
            support = checks.frozen(support)
        object.__setattr__(self, "support", support)

    def __repr__(self) -> str:
        known = "" if self.support is None else ", known support"
        return f"MDP(horizon={self.horizon}, n_states={self.n_states}, n_actions={self.n_actions}{known})"

    @property
    def horizon(self) -> int:
        """Steps in an episode, H."""
        return int(self.rewards.shape[0])

    @property
    def n_states(self) -> int:
        """Number of states, X."""
        return int(self.rewards.shape[1])

    @property
    def n_actions(self) -> int:
        """Number of actions, A."""
        return int(self.rewards.shape[2])

    @cached_property
    def optimal_value(self) -> float:
        """Expected reward of an episode under the best policy, V*."""
        from shufflerl.planning import optimal_q

        return float(self.start @ optimal_q(self.transitions, self.rewards)[0].max(axis=-1))

    def problem(self, episodes: int) -> Problem:
        """What a learner may know of this MDP when it is given `episodes` episodes.

        That is its shape, the law of the first state and the known support; transitions and rewards it must learn.
        """
        return Problem(self.horizon, self.n_states, self.n_actions, episodes, self.start, self.support)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is public before the first episode: all that a learner is told.

    `start` is the law of the first state where it is known, `support` the transitions that can occur.
    """

    horizon: int
    n_states: int
    n_actions: int
    episodes: int
    start: FloatArray | None = None
    support: BoolArray | None = None

    def __post_init__(self) -> None:
        for name in ("horizon", "n_states", "n_actions", "episodes"):
            most = MOST_EPISODES if name == "episodes" else None
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), least=1, most=most))
        checks.table_size(self.horizon, self.n_states, self.n_actions)
        if self.start is not None:
            start = checks.probabilities("start", self.start, (self.n_states,))
            object.__setattr__(self, "start", checks.frozen(start))
        if self.support is not None:
            layers = (self.horizon - 1, self.n_states, self.n_actions, self.n_states)
            object.__setattr__(self, "support", checks.frozen(_checked_support(self.support, layers)))

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The problem in a form that JSON can hold; equal for equal problems."""
        return {
            "horizon": self.horizon,
            "n_states": self.n_states,
            "n_actions": self.n_actions,
            "episodes": self.episodes,
            "start": digest(self.start),
            "support": digest(self.support),
        }


def digest(values: NDArray[Any] | None) -> str | None:
    """A short name for an array's contents."""
    return None if values is None else hashlib.sha256(values.tobytes()).hexdigest()[:16]


def _checked_support(support: ArrayLike, layers: tuple[int, ...]) -> BoolArray:
    given: BoolArray = checks.plain("support", support)
    if given.dtype != np.bool_ or given.shape != layers:
        raise InvalidInputError(f"support has shape {given.shape} and type {given.dtype}; expected {layers} of bool.")
    if layers[0] and not given.any(axis=-1).all():
        where = tuple(int(i) for i in np.argwhere(~given.any(axis=-1))[0])
        raise InvalidInputError(f"support{list(where)} allows no next state; expected at least one.")
    return given


@dataclass(frozen=True, eq=False)
class Mixture:
    """Deterministic policies and how likely each user is to be given each: what a batch deploys.

    >>> Mixture.single([[0, 1]]) == Mixture([[[0, 1]]], [1.0])
    True
    """

    policies: PolicyArray
    weights: FloatArray
    _key: bytes = field(repr=False)

    def __init__(self, policies: ArrayLike, weights: ArrayLike) -> None:
        given = checks.plain("policies", policies)
        if given.ndim != 3 or 0 in given.shape or not np.issubdtype(given.dtype, np.integer) or (given < 0).any():
            raise InvalidInputError(
                f"policies has shape {given.shape} and type {given.dtype}; expected non-negative whole numbers "
                "[m, h, x]: the action of policy m at step h in state x."
            )
        if given.max() > np.iinfo(np.int32).max:
            raise InvalidInputError(f"policies uses an action {given.max()}; expected numbers below 2^31.")
        object.__setattr__(self, "policies", checks.frozen(given.astype(np.int32)))
        object.__setattr__(self, "weights", checks.frozen(checks.probabilities("weights", weights, (len(given),))))
        object.__setattr__(self, "_key", self.policies.tobytes() + self.weights.tobytes())

    @classmethod
    def single(cls, policy: ArrayLike) -> Mixture:
        """The same deterministic policy for everyone."""
        return cls(checks.plain("policy", policy)[None], [1.0])

    def check_fits(self, horizon: int, states: int, actions: int) -> None:
        """Refuse a mixture made for a problem of another shape."""
        if self.policies.shape[1:] != (horizon, states) or self.policies.max() >= actions:
            raise InvalidInputError(
                f"The policies are for (steps, states) = {self.policies.shape[1:]} and use actions up to "
                f"{self.policies.max()}; expected ({horizon}, {states}) and actions below {actions}."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixture) and self.policies.shape == other.policies.shape and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def homogeneous(
    transitions: ArrayLike, rewards: ArrayLike, horizon: int, start: ArrayLike, *, known_support: bool = False
) -> MDP:
    """An MDP whose `transitions[x, a, x']` and `rewards[x, a]` are the same at every step."""
    steps = checks.whole("horizon", horizon, least=1)
    table = checks.array("transitions", transitions, (-1, -1, -1))
    checks.table_size(steps, *table.shape[:2])
    layers = np.broadcast_to(table, (steps - 1, *table.shape))
    means = checks.array("rewards", rewards, (-1, -1))
    return MDP(
        layers, np.broadcast_to(means, (steps, *means.shape)), start, support=layers > 0 if known_support else None
    )
