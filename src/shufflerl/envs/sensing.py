"""Spectrum access at a real size: many channels, each sensed as a noisy energy, one chosen in every slot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray
from shufflerl.envs.players import Player
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import UNIT, Mixture, Units
from shufflerl.policies import Network, Scores
from shufflerl.steps import StepProblem

#: What a policy sees of each channel: how likely it is free and how free it sounded lately, each times its public rate,
#: and that rate.
FEATURES = 3


class SpectrumSensing(Player):
    """A node hears the energy on every channel and transmits on one, slot by slot.

    Channels are busy or free by two-state Markov chains of their own, as in `spectrum`: free shares go evenly from 0.2
    to 0.8, the public rates (chances to be heard on a free channel) from 0.95 to 0.6, `memory` is the chains' second
    eigenvalue. In every slot the node senses the energy of every channel, 1 if it is busy plus normal noise of
    deviation `noise`, which its detector turns into a likelihood of being free; and it transmits: it earns 1 if the
    channel is free and it is heard. What it does changes no channel. A policy scores each channel by what is seen of
    it and takes the best: the head "score". How often channels are free, and for how long, it must learn: of other
    slots the detector knows how free the channel sounded lately, an average that forgets half in every slot, and takes
    that for its chance to be free before this slot's energy is heard.
    """

    def __init__(self, channels: int, horizon: int, memory: float, noise: float) -> None:
        self.channels = channels
        self.memory, self.noise = memory, noise
        self.share_free = np.linspace(0.2, 0.8, channels)
        self.rates = np.linspace(0.95, 0.6, channels)
        super().__init__(FEATURES * channels, channels, horizon, low=0.0, high=float(horizon), head="score")

    def __repr__(self) -> str:
        return f"SpectrumSensing({self.channels} channels, horizon={self.horizon})"

    def _first(self, users: int, rng: np.random.Generator) -> BoolArray:
        return rng.random((users, self.channels)) < self.share_free

    def _next(self, free: BoolArray, rng: np.random.Generator) -> BoolArray:
        chance = self.memory * free + (1 - self.memory) * self.share_free
        return rng.random(free.shape) < chance

    def _sense(self, free: BoolArray, rng: np.random.Generator) -> FloatArray:
        return ~free + self.noise * rng.standard_normal(free.shape)

    def observed(self, free: BoolArray, lately: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """What users see[i, channel, feature] in a slot, and how free channels sounded lately[i, channel] after it."""
        rates = np.broadcast_to(self.rates, lately.shape)
        now = 1 / (1 + np.exp(np.clip((self._sense(free, rng) - 0.5) / self.noise**2, -20, 20)))
        both = now * lately / (now * lately + (1 - now) * (1 - lately))
        return np.stack([both * rates, lately * rates, rates], axis=-1), lately + 0.5 * (now - lately)

    def _play(self, family: Network, policies: FloatArray, given: IntArray, rng: np.random.Generator) -> FloatArray:
        users = len(given)
        chosen = policies[given].astype(np.float64)
        return self._earn(users, rng, lambda seen: np.asarray(family.act(chosen, seen.reshape(users, -1))))

    def _earn(self, users: int, rng: np.random.Generator, act: Callable[[FloatArray], IntArray]) -> FloatArray:
        free, returns = self._first(users, rng), np.zeros(users)
        lately = np.full((users, self.channels), 0.5)
        for _ in range(self.horizon):
            seen, lately = self.observed(free, lately, rng)
            channel = act(seen)
            heard = free[np.arange(users), channel] & (rng.random(users) < self.rates[channel])
            returns += heard
            free = self._next(free, rng)
        return returns

    def best_fixed(self) -> float:
        """Expected return of the best channel, always."""
        return self.horizon * float((self.share_free * self.rates).max())

    def best_known(self, users: int, rng: np.random.Generator) -> float:
        """Mean return of the optimal policy: the exact filter of every chain, and the best chance of being heard."""
        free, total = self._first(users, rng), 0.0
        belief = np.broadcast_to(self.share_free, free.shape)
        for _ in range(self.horizon):
            energy = self._sense(free, rng)
            with np.errstate(over="ignore"):
                odds = np.exp((0.5 - energy) / self.noise**2) * belief / (1 - belief)
            sure = np.where(np.isinf(odds), 1.0, odds / (1 + odds))
            channel = (sure * self.rates).argmax(axis=1)
            total += float((free[np.arange(users), channel] * self.rates[channel]).mean())
            belief = np.clip(self.memory * sure + (1 - self.memory) * self.share_free, 1e-9, 1 - 1e-9)
            free = self._next(free, rng)
        return total


class SensingTiles:
    """Spectrum access in tiles: of each channel a node sees how free it sounded lately, cut into equal parts.

    Half of that is the likelihood of being free by this slot's energy, a quarter the last one's, and so on. A policy
    transmits where the tile scores highest, and a node reports the tile, the channel and whether it was heard of one
    random slot. The channels' rates are public.
    """

    units: Units = UNIT

    def __init__(self, game: SpectrumSensing, tiles: int) -> None:
        self.game, self.tiles, self.horizon = game, tiles, game.horizon
        self.family = Scores(tiles, game.channels)

    def __repr__(self) -> str:
        return f"SensingTiles({self.game.channels} channels, {self.tiles} tiles, horizon={self.horizon})"

    def problem(self, episodes: int) -> StepProblem:
        """What a learner may know beforehand when it is given `episodes` episodes."""
        return StepProblem(self.horizon, self.tiles, self.game.channels, episodes, scale=self.game.rates)

    def tile(self, lately: FloatArray) -> IntArray:
        """The tile of how free channels sounded lately, this slot included."""
        return np.minimum((lately * self.tiles).astype(np.int64), self.tiles - 1)

    def play(self, mixture: Mixture, given: IntArray, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """One random slot of each user i's episode under policy given[i], and returns[i] of all of it.

        Of a slot told[i]: the tile of the channel that was chosen, that channel, and whether it was heard.
        """
        if mixture.family != self.family:
            raise InvalidInputError(f"The policies are {mixture.family}; expected {self.family}.")
        users, game = len(given), self.game
        each, scores = np.arange(users), mixture.policies[given]
        slot, told = rng.integers(self.horizon, size=users), np.zeros((users, 3), dtype=np.int64)
        free, returns = game._first(users, rng), np.zeros(users)
        lately = np.full((users, game.channels), 0.5)
        for h in range(self.horizon):
            _, lately = game.observed(free, lately, rng)
            tiles = self.tile(lately)
            channel = self.family.act(scores, tiles)
            heard = free[each, channel] & (rng.random(users) < game.rates[channel])
            returns += heard
            told[slot == h] = np.stack([tiles[each, channel], channel, heard], axis=1)[slot == h]
            free = game._next(free, rng)
        return told, returns

    def returns(self, mixture: Mixture, given: IntArray, rng: np.random.Generator) -> FloatArray:
        """returns[i] of one episode each by user i under policy given[i] of the mixture."""
        return self.play(mixture, given, rng)[1]


def sensing_tiles(
    rng: np.random.Generator,
    *,
    n_channels: int = 8,
    horizon: int = 20,
    memory: float = 0.8,
    noise: float = 0.5,
    tiles: int = 6,
) -> SensingTiles:
    """Spectrum access with sensed energies in tiles, of which one random slot is counted; see `SensingTiles`."""
    game = sensing(rng, n_channels=n_channels, horizon=horizon, memory=memory, noise=noise)
    return SensingTiles(game, checks.whole("tiles", tiles, least=1))


def sensing(
    rng: np.random.Generator, *, n_channels: int = 8, horizon: int = 20, memory: float = 0.8, noise: float = 0.5
) -> SpectrumSensing:
    """Spectrum access with continuous sensing energies; nothing of it is drawn at random. See `SpectrumSensing`."""
    del rng
    return SpectrumSensing(
        checks.whole("n_channels", n_channels, least=2, most=1000),
        checks.whole("horizon", horizon, least=1),
        checks.real("memory", memory, above=0, below=0.99, closed=True),
        checks.real("noise", noise, above=0),
    )
