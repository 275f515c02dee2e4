"""Tabular episodic MDPs and the policies played on them, as checked, read-only values.

Steps, states and actions count from zero: h = 0..H-1, x = 0..X-1, a = 0..A-1.
"""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks, html
from shufflerl.arrays import BoolArray, FloatArray, PolicyArray
from shufflerl.errors import InvalidInputError
from shufflerl.layout import Dynamics, Layout
from shufflerl.policies import Family, Scores, Table

#: More episodes than this would overflow the 64-bit counts.
MAX_EPISODES = 10**18


@dataclass(frozen=True)
class Units:
    """An environment's own units: rewards of 0 and 1 are `low` and `high` there, in each of an episode's `steps`.

    >>> cliff = Units(-100.0, 0.0, steps=20)
    >>> round(cliff.value(19.87), 2), round(cliff.difference(0.5), 2)
    (-13.0, 50.0)
    """

    low: float = 0.0
    high: float = 1.0
    steps: int = 1

    @property
    def ours(self) -> bool:
        """Whether they are those that are used inside."""
        return (self.low, self.high) == (0.0, 1.0)

    def value(self, value: float) -> float:
        """What an episode earns."""
        return self.low * self.steps + self.difference(value)

    def difference(self, value: float) -> float:
        """What is lost against another policy, such as regret."""
        return (self.high - self.low) * value


#: Those that are used inside.
UNIT = Units()


