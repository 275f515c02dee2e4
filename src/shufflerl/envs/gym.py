"""Our environments as Gymnasium's: `shufflerl/RiverSwim-v0` and the others, registered when this module is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from shufflerl.envs import make
from shufflerl.envs.from_gymnasium import INSTALL, GymSimulator, from_gymnasium
from shufflerl.envs.players import ControlTask, GymPlayer
from shufflerl.envs.sensing import FEATURES, SensingTiles, SpectrumSensing
from shufflerl.errors import InvalidInputError, MissingExtraError
from shufflerl.mdp import MDP

try:
    import gymnasium
except ImportError:
    raise MissingExtraError(INSTALL) from None

__all__ = [
    "GYMNASIUM_IDS",
    "GymSimulator",
    "SensingEnv",
    "SensingTilesEnv",
    "TabularEnv",
    "device_env",
    "from_gymnasium",
    "register",
    "tabular_env",
]

#: Gymnasium's ids of our environments.
GYMNASIUM_IDS = {
    "shufflerl/RiverSwim-v0": "riverswim",
    "shufflerl/Bandit-v0": "bandit",
    "shufflerl/Spectrum-v0": "spectrum",
    "shufflerl/DeepSea-v0": "deepsea",
    "shufflerl/Random-v0": "random",
}


class TabularEnv(gymnasium.Env[np.int64, np.int64]):
    """An MDP, played step by step: observations are states, rewards are bits, an episode terminates after H steps.

    The MDP depends on the step, which `info["step"]` tells (actions taken so far). As the last action leads nowhere,
    the last observation repeats the state it was taken in.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - the form Gymnasium's base class gives it
    reward_range = (0.0, 1.0)

    def __init__(self, mdp: MDP) -> None:
        """Play `mdp`; nothing is drawn before `reset`."""
        self.mdp = mdp
        self.observation_space = gymnasium.spaces.Discrete(mdp.n_states)
        self.action_space = gymnasium.spaces.Discrete(mdp.n_actions)
        self._step = mdp.horizon
        self._state = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._step, self._state = 0, self._draw(self.mdp.start)
        return np.int64(self._state), {"step": 0}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        """Take an action; the reward is a bit of mean rewards[h, x, a], or of what the next state says of it."""
        if self._step >= self.mdp.horizon:
            raise gymnasium.error.ResetNeeded("The episode is over, or has not begun; call reset() first.")
        if not self.action_space.contains(action):
            raise gymnasium.error.InvalidAction(f"The action is {action!r}; expected 0..{self.mdp.n_actions - 1}.")
        h, x = self._step, self._state
        mean, pays = float(self.mdp.rewards[h, x, action]), self.np_random.random()
        self._step = h + 1
        terminated = self._step == self.mdp.horizon
        if not terminated:
            self._state = self._draw(self.mdp.transitions[h, x, action])
            mean = self.mdp.reward_given(h, x, int(action), self._state)
        return np.int64(self._state), float(pays < mean), terminated, False, {"step": self._step}

    def _draw(self, law: np.ndarray[Any, np.dtype[np.float64]]) -> int:
        return int(self.np_random.choice(len(law), p=law))


def tabular_env(name: str, seed: int = 0, **parameters: Any) -> TabularEnv:
    """Our environment `name` for Gymnasium. `seed` draws the MDP; `reset(seed=...)` seeds the episodes played on it."""
    mdp = make(name, seed, **parameters)
    if not isinstance(mdp, MDP):
        raise InvalidInputError(f"{name!r} with {parameters} has no transition table; use its own Gymnasium id.")
    return TabularEnv(mdp)


class SensingEnv(gymnasium.Env[np.ndarray[Any, np.dtype[np.float64]], np.int64]):
    """Spectrum access with continuous sensing, played slot by slot; see `SpectrumSensing`.

    Observations are [channel, feature] in a row, as policies see them.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - the form Gymnasium's base class gives it

    def __init__(self, game: SpectrumSensing) -> None:
        """Play `game`; nothing is drawn before `reset`."""
        self.game = game
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (FEATURES * game.channels,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(game.channels)
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, np.dtype[np.float64]], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self._left = self.game.horizon
        self._free = self.game._first(1, self.np_random)
        self._lately = np.full((1, self.game.channels), 0.5)
        return self._observed(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float, bool, bool, dict[str, Any]]:
        """Transmit on a channel: it earns 1 if that is free and it is heard."""
        if not self._left:
            raise gymnasium.error.ResetNeeded("The episode is over, or has not begun; call reset() first.")
        heard = self._free[0, action] and self.np_random.random() < self.game.rates[action]
        self._left -= 1
        self._free = self.game._next(self._free, self.np_random)
        return self._observed(), float(heard), not self._left, False, {}

    def _observed(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        seen, self._lately = self.game.observed(self._free, self._lately, self.np_random)
        return seen.ravel()


class SensingTilesEnv(SensingEnv):
    """The same in tiles: observations are the tile of every channel; see `SensingTiles`."""

    def __init__(self, made: SensingTiles) -> None:
        """Play `made`; nothing is drawn before `reset`."""
        super().__init__(made.game)
        self.made = made
        spaces: Any = gymnasium.spaces
        self.observation_space = spaces.MultiDiscrete([made.tiles] * made.game.channels)

    def _observed(self) -> np.ndarray[Any, np.dtype[Any]]:
        super()._observed()
        return self.made.tile(self._lately[0])


def device_env(name: str, seed: int = 0, **parameters: Any) -> gymnasium.Env[Any, Any]:
    """Any of `ENVIRONMENTS`, such as CartPole-v1, as a device has it: to be played step by step."""
    made = make(name, seed, **parameters)
    if isinstance(made, ControlTask):
        return gymnasium.make(made.id, disable_env_checker=True)
    if isinstance(made, GymPlayer):
        return made.env
    if isinstance(made, SensingTiles):
        return SensingTilesEnv(made)
    return SensingEnv(made) if isinstance(made, SpectrumSensing) else tabular_env(name, seed, **parameters)


def register() -> None:
    """Tell Gymnasium our ids, with `seed` and the parameters of `ENVIRONMENTS` as their keyword arguments."""
    for id, name in GYMNASIUM_IDS.items():
        if id not in gymnasium.registry:
            gymnasium.register(id, entry_point="shufflerl.envs.gym:tabular_env", kwargs={"name": name})


register()
