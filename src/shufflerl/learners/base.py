"""The contract every learner keeps.

A learner never samples an environment, draws privacy noise or touches a file or socket: it says which batch it wants
next and is handed the release that answers it. What drives it may be a simulation or a network of devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shufflerl import state
from shufflerl.counts import Batch, CountQuery, Query, Release, parse_query
from shufflerl.errors import InvalidInputError, StateMismatchError
from shufflerl.mdp import Mixture, Problem
from shufflerl.noise import Noise
from shufflerl.policies import describe, parse
from shufflerl.returns import ReturnProblem
from shufflerl.seeding import Seed, stream
from shufflerl.steps import StepProblem

#: Raised when what `save` writes changes, so that an older state is refused instead of misread.
STATE_VERSION = 11


class Plain:
    """A dataclass of plain Python, whatever its numbers were computed with: encoders refuse those of NumPy."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, one.name, _plain(getattr(self, one.name)))


@dataclass(frozen=True)
class Estimate(Plain):
    """What an episode is thought to earn; `description` says of which policy, and what the interval [low, high] is."""

    value: float
    low: float
    high: float
    description: str

    @classmethod
    def within(cls, horizon: int, *, value: float, low: float, high: float, description: str) -> Estimate:
        """An estimate of what is known to be between 0 and the horizon."""
        low, value, high = (min(max(number, 0.0), float(horizon)) for number in (low, value, high))
        return cls(value, low, high, description)


