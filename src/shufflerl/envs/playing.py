"""Playing one episode of a parametric policy in a Gymnasium environment: what a device does with what it is given.

Observations reach a policy as a vector: a number of a Discrete space as a one-hot vector, a Box flattened. Coordinates
of a Box that lie within a unit, or beyond a hundred, are stretched to [-1, 1] by their public bounds; the others are
left as they are. Actions are numbers of a Discrete space, or of a Box with bounds the outputs squashed into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError
from shufflerl.policies import Network

if TYPE_CHECKING:
    import gymnasium

SUPPORTED = "Supported are Box or Discrete observations and Discrete or bounded Box actions."


@dataclass(frozen=True, eq=False)
class Interface:
    """How a policy sees and acts.

    A Box of observations has in `box` the middle and scale of each coordinate, one of actions in `bounds` the lowest
    and highest of each; None says that the space is Discrete, with numbers from `first` or `first_action` on.
    """

    inputs: int
    actions: int
    head: str
    box: tuple[FloatArray, FloatArray] | None
    first: int
    bounds: tuple[FloatArray, FloatArray] | None
    first_action: int

    @classmethod
    def of(cls, env: gymnasium.Env[Any, Any]) -> Interface:
        """Of an environment's spaces; anything else is refused."""
        spaces = import_module("gymnasium.spaces")
        seen, acts = env.observation_space, env.action_space
        box = bounds = None
        first = first_action = inputs = actions = 0
        if isinstance(seen, spaces.Discrete):
            inputs, first = int(seen.n), int(seen.start)
        elif isinstance(seen, spaces.Box) and seen.shape != () and 0 not in seen.shape:
            box = scaling(np.ravel(seen.low), np.ravel(seen.high))
            inputs = len(box[0])
        if isinstance(acts, spaces.Discrete):
            actions, first_action = int(acts.n), int(acts.start)
        elif isinstance(acts, spaces.Box) and np.isfinite(acts.low).all() and np.isfinite(acts.high).all():
            bounds = (np.ravel(acts.low).astype(np.float64), np.ravel(acts.high).astype(np.float64))
            actions = len(bounds[0])
        if not inputs or not actions:
            raise InvalidInputError(f"{env.unwrapped} has observations {seen} and actions {acts}. {SUPPORTED}")
        return cls(
            inputs=inputs,
            actions=actions,
            head="choice" if bounds is None else "box",
            box=box,
            first=first,
            bounds=bounds,
            first_action=first_action,
        )

    def check_fits(self, family: Network) -> None:
        """Refuse policies made for other observations or actions."""
        head = "choice" if family.head == "score" else family.head  # both take a number
        if (family.inputs, family.actions, head) != (self.inputs, self.actions, self.head):
            raise InvalidInputError(
                f"The policies take {family.inputs} inputs to {family.actions} actions ({family.head}); expected "
                f"{self.inputs} and {self.actions} ({self.head}), as the environment has."
            )

    def observed(self, observation: Any) -> FloatArray:
        """The vector that a policy sees."""
        if self.box is None:
            number = int(observation) - self.first
            if not 0 <= number < self.inputs:
                last = self.first + self.inputs - 1
                raise InvalidInputError(f"The environment showed {observation!r}; expected {self.first} to {last}.")
            vector = np.zeros(self.inputs)
            vector[number] = 1.0
            return vector
        flat = np.ravel(observation).astype(np.float64)
        if flat.shape != (self.inputs,) or not np.isfinite(flat).all():
            raise InvalidInputError(
                f"The environment showed {observation!r}; expected {self.inputs} finite numbers, as its space says."
            )
        return (flat - self.box[0]) / self.box[1]

    def action(self, chosen: Any, shape: tuple[int, ...] | None) -> Any:
        """What the environment is given for what a policy chose."""
        if self.bounds is None:
            return int(chosen) + self.first_action
        low, high = self.bounds
        return (low + (np.asarray(chosen) + 1) / 2 * (high - low)).astype(np.float32).reshape(shape)


def scaling(low: NDArray[Any], high: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Middle and scale of each coordinate by its bounds; 0 and 1 of those that are left as they are."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = (high.astype(np.float64) - low.astype(np.float64)) / 2
        middle = (high.astype(np.float64) + low.astype(np.float64)) / 2
    stretched = (np.isfinite(half) & (half > 0) & (half < 1e6)) & ((half <= 1) | (half > 100))
    return np.where(stretched, middle, 0.0), np.where(stretched, half, 1.0)


def play_episode(
    env: gymnasium.Env[Any, Any],
    interface: Interface,
    family: Network,
    parameters: NDArray[Any],
    horizon: int,
    seed: int | None = None,
) -> float:
    """The return of one episode of at most `horizon` steps under one policy."""
    observation, _ = env.reset(seed=seed)
    total, shape = 0.0, getattr(env.action_space, "shape", None)
    for _ in range(horizon):
        chosen = family.act(parameters, interface.observed(observation))
        observation, reward, terminated, truncated, _ = env.step(interface.action(chosen, shape))
        total += float(reward)
        if terminated or truncated:
            break
    return total
