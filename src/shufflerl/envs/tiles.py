"""Tiles: a Gymnasium wrapper that makes a Box observation discrete, so that tabular learners run on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shufflerl import checks
from shufflerl.envs.from_gymnasium import INSTALL
from shufflerl.errors import InvalidInputError, MissingExtraError

try:
    import gymnasium
except ImportError:
    raise MissingExtraError(INSTALL) from None


class Tiles(gymnasium.ObservationWrapper[np.int64, Any, Any]):
    """The number of the tile that an observation lies in.

    `tiles[i]` is into how many equal parts coordinate i is cut between its bounds; or `edges[i]` are the inner edges
    of its parts, which increase, where bounds are infinite or parts should not be equal. What lies beyond the outer
    edges belongs to the outer tiles.

    >>> env = Tiles(gymnasium.make("CartPole-v1"), edges=[[0.0], [-0.5, 0.5], [-0.05, 0.0, 0.05], [-0.5, 0.5]])
    >>> env.observation_space
    Discrete(72)
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        tiles: Sequence[int] | None = None,
        edges: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise InvalidInputError(f"{env.unwrapped} has observations {space}; expected a Box to be cut into tiles.")
        if (tiles is None) == (edges is None):
            raise InvalidInputError("Give either tiles, how many of each coordinate, or edges, and not both.")
        low, high = np.ravel(space.low).astype(np.float64), np.ravel(space.high).astype(np.float64)
        given = tiles if edges is None else edges
        assert given is not None
        if len(given) != len(low):
            raise InvalidInputError(f"Tiles of {len(given)} coordinates are given; expected {len(low)}.")
        self._edges = [
            _equal(i, low[i], high[i], one) if edges is None else _checked(i, one) for i, one in enumerate(given)
        ]
        self._sizes = tuple(len(inner) + 1 for inner in self._edges)
        self.observation_space = gymnasium.spaces.Discrete(math.prod(self._sizes))

    def observation(self, observation: Any) -> np.int64:
        """The tile's number, the last coordinate running fastest."""
        flat = np.ravel(observation)
        if flat.shape != (len(self._edges),) or np.isnan(flat).any():
            raise InvalidInputError(
                f"The environment showed {observation!r}; expected {len(self._edges)} numbers, as its space says."
            )
        where = [int(np.searchsorted(inner, x, side="right")) for inner, x in zip(self._edges, flat, strict=True)]
        return np.int64(np.ravel_multi_index(where, self._sizes))


def _equal(coordinate: int, low: float, high: float, count: Any) -> Any:
    parts = checks.whole(f"tiles of coordinate {coordinate}", count, least=1)
    if parts > 1 and not (math.isfinite(low) and math.isfinite(high)):
        raise InvalidInputError(f"Coordinate {coordinate} lies in [{low:g}, {high:g}]; give edges for such bounds.")
    return np.linspace(low, high, parts + 1)[1:-1] if parts > 1 else np.empty(0)


def _checked(coordinate: int, edges: Any) -> Any:
    inner = (
        checks.array(f"edges of coordinate {coordinate}", np.atleast_1d(edges), (-1,)) if len(edges) else np.empty(0)
    )
    if (np.diff(inner) <= 0).any():
        raise InvalidInputError(f"The edges of coordinate {coordinate} do not increase; put them in order.")
    return inner
