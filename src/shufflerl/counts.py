"""What is asked of a batch of users, and what comes back: queries, tags, true counts and releases.

A counter is one cell of one family at one step: a transition (h, x, a, x') or a reward bit (h, x, a, r). Every user
touches exactly one counter per family and step that is asked for; this is what the privacy accounting rests on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.errors import ContractError, InvalidInputError
from shufflerl.layout import Layout
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import Noise
from shufflerl.returns import ReturnProblem, ReturnQuery, Returns


class Counter(NamedTuple):
    """One counter: family "transition" with outcome x', or family "reward" with outcome 0 or 1."""

    family: str
    step: int
    state: int
    action: int
    outcome: int


class Query(Protocol):
    """Which counters of a batch are released, and what the accounting must know of them: all that noise goes by."""

    @property
    def size(self) -> int:
        """Number of counters, C; they are numbered by tags 0..size-1."""
        ...

    @property
    def touched_counters(self) -> int:
        """How many counters one user's episode raises by one."""
        ...

    @property
    def changed_counters(self) -> int:
        """k: how many counters can change when one user's whole episode is replaced by another."""
        ...

    @property
    def groups(self) -> IntArray:
        """Of each tag, the number of its group: a user touches exactly one tag of each."""
        ...

    @property
    def group_starts(self) -> IntArray:
        """The first tag of each group."""
        ...

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Steps, states and actions, which the paper's constants go by."""
        ...

    @property
    def widest(self) -> Query:
        """The query of the same problem whose users touch most counters: everything."""
        ...

    def touching(self, count: int) -> Query:
        """A query of the same problem whose users touch so many counters."""
        ...

    def check_fits(self, mixture: Mixture) -> None:
        """Refuse a mixture that such counters cannot be counted of."""
        ...

    def described(self) -> dict[str, Any]:
        """The query as JSON values; `parse_query` reads them."""
        ...

    def tags(self, episodes: Any) -> IntArray:
        """tags[i, j]: the counters that each user i touches, one of each group."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class CountQuery:
    """Which counters of a batch are released: transitions of some steps, rewards of some steps.

    Counters are numbered by tags 0..size-1: transitions first, then rewards, each in order of (step, x, a, outcome);
    transitions outside a known `support` have no tag.

    >>> query = CountQuery.everything(Problem(horizon=2, n_states=3, n_actions=2, episodes=1))
    >>> query.size, query.changed_counters
    (42, 6)
    >>> query.counter(query.tag(Counter("reward", 1, 2, 0, 1)))
    Counter(family='reward', step=1, state=2, action=0, outcome=1)
    """

    horizon: int
    n_states: int
    n_actions: int
    transition_steps: tuple[int, ...]
    reward_steps: tuple[int, ...]
    layout: Layout = field(repr=False)

    def __init__(
        self, problem: Problem | CountQuery, transition_steps: Iterable[int], reward_steps: Iterable[int]
    ) -> None:
        transitions = _checked_steps("transition_steps", transition_steps, problem.horizon - 1)
        rewards = _checked_steps("reward_steps", reward_steps, problem.horizon)
        if not transitions and not rewards:
            raise InvalidInputError("The query asks for no counter; name at least one transition or reward step.")
        object.__setattr__(self, "horizon", problem.horizon)
        object.__setattr__(self, "n_states", problem.n_states)
        object.__setattr__(self, "n_actions", problem.n_actions)
        object.__setattr__(self, "transition_steps", transitions)
        object.__setattr__(self, "reward_steps", rewards)
        object.__setattr__(self, "layout", problem.layout)

    @classmethod
    def everything(cls, problem: Problem | CountQuery) -> CountQuery:
        """All transitions and all rewards of a problem, or of another query's."""
        return cls(problem, range(problem.horizon - 1), range(problem.horizon))

    @cached_property
    def widest(self) -> CountQuery:
        """Everything."""
        return CountQuery.everything(self)

    def touching(self, count: int) -> CountQuery:
        """Rewards of as many steps, and transitions beyond."""
        paid = min(count, self.horizon)
        return CountQuery(self, range(count - paid), range(paid))

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Steps, states and actions."""
        return self.horizon, self.n_states, self.n_actions

    def check_fits(self, mixture: Mixture) -> None:
        """Refuse a mixture made for a problem of another shape."""
        mixture.check_fits(self.horizon, self.n_states, self.n_actions)

    def described(self) -> dict[str, Any]:
        """The steps that are asked for, as JSON values."""
        return {"transition_steps": list(self.transition_steps), "reward_steps": list(self.reward_steps)}

    @property
    def touched_counters(self) -> int:
        """How many counters one user's episode raises by one."""
        return len(self.transition_steps) + len(self.reward_steps)

    @property
    def changed_counters(self) -> int:
        """k: how many counters can change when one user's whole trajectory is replaced by another.

        Per family and step the old trajectory leaves one counter and the new one enters another: two, not one.
        """
        return 2 * self.touched_counters

    @cached_property
    def asked(self) -> BoolArray:
        """asked[0, h]: whether the transitions of step h are asked for; asked[1, h]: its rewards."""
        asked = np.zeros((2, self.horizon), dtype=np.bool_)
        asked[0, list(self.transition_steps)] = True
        asked[1, list(self.reward_steps)] = True
        return checks.frozen(asked)

    @property
    def support(self) -> BoolArray | None:
        """The known support of the problem, support[h, x, a, x'] of all its steps."""
        return self.layout.support

    @cached_property
    def _asked(self) -> Layout:
        """The rows of the transition steps that are asked for."""
        return self.layout.steps(self.transition_steps)

    @property
    def successors(self) -> NDArray[np.int32]:
        """The next state x' of each transition tag; see `row_starts`."""
        return self._asked.successors

    @property
    def row_starts(self) -> IntArray:
        """Where the tags of each row of transitions begin: row i has tags row_starts[i] to row_starts[i+1].

        Rows are numbered in order of (step, x, a) over the steps asked for. Reward tags begin at row_starts[-1], two
        for each (step, x, a). With `successors` this is all that is needed to work on released values as they are:
        tables of [h, x, a, x'] are mostly zeros where the support is known.
        """
        return self._asked.row_starts

    @property
    def _reward_shape(self) -> tuple[int, int, int, int]:
        return len(self.reward_steps), self.n_states, self.n_actions, 2

    @cached_property
    def size(self) -> int:
        """Number of counters, C."""
        return self._asked.size + int(np.prod(self._reward_shape))

    @cached_property
    def groups(self) -> IntArray:
        """Of each tag, the number of its family and step: a user touches exactly one tag of each number."""
        return np.repeat(np.arange(self.touched_counters), np.diff(self.group_starts, append=self.size))

    @cached_property
    def group_starts(self) -> IntArray:
        """The first tag of each family and step."""
        per_step = 2 * self.n_states * self.n_actions
        pays = self._asked.size + per_step * np.arange(len(self.reward_steps))
        return np.concatenate([self._asked.step_starts[:-1], pays])

    def tag(self, counter: Counter) -> int:
        """The number of a counter."""
        steps = {"transition": self.transition_steps, "reward": self.reward_steps}.get(counter.family)
        if steps is None or counter.step not in steps:
            raise InvalidInputError(f"{counter} is not among the counters asked for.")
        shape = self._reward_shape if counter.family == "reward" else (*self._asked.shape, self.n_states)
        cell = (steps.index(counter.step), counter.state, counter.action, counter.outcome)
        if not all(0 <= i < n for i, n in zip(cell, shape, strict=True)):
            raise InvalidInputError(f"{counter} lies outside {shape[1]} states and {shape[2]} actions.")
        position = np.ravel_multi_index(cell, shape)
        if counter.family == "reward":
            return self._asked.size + int(position)
        tag, there = self._asked.find(np.array(position))
        if not there:
            raise InvalidInputError(f"{counter} cannot occur: it is outside the known support.")
        return int(tag)

    def counter(self, tag: int) -> Counter:
        """The counter of a tag; inverse of `tag`."""
        number = checks.whole("tag", tag, least=0, most=self.size - 1)
        if number >= self._asked.size:
            family, steps, shape = "reward", self.reward_steps, self._reward_shape
            position = number - self._asked.size
        else:
            family, steps, shape = "transition", self.transition_steps, (*self._asked.shape, self.n_states)
            position = number if self._asked.is_complete else int(self._asked.positions[number])
        layer, state, action, outcome = np.unravel_index(position, shape)
        return Counter(family, steps[layer], int(state), int(action), int(outcome))

    def collect(self, layout: Layout, moves: IntArray, pays: IntArray) -> IntArray:
        """The asked counters, in order of tags, of moves in order of `layout` and pays[h, x, a, r], of all steps.

        Moves of another layout than the problem's are put where they belong; those that it rules out are left out.
        """
        values = layout.take(moves, self.transition_steps)
        if not layout.same(self.layout):
            tags, there = self._asked.find(layout.steps(self.transition_steps).positions)
            given, values = values, np.zeros(self._asked.size, dtype=moves.dtype)
            values[tags[there]] = given[there]
        return np.concatenate([values, pays[list(self.reward_steps)].ravel()])

    def gather(self, transitions: NDArray[Any], rewards: NDArray[Any]) -> NDArray[Any]:
        """The asked counters of full arrays transitions[h, x, a, x'] and rewards[h, x, a, r], in order of tags."""
        moves = transitions[list(self.transition_steps)].ravel()
        if not self._asked.is_complete:
            moves = moves[self._asked.positions]
        return np.concatenate([moves, rewards[list(self.reward_steps)].ravel()])

    def scatter(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Inverse of `gather`: full arrays of transitions and rewards, zero where nothing was asked.

        The last axis of `values` is in order of tags; axes before it are kept. To read from: a family of which every
        counter was asked is not copied.
        """
        moves, pays = values[..., : self._asked.size], values[..., self._asked.size :]
        return (
            _of_all_steps(self._asked.table(moves), self.transition_steps, self.horizon - 1),
            _of_all_steps(pays.reshape(*values.shape[:-1], *self._reward_shape), self.reward_steps, self.horizon),
        )

    def fill(self, values: FloatArray) -> FloatArray:
        """A copy of values in order of tags, with zeros for all counters that were not asked."""
        if self.touched_counters == 2 * self.horizon - 1:
            return values.copy()
        per_step = 2 * self.n_states * self.n_actions
        ends = np.concatenate(
            [self.layout.step_starts[1:], self.layout.size + per_step * np.arange(1, self.horizon + 1)]
        )
        asked = np.concatenate([self.asked[0, :-1], self.asked[1]])
        full = np.zeros(ends[-1])
        full[np.repeat(asked, np.diff(ends, prepend=0))] = values
        return full

    def tags(self, trajectories: Trajectories) -> IntArray:
        """tags[i, j]: the counters each user i touches, one per family and step asked for."""
        trajectories.check_fits(self)
        x, a, r = trajectories.states, trajectories.actions, trajectories.rewards
        moves, pays = list(self.transition_steps), list(self.reward_steps)
        shape = (*self._asked.shape, self.n_states)
        after = [h + 1 for h in moves]
        here = np.ravel_multi_index((np.arange(len(moves)), x[:, moves], a[:, moves], x[:, after]), shape)
        paid = np.ravel_multi_index((np.arange(len(pays)), x[:, pays], a[:, pays], r[:, pays]), self._reward_shape)
        moved, there = self._asked.find(here)
        if not there.all():
            raise InvalidInputError(
                "A trajectory makes a transition that the known support rules out; correct the support."
            )
        return np.concatenate([moved, paid + self._asked.size], axis=1).astype(np.int64)

    def _key(self) -> tuple[object, ...]:
        return (*self.dimensions, self.transition_steps, self.reward_steps, self.layout.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountQuery) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def parse_query(described: dict[str, Any], problem: Problem | ReturnProblem) -> CountQuery | ReturnQuery:
    """The query of a problem that `described` says; inverse of `Query.described`."""
    if "points" in described:
        return ReturnQuery(described["policies"], tuple(described["points"]))
    assert isinstance(problem, Problem)
    return CountQuery(problem, described["transition_steps"], described["reward_steps"])


def _of_all_steps(table: NDArray[Any], steps: tuple[int, ...], count: int) -> NDArray[Any]:
    """table[..., step, x, a, outcome] of some of `count` steps as a table of all of them, zero at the others."""
    if len(steps) == count:
        return table
    full = np.zeros((*table.shape[:-4], count, *table.shape[-3:]))
    full[..., list(steps), :, :, :] = table
    return full


def _checked_steps(name: str, steps: Iterable[int], end: int) -> tuple[int, ...]:
    given = tuple(checks.whole(name, step, least=0) for step in steps)
    if list(given) != sorted(set(given)) or (given and given[-1] >= end):
        raise InvalidInputError(f"{name} is {given}; expected increasing steps below {end}.")
    return given


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Whole episodes of n users: states[i, h], actions[i, h] and reward bits[i, h]. Sensitive: never leaves a user."""

    states: IntArray
    actions: IntArray
    rewards: IntArray

    def __init__(self, states: ArrayLike, actions: ArrayLike, rewards: ArrayLike) -> None:
        given = {"states": states, "actions": actions, "rewards": rewards}
        arrays = [checks.plain(name, values) for name, values in given.items()]
        shapes = {values.shape for values in arrays}
        if len(shapes) != 1 or arrays[0].ndim != 2 or not all(np.issubdtype(v.dtype, np.integer) for v in arrays):
            raise InvalidInputError(
                f"states, actions and rewards have shapes {[v.shape for v in arrays]}; expected whole numbers [i, h], "
                "all of one shape."
            )
        if not np.isin(arrays[2], (0, 1)).all():
            raise InvalidInputError("A reward is not a bit; round rewards in [0, 1] at random to 0 or 1 first.")
        for name, values in zip(given, arrays, strict=True):
            object.__setattr__(self, name, values.astype(np.int64))

    def __len__(self) -> int:
        return len(self.states)

    def check_fits(self, query: CountQuery) -> None:
        """Refuse trajectories of another problem."""
        ok = self.states.shape[1] == query.horizon
        for values, size in ((self.states, query.n_states), (self.actions, query.n_actions)):
            ok = ok and (values.size == 0 or bool(values.min() >= 0 and values.max() < size))
        if not ok:
            raise InvalidInputError(
                f"The trajectories ({self.states.shape[1]} steps) do not fit the query: expected {query.horizon} "
                f"steps, states below {query.n_states} and actions below {query.n_actions}."
            )


@dataclass(frozen=True)
class Batch:
    """What a learner asks for: deploy this mixture to this many users and release these counters."""

    index: int
    users: int
    mixture: Mixture
    query: Query

    def __post_init__(self) -> None:
        checks.whole("batch index", self.index, least=0)
        checks.whole("users", self.users, least=1)
        self.query.check_fits(self.mixture)

    @property
    def table_query(self) -> CountQuery:
        """The query, where it asks for transitions and rewards: what learners of tables read."""
        if not isinstance(self.query, CountQuery):
            raise ContractError(f"The batch asks for {type(self.query).__name__}; expected a CountQuery.")
        return self.query


@dataclass(frozen=True, eq=False)
class Counts:
    """True counts of a batch in order of tags. Sensitive: only a privatizer may read them.

    `earned` is the reward of all users together, at the steps that nobody asked for too: for the experimenter's
    record of a simulation, and nan where it is not known.
    """

    batch: Batch
    values: IntArray
    earned: float = math.nan

    def checked(self) -> Counts:
        """These counts, if they can be counts of the batch: what the accounting of sensitivity rests on.

        Whole numbers, none negative, and every user counted once in each family and step.
        """
        query, values = self.batch.query, self.values
        fits = values.shape == (query.size,) and np.issubdtype(values.dtype, np.integer) and (values >= 0).all()
        if not fits or (np.add.reduceat(values, query.group_starts) != self.batch.users).any():
            raise InvalidInputError(
                f"These are not the counts of {self.batch.users} users: expected {query.size} whole numbers, none "
                "negative, in which every user is counted once for each family and step."
            )
        return self

    @classmethod
    def of(cls, batch: Batch, episodes: Trajectories | Returns, earned: float = math.nan) -> Counts:
        """Count the users' episodes one by one."""
        tags = batch.query.tags(episodes)
        values = np.bincount(tags.ravel(), minlength=batch.query.size).astype(np.int64, copy=False)
        if math.isnan(earned) and isinstance(episodes, Trajectories):
            earned = float(episodes.rewards.sum())
        return cls(batch, values, earned)


@dataclass(frozen=True, eq=False)
class Release:
    """All that a learner ever sees of a batch: its counts plus noise of a known law.

    `values` are the noisy counts in order of tags. `noise` is the law of what was added to each of them, independent
    across counters. `added_variance` is by how much the noise variance of a counter in the sum of all releases grows
    with this one: the variance of `noise` where batches have noise of their own, less (even below zero) where a
    privatizer correlates its noise over time. `variance_range` is the variance that a counter's noise would have had
    if a user touched one counter alone, two, up to all; None where asking for less does not lower it. The array of
    values is taken over: it becomes read-only. `batch` is the one that was asked for, with the users who were counted:
    fewer, where reports had to be left out.
    """

    batch: Batch
    values: FloatArray
    noise: Noise
    added_variance: float
    variance_range: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        values = checks.array("released values", self.values, (self.batch.query.size,))
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    @cached_property
    def tables(self) -> tuple[FloatArray, FloatArray]:
        """The noisy counts as transitions[h, x, a, x'] and rewards[h, x, a, r], zero where nothing was asked."""
        return self.batch.table_query.scatter(self.values)

    def check_answers(self, batch: Batch | None) -> None:
        """Refuse a release of another batch than the one a learner waits for."""
        if batch is None:
            raise ContractError("No batch is waiting for a release; call next_batch() first.")
        if self.batch.users > batch.users or replace(self.batch, users=batch.users) != batch:
            raise ContractError(
                f"The release answers batch {self.batch.index} of {self.batch.users} users, not the batch "
                f"{batch.index} of {batch.users} users that was asked for; observe releases in order, once each."
            )
