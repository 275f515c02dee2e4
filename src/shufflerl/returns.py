"""Whole policies compared by their returns: what is public of such a problem, and what is asked of its users.

Every user plays one of a batch's policies for one episode and is counted once, for that policy and its return. A
replaced user changes two counters, whatever the policies, the horizon or the observations are.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MAX_EPISODES, Mixture
from shufflerl.policies import Network

#: Policies of one batch, and values that a return may be rounded to.
MAX_POLICIES, MAX_POINTS = 4096, 1024

#: Of ranges of returns: the largest number, and the least width beside it that windows of it can still divide.
MAX_RETURN, LEAST_WIDTH = 1e100, 1e-9


def is_range(low: float, high: float) -> bool:
    """Whether returns can lie in [low, high] and be told apart there."""
    return -MAX_RETURN <= low < high <= MAX_RETURN and high - low > LEAST_WIDTH * max(abs(low), abs(high))


@dataclass(frozen=True)
class ReturnProblem:
    """What is public of an environment whose policies are compared by their returns.

    `inputs` is the length of an observation, `actions` how many there are (or coordinates of an action, where `head`
    is "box"; see `policies.Network`). Returns lie in [low, high]; both are None where that is not known beforehand.
    """

    inputs: int
    actions: int
    horizon: int
    episodes: int
    low: float | None = None
    high: float | None = None
    head: str = "choice"

    def __post_init__(self) -> None:
        """Refuse what is no problem."""
        Network(self.inputs, self.actions, head=self.head)
        checks.whole("horizon", self.horizon, least=1)
        checks.whole("episodes", self.episodes, least=1, most=MAX_EPISODES)
        if (self.low is None) != (self.high is None):
            raise InvalidInputError(
                f"The range of returns is from {self.low} to {self.high}; expected both ends, or neither."
            )
        if self.low is not None and self.high is not None:
            low, high = checks.real("return_low", self.low), checks.real("return_high", self.high)
            if not is_range(low, high):
                raise InvalidInputError(f"Returns are said to lie in [{low:g}, {high:g}]; expected a range.")
            object.__setattr__(self, "low", low)
            object.__setattr__(self, "high", high)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The problem in a form that JSON can hold; equal for equal problems."""
        return asdict(self)


@dataclass(frozen=True)
class ReturnQuery:
    """How many users played each of so many policies for a return at each of some points.

    A return is rounded at random to one of the two `points` that it lies between, so that its mean is kept; one beyond
    the first or last point counts as that. Two points ask for one bit of the return. The tag of policy g at point i is
    g * len(points) + i.

    >>> query = ReturnQuery(policies=16, points=(0.0, 500.0))
    >>> query.size, query.changed_counters
    (32, 2)
    """

    policies: int
    points: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse points that do not increase, and more counters than are ever needed."""
        checks.whole("policies", self.policies, least=1, most=MAX_POLICIES)
        points = tuple(checks.real("a point of returns", point) for point in self.points)
        if not 2 <= len(points) <= MAX_POINTS or any(a >= b for a, b in itertools.pairwise(points)):
            raise InvalidInputError(f"The points of returns are {points}; expected 2 to {MAX_POINTS} that increase.")
        object.__setattr__(self, "points", points)

    @property
    def size(self) -> int:
        """Number of counters, C."""
        return self.policies * len(self.points)

    @property
    def touched_counters(self) -> int:
        """A user raises one counter: that of its policy and return."""
        return 1

    @property
    def changed_counters(self) -> int:
        """k: a replaced user leaves one counter and enters another."""
        return 2 * self.touched_counters

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """Steps, states and actions as the paper's constants count them: a bandit whose arms are the policies."""
        return 1, 1, self.policies

    @cached_property
    def groups(self) -> IntArray:
        """A user touches exactly one tag of each number: here of all tags together."""
        return np.zeros(self.size, dtype=np.int64)

    @cached_property
    def group_starts(self) -> IntArray:
        """The first tag of each number."""
        return np.zeros(1, dtype=np.int64)

    @property
    def widest(self) -> ReturnQuery:
        """The query of the same problem whose users touch most counters; all touch one."""
        return self

    def touching(self, count: int) -> ReturnQuery:
        """The smallest query of the same problem whose users touch so many counters, one: of one policy."""
        return replace(self, policies=1)

    def check_fits(self, mixture: Mixture) -> None:
        """Refuse a mixture of another number of policies."""
        if len(mixture.weights) != self.policies:
            raise InvalidInputError(
                f"The mixture has {len(mixture.weights)} policies; expected {self.policies}, as many as are compared."
            )

    def described(self) -> dict[str, Any]:
        """The query as JSON values."""
        return asdict(self) | {"points": list(self.points)}

    def position(self, returns: ArrayLike) -> tuple[IntArray, FloatArray]:
        """The point at or below each return, and the probability to round it to the next one above."""
        values = np.asarray(returns, dtype=np.float64)
        if not np.isfinite(values).all():
            raise InvalidInputError("A return is not a finite number; correct the environment's rewards.")
        points = np.array(self.points)
        inside = np.clip(values, points[0], points[-1])
        below = np.clip(np.searchsorted(points, inside, side="right") - 1, 0, len(points) - 2)
        return below, (inside - points[below]) / (points[below + 1] - points[below])

    def tags(self, episodes: Returns) -> IntArray:
        """tags[i, 0]: the counter that each user i touches."""
        if len(episodes) and not (
            0 <= episodes.policies.min() <= episodes.policies.max() < self.policies
            and 0 <= episodes.points.min() <= episodes.points.max() < len(self.points)
        ):
            raise InvalidInputError(
                f"The returns do not fit the query: expected policies below {self.policies} and points below "
                f"{len(self.points)}."
            )
        return (episodes.policies * len(self.points) + episodes.points)[:, None]


@dataclass(frozen=True, eq=False)
class Returns:
    """Episodes of n users: which policy each played, and the number of the point that its return was rounded to.

    Sensitive: never leaves a user.
    """

    policies: IntArray
    points: IntArray

    def __init__(self, policies: ArrayLike, points: ArrayLike) -> None:
        for name, values in {"policies": policies, "points": points}.items():
            given = checks.plain(name, values)
            if given.ndim != 1 or len(given) != np.size(policies) or not np.issubdtype(given.dtype, np.integer):
                raise InvalidInputError(
                    f"{name} has shape {given.shape} and type {given.dtype}; expected a whole number for each user."
                )
            object.__setattr__(self, name, given.astype(np.int64))

    def __len__(self) -> int:
        return len(self.policies)

    @classmethod
    def drawn(cls, query: ReturnQuery, policies: ArrayLike, returns: ArrayLike, rng: np.random.Generator) -> Returns:
        """Simulated users' returns, rounded at random."""
        below, above = query.position(returns)
        return cls(policies, below + (rng.random(len(below)) < above))
