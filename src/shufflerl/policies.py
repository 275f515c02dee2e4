"""Policy families: how one array of numbers is read as a policy. A small closed set; no code travels, only numbers.

A `Table` says which action to take at each step and state. `Scores` rank actions by the state that is seen of each. A
`Network` maps a vector of observations to an action: it is linear, or a multilayer perceptron if it has hidden layers.
Policies of one family are one array, the first axis
counts them; `pack` and `unpack` turn it into bytes and back, exactly, and refuse what is no policy of the family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.errors import InvalidInputError

#: Parameters of one policy, and of all policies of a batch together: more are refused by whoever is given them.
MAX_PARAMETERS, MAX_NUMBERS = 100_000, 4_000_000

#: How a network's outputs become an action; see `Network`.
HEADS = ("choice", "score", "box")


@dataclass(frozen=True)
class Table:
    """The action of each step and state: policies[m, h, x]. On the wire, 16-bit numbers."""

    kind: ClassVar[str] = "table"
    stored: ClassVar[str] = "<u2"

    horizon: int
    states: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers of one policy."""
        return self.horizon, self.states

    @staticmethod
    def checked(policies: ArrayLike) -> NDArray[np.int32]:
        """Tables of any shape in their canonical form."""
        given = checks.plain("policies", policies)
        if given.ndim != 3 or 0 in given.shape or not np.issubdtype(given.dtype, np.integer) or (given < 0).any():
            raise InvalidInputError(
                f"policies has shape {given.shape} and type {given.dtype}; expected non-negative whole numbers "
                "[m, h, x]: the action of policy m at step h in state x."
            )
        if given.dtype != np.int32 and given.max() > np.iinfo(np.int32).max:
            raise InvalidInputError(f"policies uses an action {given.max()}; expected numbers below 2^31.")
        return checks.frozen(given.astype(np.int32, copy=False))