@dataclass(frozen=True)
class View(Plain):
    """What a learner can tell of itself to people. It follows from releases alone, so telling it costs no privacy.

    `estimate` is None where it is not known (yet); `details` are the learner's own, by names that it documents.
    """

    estimate: Estimate | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Learner(ABC):
    """`next_batch()` until it returns None; `observe()` the release of each batch before asking for the next.

    Subclasses say what to ask (`_plan`), what to make of the answer (`_learn`) and what to remember (`_state`,
    `_load_state`); order, bookkeeping and persistence are here.
    """

    name: ClassVar[str]
    #: What it can learn on; unless said otherwise, problems of states and actions.
    problems: ClassVar[tuple[type[Problem] | type[ReturnProblem], ...]] = (Problem,)
    #: True for a learner that reads only the running sum of all releases: continual counting then serves it best.
    reads_running_sums: ClassVar[bool] = False

    problem: Problem | ReturnProblem

    def __init__(self, problem: Problem | ReturnProblem, seed: Seed, **parameters: Any) -> None:
        if not isinstance(problem, self.problems):
            if isinstance(problem, ReturnProblem):
                raise InvalidInputError(
                    f"The learner {self.name} needs a problem of states and actions, but observations here are vectors "
                    f"of {problem.inputs} numbers; use the learner policy-search, or make them discrete by tiles."
                )
            raise InvalidInputError(
                f"The problem is {problem!r}; expected a Problem, which is all that a learner may know: give "
                "mdp.problem(episodes=...)."
            )
        if isinstance(problem, StepProblem) and StepProblem not in self.problems:
            raise InvalidInputError(
                f"The learner {self.name} needs a whole episode of each user, but here one random step is counted; use "
                "the learner contextual-bandit."
            )
        self.problem = problem
        self.parameters = parameters
        self.rng = stream(seed, "learner")
        self.episodes_played = 0
        self.batches_observed = 0
        self.deployed: Mixture | None = None  # what the last answered batch played
        self._waiting: Batch | None = None

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        return f"<{self.name}({chosen}), {self.episodes_played:,} of {self.problem.episodes:,} episodes played>"

    @classmethod
    def batch_parameters(cls, min_users: int, users: int | None = None) -> dict[str, Any]:
        """Parameters for batches of at least so many users, and for few of them if it is said how many are in all."""
        return {}

    @property
    def episodes_left(self) -> int:
        """Episodes of the problem not yet played."""
        return self.problem.episodes - self.episodes_played

    @property
    def waits(self) -> bool:
        """Whether a batch has been asked for and not yet answered."""
        return self._waiting is not None

    @property
    def playing(self) -> Mixture | None:
        """What users are given now: in the batch that waits, or else what the last one played."""
        return self.deployed if self._waiting is None else self._waiting.mixture

    @property
    def records(self) -> list[dict[str, Any]]:
        """What happened so far, one record after the other, as JSON values; none unless the learner keeps them."""
        return []

    @property
    @abstractmethod
    def max_batches(self) -> int:
        """An upper bound on how many batches this learner asks for in all."""

    @property
    def widest_query(self) -> Query:
        """All that a batch may ask for: what a user is guaranteed, whatever the batch, is told of this."""
        assert isinstance(self.problem, Problem)
        return CountQuery.everything(self.problem)

    @abstractmethod
    def _plan(self) -> tuple[int, Mixture, Query]:
        """Users, policy mixture and counters of the next batch."""

    @abstractmethod
    def _learn(self, release: Release) -> None:
        """Take a release in."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What must survive a restart: JSON values and arrays."""

    @abstractmethod
    def _load_state(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Put back what `_state` gave."""

    def expect(self, noise: Noise) -> None:  # noqa: B027
        """Be told before the first batch what noise there will be on a counter if every counter is asked.

        It depends on the budget and not on anybody's data. A learner may plan by it; most do not.
        """

    def next_batch(self) -> Batch | None:
        """The batch to play now, or None when all episodes are played. Asking again gives the same batch."""
        if self._waiting is None and self.episodes_left > 0:
            users, mixture, query = self._plan()
            self._waiting = Batch(self.batches_observed, users, mixture, query)
        return self._waiting

    def observe(self, release: Release) -> None:
        """Learn from the release of the batch that `next_batch` asked for."""
        release.check_answers(self._waiting)
        assert self._waiting is not None
        self._learn(release)
        self.deployed = release.batch.mixture
        self.episodes_played += self._waiting.users  # all who played, counted or not
        self.batches_observed += 1
        self._waiting = None

    def view(self) -> View:
        """What there is to tell."""
        return View()

    def save(self) -> bytes:
        """Everything needed to go on from here, in this process or another."""
        values, arrays = self._state()
        header = self._identity() | {
            "values": values,
            "rng": self.rng.bit_generator.state,
            "episodes_played": self.episodes_played,
            "batches_observed": self.batches_observed,
            "waiting": None,
            "families": {},
        }
        mixtures = {"deployed": self.deployed}
        if self._waiting is not None:
            header["waiting"] = [self._waiting.users, self._waiting.query.described()]
            mixtures["waiting"] = self._waiting.mixture
        for what, mixture in mixtures.items():
            if mixture is not None:
                header["families"][what] = describe(mixture.family)
                arrays = arrays | {f"_{what}_policies": mixture.policies, f"_{what}_weights": mixture.weights}
        return state.pack(header, arrays)

    def restore(self, saved: bytes) -> None:
        """Go on from a saved state of the same learner on the same problem; anything else is refused."""
        header, arrays = state.unpack(saved)
        for key, mine in self._identity().items():
            if header.get(key) != mine:
                raise StateMismatchError(
                    f"The saved state has {key} {header.get(key)!r} but this learner has {mine!r}; "
                    "restore it into a learner made for the same problem with the same parameters."
                )
        mixtures = {
            what: Mixture(arrays.pop(f"_{what}_policies"), arrays.pop(f"_{what}_weights"), parse(family))
            for what, family in header["families"].items()
        }
        self._load_state(header["values"], arrays)
        self.rng.bit_generator.state = header["rng"]
        self.episodes_played = header["episodes_played"]
        self.batches_observed = header["batches_observed"]
        self.deployed = mixtures.get("deployed")
        self._waiting = None
        if header["waiting"] is not None:
            users, described = header["waiting"]
            query = parse_query(described, self.problem)
            self._waiting = Batch(self.batches_observed, users, mixtures["waiting"], query)

    def _identity(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "learner": self.name,
            "problem": self.problem.fingerprint,
            "parameters": self.parameters,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
