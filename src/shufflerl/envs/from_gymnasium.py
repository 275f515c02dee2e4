"""Gymnasium's environments as ours: an MDP where there is a transition table, a simulator where there is none."""

from __future__ import annotations

import json
import math
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.envs.players import TASKS, ControlTask, GymPlayer, Player
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.mdp import MDP, Problem, Units, homogeneous

if TYPE_CHECKING:
    import gymnasium

INSTALL = "Gymnasium is not installed; install it with: pip install 'shufflerl[gymnasium]'"
SUPPORTED = (
    "Supported are Discrete, MultiDiscrete, Tuple-of-Discrete or Box observations and Discrete or bounded Box actions."
)


def from_gymnasium(
    rng: np.random.Generator,
    *,
    id: str,
    horizon: int | None = None,
    reward_low: float | None = None,
    reward_high: float | None = None,
    return_low: float | None = None,
    return_high: float | None = None,
    options: str = "{}",
) -> MDP | GymSimulator | Player:
    """The Gymnasium environment `id`, cut or prolonged to `horizon` steps; unless given, its own time limit.

    An id without version, such as Taxi, is the newest that Gymnasium has. With a transition table (`P` and
    `initial_state_distrib`, as FrozenLake, Taxi and CliffWalking have) it becomes an `MDP` with that known support
    and that start. Without one, but with discrete spaces, it becomes a `GymSimulator`. States are numbered as in
    Gymnasium, and one more is added at the end: what terminates leads there, and there every action stays and pays a
    raw reward of 0. What a step pays may depend on where it leads (`MDP.paying`). Raw rewards are mapped by (r -
    low)/(high - low), so that a policy of raw value v has value (v - horizon*low)/(high - low); `units` lead back. The
    range is the table's, with the 0 of the added state; a simulator's must be given unless the environment declares a
    `reward_range`. `options` are keyword arguments of the environment as a JSON object, such as
    '{"is_slippery": false}'.

    With a Box as observation or action it becomes a `GymPlayer`, of which returns alone are asked: they lie from
    `return_low` to `return_high` where these are given, and are found by a private first batch where not. CartPole,
    MountainCar and Acrobot are played in compiled code of the same dynamics.
    """
    del rng
    if id in TASKS and (horizon, return_low, return_high, options) == (None, None, None, "{}"):
        return ControlTask(id)
    env = _made(id, options)
    limit = None if env.spec is None else _time_limit(env.spec.id)
    if horizon is None and limit is None:
        raise InvalidInputError(f"{id} has no time limit of its own; give horizon, such as horizon=10.")
    steps = checks.whole("horizon", limit if horizon is None else horizon, least=1)
    if _has_box(env):
        return GymPlayer(env, steps, return_low, return_high)
    observations, actions = _checked_spaces(env)
    inner: Any = env.unwrapped
    if getattr(inner, "P", None) is not None and len(observations.sizes) == 1:
        shape = (observations.sizes[0], actions.sizes[0])
        return _tabular(id, inner, shape, steps, reward_low=reward_low, reward_high=reward_high)
    declared = getattr(inner, "reward_range", (None, None))
    low: Any = declared[0] if reward_low is None else reward_low
    high: Any = declared[1] if reward_high is None else reward_high
    if any(bound in (None, -math.inf, math.inf) for bound in (low, high)):
        raise InvalidInputError(
            f"{id} does not say what range its rewards have; give both, such as reward_low=-1 and reward_high=1."
        )
    return GymSimulator(env, steps, low, high)