@dataclass(frozen=True)
class Scores:
    """A number for each state and action, at every step the same: policies[m, x, a]. On the wire, 32-bit numbers.

    The action is taken whose state scores highest, the lowest of equals. There may be one state for all actions, as in
    a table, or one for each, such as how free every channel sounds.

    >>> family = Scores(states=2, actions=3)
    >>> scores = [[0.1, 0.2, 0.3], [0.9, 0.8, 0.4]]
    >>> int(family.act(scores, 0)), int(family.act(scores, [0, 1, 0]))
    (2, 1)
    """

    kind: ClassVar[str] = "scores"
    stored: ClassVar[str] = "<f4"

    states: int
    actions: int

    def __post_init__(self) -> None:
        """Refuse more numbers than a policy may have."""
        for name in ("states", "actions"):
            checks.whole(name, getattr(self, name), least=1, most=MAX_PARAMETERS)
        if self.states * self.actions > MAX_PARAMETERS:
            raise InvalidInputError(
                f"There are {self.states * self.actions:,} scores; expected at most {MAX_PARAMETERS:,}. Use fewer "
                "states."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers of one policy."""
        return self.states, self.actions

    def checked(self, policies: ArrayLike) -> NDArray[np.float32]:
        """The policies in their canonical form: finite 32-bit numbers [m, x, a]."""
        return _rounded(checks.array("policies", policies, (-1, *self.shape)))

    def act(self, scores: ArrayLike, states: ArrayLike) -> IntArray:
        """What scores[..., x, a] do where states[..., a] are seen, or one state for all actions."""
        seen = np.broadcast_to(np.asarray(states), (*np.shape(states)[:-1], self.actions))
        found = np.take_along_axis(np.asarray(scores), seen[..., None, :], axis=-2)[..., 0, :]
        best: IntArray = found.argmax(axis=-1)
        return best


def _rounded(given: FloatArray) -> NDArray[np.float32]:
    """Finite 32-bit numbers, and not too many of them."""
    if given.size > MAX_NUMBERS:
        raise InvalidInputError(
            f"{len(given)} policies of {given[0].size:,} parameters are too many; expected at most {MAX_NUMBERS:,} "
            "numbers in all."
        )
    with np.errstate(over="ignore"):
        rounded = given.astype(np.float32)
    checks.array("policies as 32-bit numbers", rounded, given.shape)
    return checks.frozen(rounded)


@dataclass(frozen=True)
class Network:
    """A network of `inputs` observations, tanh hidden layers of these sizes (none: it is linear), and a head.

    The head "choice" has one output for each action but action 0, whose output is 0, and takes the action with the
    largest. "score" applies the same network to as many equal parts of the observation as there are actions and takes
    the one whose part scores highest: for channels, items or neighbours that are alike but for what is observed.
    "box" has an output for each of `actions` coordinates, squashed by tanh into (-1, 1).

    A policy is one row of 32-bit numbers: layer by layer the weights[input, output], then the biases.

    >>> Network(inputs=4, actions=2).size, Network(4, 2, hidden=(16,)).size
    (5, 97)
    """

    inputs: int
    actions: int
    hidden: tuple[int, ...] = ()
    head: str = "choice"

    stored: ClassVar[str] = "<f4"

    def __post_init__(self) -> None:
        """Refuse what is no network, or too large a one."""
        checks.whole("inputs", self.inputs, least=1, most=MAX_PARAMETERS)
        least = 1 if self.head == "box" else 2
        checks.whole("actions", self.actions, least=least, most=MAX_PARAMETERS)
        checks.choice("head", self.head, HEADS)
        layers = tuple(checks.whole("size of a hidden layer", n, least=1, most=MAX_PARAMETERS) for n in self.hidden)
        object.__setattr__(self, "hidden", layers)
        if len(layers) > 4:
            raise InvalidInputError(f"The network has {len(layers)} hidden layers; expected at most 4.")
        if self.head == "score" and self.inputs % self.actions:
            raise InvalidInputError(
                f"The observation has {self.inputs} numbers; expected as many for each of {self.actions} actions."
            )
        if self.size > MAX_PARAMETERS:
            raise InvalidInputError(
                f"The network has {self.size:,} parameters; expected at most {MAX_PARAMETERS:,}. Use smaller layers."
            )

    @property
    def kind(self) -> str:
        """Its name: linear or mlp."""
        return "mlp" if self.hidden else "linear"

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Sizes from inputs to outputs."""
        outputs = {"choice": self.actions - 1, "score": 1, "box": self.actions}[self.head]
        return self.inputs // self.actions if self.head == "score" else self.inputs, *self.hidden, outputs

    @cached_property
    def size(self) -> int:
        """Parameters of one policy."""
        return sum((before + 1) * after for before, after in pairwise(self.layers))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers of one policy."""
        return (self.size,)

    def checked(self, policies: ArrayLike) -> NDArray[np.float32]:
        """The policies in their canonical form: finite 32-bit numbers [m, parameter]."""
        return _rounded(checks.array("policies", policies, (-1, self.size)))

    def outputs(self, parameters: NDArray[Any], observations: ArrayLike) -> FloatArray:
        """outputs[..., output] of policies[..., parameter] on observations[..., input]; of "score", one per action."""
        values = np.asarray(observations, dtype=np.float64)
        numbers = np.asarray(parameters, dtype=np.float64)
        if self.head == "score":
            values = values.reshape(*values.shape[:-1], self.actions, -1)
            numbers = numbers[..., None, :]
        start = 0
        for number, (before, after) in enumerate(pairwise(self.layers)):
            weights = numbers[..., start : start + before * after]
            start += before * after
            biases = numbers[..., start : start + after]
            start += after
            matrix = weights.reshape(*weights.shape[:-1], before, after)
            values = (values[..., None, :] @ matrix)[..., 0, :] + biases
            values = np.tanh(values) if number < len(self.hidden) else values
        return values[..., 0] if self.head == "score" else values

    def act(self, parameters: NDArray[Any], observations: ArrayLike) -> IntArray | FloatArray:
        """What policies[..., parameter] do on observations[..., input]: whole numbers, or of "box" in (-1, 1).

        >>> Network(2, 3).act([1.0, 0, 0, 1, 0, 0], [[-1, -2], [2, 1], [1, 2]]).tolist()
        [0, 1, 2]
        """
        outputs = self.outputs(np.asarray(parameters), observations)
        if self.head == "box":
            return np.tanh(outputs)
        if self.head == "choice":
            outputs = np.concatenate([np.zeros_like(outputs[..., :1]), outputs], axis=-1)
        best: IntArray = outputs.argmax(axis=-1)
        return best


Family = Table | Scores | Network


_NETWORK = {"inputs", "actions", "hidden", "head"}
#: What describes a policy of each family.
_NAMES = {"table": {"horizon", "states"}, "scores": {"states", "actions"}, "linear": _NETWORK, "mlp": _NETWORK}


def describe(family: Family) -> dict[str, Any]:
    """A family as JSON values."""
    if isinstance(family, Table):
        return {"family": "table", "horizon": family.horizon, "states": family.states}
    if isinstance(family, Scores):
        return {"family": "scores", "states": family.states, "actions": family.actions}
    sizes = {"inputs": family.inputs, "actions": family.actions, "hidden": list(family.hidden)}
    return {"family": family.kind, **sizes, "head": family.head}


def parse(described: Mapping[str, Any]) -> Family:
    """Inverse of `describe`, for values from anywhere: anything else is refused.

    >>> parse(describe(Network(4, 2, (16,)))) == Network(4, 2, (16,))
    True
    """
    given = dict(described)
    kind = given.pop("family", None)
    if not isinstance(kind, str) or kind not in _NAMES:
        raise InvalidInputError(f"The policy family is {kind!r}; expected one of: {', '.join(_NAMES)}.")
    names = _NAMES[kind]
    if given.keys() != names:
        raise InvalidInputError(
            f"A policy of the family {kind} is described by {sorted(given)}; expected {sorted(names)}."
        )
    if kind == "table":
        return Table(**{name: checks.whole(name, value, least=1) for name, value in given.items()})
    if kind == "scores":
        return Scores(**given)
    hidden = given["hidden"]
    if not isinstance(hidden, list | tuple) or bool(hidden) != (kind == "mlp"):
        raise InvalidInputError(f"hidden is {hidden!r}; expected sizes of layers of an mlp, and none of a linear one.")
    return Network(given["inputs"], given["actions"], tuple(hidden), given["head"])


def pack(family: Family, policies: NDArray[Any]) -> bytes:
    """Policies as bytes, little-endian."""
    return policies.astype(family.stored).tobytes()


def unpack(family: Family, packed: bytes) -> NDArray[Any]:
    """Inverse of `pack`, checked: how long it is before anything is made of it, and every number."""
    each = math.prod(family.shape) * np.dtype(family.stored).itemsize
    if not packed or len(packed) % each:
        raise InvalidInputError(f"The policies have {len(packed):,} bytes; expected {each:,} for each policy.")
    numbers = np.frombuffer(packed, dtype=family.stored).reshape(-1, *family.shape)
    return family.checked(numbers.astype(np.int32) if isinstance(family, Table) else numbers)