@dataclass(frozen=True, eq=False)
class MDP:
    """An episodic, finite-horizon, time-dependent MDP with rewards in {0, 1}.

    `transitions[h, x, a, x']` has H-1 layers: an episode ends after its H-th action, so the last action leads nowhere
    and nothing is spent on learning where. `rewards[h, x, a]` are the means of Bernoulli rewards, `start[x]` is the
    law of the first state. `support[h, x, a, x']`, where given, is public knowledge of which transitions can occur.

    What is kept are the `probabilities` of the transitions that can occur, in order of `layout`; tables of all are
    made when they are asked for. `sparse` makes an MDP of many states without any such table. `units` are those in
    which people know its rewards. Rewards do not depend on the next state, unless `paying` says how; then
    `transition_rewards` are their means given each transition, in order of `layout` too.

    >>> coin = MDP(transitions=np.empty((0, 1, 2, 1)), rewards=[[[0.2, 0.7]]], start=[1.0])
    >>> coin.horizon, coin.n_states, coin.n_actions
    (1, 1, 2)
    """

    rewards: FloatArray
    start: FloatArray
    layout: Layout
    probabilities: FloatArray
    transition_rewards: FloatArray
    units: Units = UNIT

    def __init__(
        self, transitions: ArrayLike, rewards: ArrayLike, start: ArrayLike, support: ArrayLike | None = None
    ) -> None:
        means = _checked_rewards(rewards)
        horizon, states, actions = means.shape
        shape = (horizon - 1, states, actions)
        table = checks.probabilities("transitions", transitions, (*shape, states))
        layout = Layout(shape) if support is None else Layout.of(support, shape)
        flat = table.ravel()
        if not layout.is_complete:
            flat = flat[layout.positions]
            if np.count_nonzero(flat) < np.count_nonzero(table):
                where = [int(i) for i in np.argwhere((table > 0) & ~np.asarray(support))[0]]
                raise InvalidInputError(f"transitions{where} is positive but support says it cannot occur.")
        self._set(layout, flat, means, start)

    @classmethod
    def sparse(cls, successors: ArrayLike, probabilities: ArrayLike, rewards: ArrayLike, start: ArrayLike) -> MDP:
        """Each (h, x, a) leads to the states successors[h, x, a, i], increasing, with probabilities[h, x, a, i].

        The successors are known, the probabilities are not.

        >>> lane = MDP.sparse([[[[1]], [[0]]]], [[[[1.0]], [[1.0]]]], [[[0.1], [0.9]], [[0.1], [0.9]]], [1.0, 0.0])
        >>> lane.transitions[0, :, 0].tolist(), lane.layout
        ([[0.0, 1.0], [1.0, 0.0]], Layout((1, 2, 1), 2 transitions))
        """
        means = _checked_rewards(rewards)
        horizon, states, actions = means.shape
        layout = Layout.of_successors(successors)
        if layout.shape != (horizon - 1, states, actions):
            raise InvalidInputError(
                f"successors is for (layers, states, actions) = {layout.shape}; expected one layer fewer than rewards "
                f"has: {(horizon - 1, states, actions)}."
            )
        laws = checks.probabilities("probabilities", probabilities, np.shape(successors))
        mdp = object.__new__(cls)
        mdp._set(layout, laws.ravel(), means, start)
        return mdp

    def _set(self, layout: Layout, probabilities: FloatArray, rewards: FloatArray, start: ArrayLike) -> None:
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "probabilities", checks.frozen(probabilities))
        object.__setattr__(self, "rewards", checks.frozen(rewards))
        law = checks.probabilities("start", start, (rewards.shape[1],))
        object.__setattr__(self, "start", checks.frozen(law))
        object.__setattr__(self, "transition_rewards", checks.frozen(np.zeros(0)))

    def paying(self, transition_rewards: ArrayLike) -> MDP:
        """The same MDP, with rewards of means transition_rewards[h, x, a, x'] given the next state x'.

        What `rewards` says of their means must hold; the last action's do not depend on where it would lead.

        >>> goal = MDP([[[[0.5, 0.5]], [[0.0, 1.0]]]], [[[0.5], [0.0]]] * 2, start=[1.0, 0.0])
        >>> goal.paying([[[[0.0, 1.0]], [[0.0, 0.0]]]]).transition_rewards.tolist()
        [0.0, 1.0, 0.0, 0.0]
        """
        table = checks.array("transition_rewards", transition_rewards, self.transitions.shape)
        _check_means("transition_rewards", table)
        mean = (self.transitions * table).sum(axis=-1)
        off = np.abs(mean - self.rewards[:-1])
        if off.max(initial=0.0) > 2 * checks.SUM_TOLERANCE:  # rows may sum to so little more or less than 1
            where = [int(i) for i in np.unravel_index(off.argmax(), off.shape)]
            raise InvalidInputError(
                f"transition_rewards{where} has the mean {mean[tuple(where)]:.9g} over next states, and rewards have "
                f"{self.rewards[tuple(where)]:.9g}; expected the same."
            )
        mdp = copy(self)
        mdp.__dict__.pop("dynamics", None)  # made before
        flat = table.ravel() if self.layout.is_complete else table.ravel()[self.layout.positions]
        object.__setattr__(mdp, "transition_rewards", checks.frozen(flat))
        return mdp

    def measured_in(self, units: Units) -> MDP:
        """The same MDP, known in these units."""
        mdp = copy(self)
        object.__setattr__(mdp, "units", units)
        return mdp

    def reward_given(self, h: int, x: int, a: int, after: int) -> float:
        """The mean reward of (h, x, a) where users are found in state `after` next."""
        if not len(self.transition_rewards) or h == self.horizon - 1:
            return float(self.rewards[h, x, a])
        position = ((h * self.n_states + x) * self.n_actions + a) * self.n_states + after
        found, possible = self.layout.find(np.array([position]))
        if not possible[0]:
            raise InvalidInputError(f"Nothing leads from state {x} at step {h} by action {a} to state {after}.")
        return float(self.transition_rewards[found[0]])

    @cached_property
    def transitions(self) -> FloatArray:
        """transitions[h, x, a, x'] as a table."""
        table = self.layout.table(self.probabilities)
        table.setflags(write=False)
        return table

    @property
    def support(self) -> BoolArray | None:
        """support[h, x, a, x'] as a table, None where nothing is known of it."""
        return self.layout.support

    def __repr__(self) -> str:
        known = "" if self.layout.is_complete else ", known support"
        return f"MDP(horizon={self.horizon}, n_states={self.n_states}, n_actions={self.n_actions}{known})"

    def _repr_html_(self) -> str:
        rows = {
            "steps H": self.horizon,
            "states X": self.n_states,
            "actions A": self.n_actions,
            "transitions": "unknown support" if self.layout.is_complete else f"{self.layout.size:,} known to occur",
            "optimal value": f"{self.optimal_value:.4f}" + self._own_units,
        }
        best = self._optimal_q.argmax(axis=-1).astype(np.int32)
        return html.table("MDP", rows, f"<small>An optimal policy:</small>{html.policy(best)}")

    @property
    def _own_units(self) -> str:
        return "" if self.units.ours else f", {self.units.value(self.optimal_value):.4f} in its own units"

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
        return float(self.start @ self._optimal_q[0].max(axis=-1))

    @property
    def _optimal_q(self) -> FloatArray:
        from shufflerl.planning_kernels import optimal_q

        q: FloatArray = optimal_q(self.dynamics)
        return q

    @cached_property
    def dynamics(self) -> Dynamics:
        """The MDP as compiled code takes it."""
        rows = self.layout.row_starts, self.layout.successors
        return Dynamics(*rows, self.probabilities, self.rewards, self.start, self.transition_rewards)

    def problem(self, episodes: int) -> Problem:
        """What a learner may know of this MDP when it is given `episodes` episodes.

        That is its shape, the law of the first state and the known support; transitions and rewards it must learn.
        """
        return Problem(self.horizon, self.n_states, self.n_actions, episodes, self.start, self.layout)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is public before the first episode: all that a learner is told.

    `start` is the law of the first state where it is known. `support` says which transitions can occur where that is
    known, as truth values [h, x, a, x'] or as a `Layout`; it is kept as `layout`.
    """

    horizon: int
    n_states: int
    n_actions: int
    episodes: int
    start: FloatArray | None
    layout: Layout

    def __init__(
        self,
        horizon: int,
        n_states: int,
        n_actions: int,
        episodes: int,
        start: ArrayLike | None = None,
        support: ArrayLike | Layout | None = None,
    ) -> None:
        sizes = {"horizon": horizon, "n_states": n_states, "n_actions": n_actions, "episodes": episodes}
        for name, size in sizes.items():
            most = MAX_EPISODES if name == "episodes" else None
            object.__setattr__(self, name, checks.whole(name, size, least=1, most=most))
        shape = (self.horizon - 1, self.n_states, self.n_actions)
        if not isinstance(support, Layout):
            checks.table_size(self.horizon, self.n_states, self.n_actions)
            support = Layout(shape) if support is None else Layout.of(support, shape)
        elif support.shape != shape:
            raise InvalidInputError(f"support is for (layers, states, actions) = {support.shape}; expected {shape}.")
        object.__setattr__(self, "layout", support)
        law = None if start is None else checks.frozen(checks.probabilities("start", start, (self.n_states,)))
        object.__setattr__(self, "start", law)

    @property
    def support(self) -> BoolArray | None:
        """support[h, x, a, x'] as a table, None where nothing is known of it."""
        return self.layout.support

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The problem in a form that JSON can hold; equal for equal problems."""
        return {
            "horizon": self.horizon,
            "n_states": self.n_states,
            "n_actions": self.n_actions,
            "episodes": self.episodes,
            "start": digest(self.start),
            "support": self.layout.digest,
        }


def digest(values: NDArray[Any] | None) -> str | None:
    """A short name for an array's contents."""
    return None if values is None else hashlib.sha256(values.tobytes()).hexdigest()[:16]


def _checked_rewards(rewards: ArrayLike) -> FloatArray:
    means = checks.array("rewards", rewards, (-1, -1, -1))
    if 0 in means.shape:
        raise InvalidInputError(f"rewards has shape {means.shape}; expected at least one step, state and action.")
    _check_means("rewards", means)
    return means


def _check_means(name: str, means: FloatArray) -> None:
    outside = (means < 0) | (means > 1)
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        raise InvalidInputError(
            f"{name}{list(where)} is {means[where]:.9g}; expected a mean reward in [0, 1]. Rescale the rewards."
        )


@dataclass(frozen=True, eq=False)
class Mixture:
    """Deterministic policies and how likely each user is to be given each: what a batch deploys.

    All are of one `family`, which says how the array of `policies` is read: tables of actions[m, h, x] unless another
    is given.

    >>> Mixture.single([[0, 1]]) == Mixture([[[0, 1]]], [1.0])
    True
    """

    policies: NDArray[Any]
    weights: FloatArray
    family: Family
    _key: bytes = field(repr=False)

    def __init__(self, policies: ArrayLike, weights: ArrayLike, family: Family | None = None) -> None:
        given = Table.checked(policies) if family is None else family.checked(policies)
        object.__setattr__(self, "policies", given)
        object.__setattr__(self, "weights", checks.frozen(checks.probabilities("weights", weights, (len(given),))))
        object.__setattr__(self, "family", Table(*given.shape[1:]) if family is None else family)
        object.__setattr__(self, "_key", self.policies.tobytes() + self.weights.tobytes())

    @classmethod
    def single(cls, policy: ArrayLike) -> Mixture:
        """The same deterministic policy for everyone."""
        return cls(checks.plain("policy", policy)[None], [1.0])

    def modal_policy(self) -> tuple[PolicyArray, FloatArray]:
        """The action[h, x] that most users are told to take there, the lowest of equals, and the share[h, x] of those.

        >>> Mixture([[[0, 1]], [[1, 1]]], [0.25, 0.75]).modal_policy()
        (array([[1, 1]], dtype=int32), array([[0.75, 1.  ]]))
        """
        actions = range(int(self.policies.max()) + 1)
        shares = np.stack([np.tensordot(self.weights, self.policies == a, axes=1) for a in actions])
        return shares.argmax(axis=0).astype(np.int32), shares.max(axis=0)

    def _repr_html_(self) -> str:
        if not isinstance(self.family, Table):
            return html.table(f"Policies: {self.family}", {"policies": len(self.policies)})
        actions, shares = self.modal_policy()
        many = len(self.policies)
        title = "Policy" if many == 1 else f"Mixture of {many} policies: the action that most users take"
        return html.table(title, {}, html.policy(actions, shares))

    def as_tables(self, horizon: int) -> Mixture:
        """Scores as the tables of actions[m, h, x] that they are where users see one state for all actions."""
        assert isinstance(self.family, Scores)
        best = self.policies.argmax(axis=-1).astype(np.int32)
        return Mixture(np.broadcast_to(best[:, None], (len(best), horizon, self.family.states)), self.weights)

    def check_fits(self, horizon: int, states: int, actions: int) -> None:
        """Refuse a mixture made for a problem of another shape."""
        if isinstance(self.family, Scores) and (1, *self.family.shape) == (horizon, states, actions):
            return
        if not isinstance(self.family, Table):
            raise InvalidInputError(
                f"The policies are {self.family}; expected tables of actions[h, x] for a problem of states and actions."
            )
        if self.policies.shape[1:] != (horizon, states) or self.policies.max() >= actions:
            raise InvalidInputError(
                f"The policies are for (steps, states) = {self.policies.shape[1:]} and use actions up to "
                f"{self.policies.max()}; expected ({horizon}, {states}) and actions below {actions}."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixture) and self.family == other.family and self._key == other._key

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


def permuted_actions(mdp: MDP, rng: np.random.Generator) -> MDP:
    """The same MDP with the actions of every (step, state) renamed at random.

    >>> swim = homogeneous([[[1.0]] * 3], [[0.1, 0.2, 0.9]], 2, start=[1.0])
    >>> sorted(permuted_actions(swim, np.random.default_rng(0)).rewards[1, 0].tolist())
    [0.1, 0.2, 0.9]
    """
    order = rng.permuted(np.broadcast_to(np.arange(mdp.n_actions), mdp.rewards.shape), axis=-1)
    moves = order[:-1, ..., None]
    renamed = MDP(
        np.take_along_axis(mdp.transitions, moves, axis=2),
        np.take_along_axis(mdp.rewards, order, axis=2),
        mdp.start,
        None if mdp.support is None else np.take_along_axis(mdp.support, moves, axis=2),
    )
    if not len(mdp.transition_rewards):
        return renamed
    return renamed.paying(np.take_along_axis(mdp.layout.table(mdp.transition_rewards), moves, axis=2))