class GymSimulator:
    """A Gymnasium environment with discrete spaces that can only be played, one episode at a time.

    Its last state is the added one that a terminated or truncated episode stays in. Nothing but its shape is known
    beforehand: `start` and `support` are None.
    """

    start: None = None
    support: None = None

    def __repr__(self) -> str:
        return f"GymSimulator({self._env.unwrapped}, horizon={self.horizon})"

    def __init__(self, env: gymnasium.Env[Any, Any], horizon: int, reward_low: float, reward_high: float) -> None:
        """Play `env` for `horizon` steps; its raw rewards, and 0, lie in [reward_low, reward_high]."""
        self._env = env
        self._observations, self._actions = _checked_spaces(env)
        self._low, self._high = _reward_range(reward_low, reward_high)
        self.horizon = checks.whole("horizon", horizon, least=1)
        self.units = Units(self._low, self._high, self.horizon)
        self.n_states = math.prod(self._observations.sizes) + 1
        self.n_actions = self._actions.sizes[0]

    def problem(self, episodes: int) -> Problem:
        """What a learner may know beforehand when it is given `episodes` episodes."""
        return Problem(self.horizon, self.n_states, self.n_actions, episodes)

    def play(self, policy: PolicyArray, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """One episode under policy[h, x]: states, actions and reward bits, one of each per step.

        A raw reward r becomes the bit 1 with probability (r - low)/(high - low), which keeps its mean.
        """
        plan = np.asarray(policy)
        shape = (self.horizon, self.n_states)
        if plan.shape != shape or not np.issubdtype(plan.dtype, np.integer):
            raise InvalidInputError(
                f"policy has shape {plan.shape} and type {plan.dtype}; expected {shape} of whole numbers."
            )
        if plan.min() < 0 or plan.max() >= self.n_actions:
            raise InvalidInputError(f"policy uses an action outside 0..{self.n_actions - 1}.")
        done = self.n_states - 1
        observation, _ = self._env.reset(seed=int(rng.integers(2**31)))
        state = self._state(observation)
        states, actions, rewards = (np.empty(self.horizon, dtype=np.int64) for _ in range(3))
        for h in range(self.horizon):
            action = int(plan[h, state])
            states[h], actions[h], reward = state, action, 0.0
            if state != done:
                observation, raw, terminated, truncated, _ = self._env.step(action + self._actions.firsts[0])
                reward = float(raw)
                state = done if terminated or truncated else self._state(observation)
            rewards[h] = rng.random() < self._mapped(reward)
        return states, actions, rewards

    def _state(self, observation: Any) -> int:
        if not self._env.observation_space.contains(observation):
            raise InvalidInputError(
                f"The environment returned the observation {observation!r}, outside its own space "
                f"{self._env.observation_space}; correct the environment."
            )
        position = np.ravel(observation) - self._observations.firsts
        return int(np.ravel_multi_index(tuple(position), self._observations.sizes))

    def _mapped(self, reward: float) -> float:
        if not self._low <= reward <= self._high:
            raise InvalidInputError(
                f"The environment returned the reward {reward:g}, outside [{self._low:g}, {self._high:g}]; "
                "give reward_low and reward_high that hold for every reward."
            )
        return (reward - self._low) / (self._high - self._low)


def _made(id: str, options: str) -> gymnasium.Env[Any, Any]:
    """Gymnasium's environment without its time limit and without its checker."""
    import_module("shufflerl.envs.gym")  # tells Gymnasium our own ids, or says that it is missing
    library = import_module("gymnasium")
    try:
        arguments = json.loads(options)
    except (TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidInputError(f"options is {options!r}; expected a JSON object such as '{{\"is_slippery\": false}}'.")
    try:
        with warnings.catch_warnings():  # that an id without version is the newest, or that a refused one is old
            warnings.filterwarnings("ignore", message=".*(latest versioned|out of date)")
            env: gymnasium.Env[Any, Any] = library.make(id, max_episode_steps=-1, disable_env_checker=True, **arguments)
    except Exception as reason:  # an environment's constructor may raise anything
        unknown = isinstance(reason, library.error.UnregisteredEnv | library.error.DeprecatedEnv)
        if unknown or type(reason) is library.error.Error:
            raise UnknownNameError(
                f"Gymnasium has no environment {id!r}. {reason} Expected an id that gymnasium.make knows, such as "
                "'FrozenLake-v1'."
            ) from None
        raise InvalidInputError(
            f"Gymnasium cannot make {id!r} with options {arguments}: {reason} Correct the options, or install what "
            "the environment needs."
        ) from reason
    return env


def newest_id(name: str) -> str | None:
    """The newest version of the environment that Gymnasium calls `name`: Taxi-v4, None if it has no such."""
    try:
        library = import_module("gymnasium")
    except ImportError:
        return None
    versions = [(spec.version, id) for id, spec in library.registry.items() if spec.name == name and spec.version]
    return max(versions)[1] if versions else None


def _time_limit(id: str) -> int | None:
    limit: int | None = import_module("gymnasium").spec(id).max_episode_steps
    return limit


def _has_box(env: gymnasium.Env[Any, Any]) -> bool:
    box = import_module("gymnasium.spaces").Box
    return isinstance(env.observation_space, box) or isinstance(env.action_space, box)


class _Grid(NamedTuple):
    """A finite space: how many values each of its coordinates has, and the first of them."""

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]


def _checked_spaces(env: gymnasium.Env[Any, Any]) -> tuple[_Grid, _Grid]:
    """The grids of observations and of actions."""
    observations, actions = _grid(env.observation_space), _grid(env.action_space)
    discrete = isinstance(env.action_space, import_module("gymnasium.spaces").Discrete)
    if observations is None or actions is None or not discrete:
        raise InvalidInputError(
            f"{env.unwrapped} has observations {env.observation_space} and actions {env.action_space}. {SUPPORTED}"
        )
    return observations, actions


def _grid(space: Any) -> _Grid | None:
    spaces = import_module("gymnasium.spaces")
    if isinstance(space, spaces.MultiDiscrete):
        return _Grid(tuple(map(int, space.nvec.ravel())), tuple(map(int, space.start.ravel())))
    parts = space.spaces if isinstance(space, spaces.Tuple) else (space,)
    if not parts or not all(isinstance(part, spaces.Discrete) for part in parts):
        return None
    return _Grid(tuple(int(part.n) for part in parts), tuple(int(part.start) for part in parts))


def _reward_range(low: Any, high: Any) -> tuple[float, float]:
    """A range that holds the added state's reward of 0 and is wider than a point."""
    lowest, highest = checks.real("reward_low", low), checks.real("reward_high", high)
    if not lowest <= 0 <= highest or lowest == highest:
        raise InvalidInputError(
            f"reward_low is {lowest:g} and reward_high is {highest:g}; expected reward_low <= 0 <= reward_high and a "
            "range wider than a point, as the state after the end of an episode pays 0."
        )
    return lowest, highest


def _tabular(
    id: str, env: Any, shape: tuple[int, int], horizon: int, *, reward_low: float | None, reward_high: float | None
) -> MDP:
    """The MDP of a transition table P[state][action] = [(probability, next state, reward, terminated), ...]."""
    states, actions = shape
    checks.table_size(horizon, states + 1, actions)
    done = states
    try:
        rows = [
            (x, a, float(probability), done if terminated else int(after), float(reward))
            for x in range(states)
            for a in range(actions)
            for probability, after, reward, terminated in env.P[x][a]
        ]
        start = np.append(np.asarray(env.initial_state_distrib, dtype=np.float64), 0.0)
        x, a, probability, after, raw = (np.array(column) for column in zip(*rows, strict=True))
        transitions = np.zeros((states + 1, actions, states + 1))
        np.add.at(transitions, (x, a, after), probability)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise InvalidInputError(
            f"{id} has a transition table of an unknown form ({reason!r}); expected P[state][action] = "
            "[(probability, next state, reward, terminated), ...] and initial_state_distrib."
        ) from reason
    transitions[done, :, done] = 1.0
    low, high = _reward_range(
        min(0.0, raw.min()) if reward_low is None else reward_low,
        max(0.0, raw.max()) if reward_high is None else reward_high,
    )
    if raw.min() < low or raw.max() > high:
        raise InvalidInputError(
            f"{id} has rewards from {raw.min():g} to {raw.max():g}, outside [{low:g}, {high:g}]; "
            "give reward_low and reward_high that hold for every reward, or neither."
        )
    paid: FloatArray = np.zeros(transitions.shape)  # with the probability of each transition
    np.add.at(paid, (x, a, after), probability * (raw - low) / (high - low))
    paid[done, :, done] = (0.0 - low) / (high - low)
    rewards = paid.sum(axis=-1)
    mdp = homogeneous(transitions, np.clip(rewards, 0.0, 1.0), horizon, start, known_support=True)
    mdp = mdp.measured_in(Units(low, high, horizon))
    told = np.divide(paid, transitions, out=np.zeros(paid.shape), where=transitions > 0)
    if np.abs(paid - rewards[..., None] * transitions).max() < 1e-12:
        return mdp
    return mdp.paying(np.broadcast_to(np.clip(told, 0.0, 1.0), mdp.transitions.shape))
