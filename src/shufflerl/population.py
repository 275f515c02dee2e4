"""Who answers a batch. `play(batch)` returns true counts, which only a privatizer may read."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from shufflerl import population_kernels as kernels
from shufflerl.arrays import FloatArray, IntArray, PolicyArray
from shufflerl.counts import Batch, Counts, Trajectories
from shufflerl.errors import InvalidInputError
from shufflerl.mdp import MAX_EPISODES, MDP, Mixture
from shufflerl.policies import Scores
from shufflerl.returns import ReturnQuery, Returns
from shufflerl.seeding import Seed, stream
from shufflerl.steps import one_step, step_law

#: More users than this, played one by one, are refused: their trajectories would fill the memory.
MAX_PLAYED = 10**7


class Population(Protocol):
    """Users who each play one episode of the policy they are given."""

    @property
    def mdp(self) -> MDP | None:
        """The truth, where there is one: the experimenter measures regret by it; no learner ever sees it."""
        ...

    def play(self, batch: Batch) -> Counts:
        """Let the batch's users play and count what they did."""
        ...


class Player(Protocol):
    """An environment known only by playing it."""

    def play(self, policy: PolicyArray, rng: np.random.Generator) -> tuple[IntArray, IntArray, IntArray]:
        """One episode under policy[h, x]: states, actions and reward bits, one of each per step."""
        ...


class Game(Protocol):
    """An environment of which only returns are known, such as those of `envs.players`."""

    def returns(self, mixture: Mixture, given: IntArray, rng: np.random.Generator) -> FloatArray:
        """returns[i] of one episode each by user i under policy given[i] of the mixture."""
        ...


class StepGame(Protocol):
    """An environment in which every action has a state of its own, such as `envs.sensing.SensingTiles`."""

    def play(self, mixture: Mixture, given: IntArray, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """One random step of each user i's episode under policy given[i], and returns[i] of all of it.

        Of a step told[i]: the state of the action that was taken, that action, and its reward bit.
        """
        ...


class _Players:
    """Users who each play one of the batch's policies, drawn by the user."""

    mdp: None = None

    def __init__(self, game: Any, seed: Seed) -> None:
        self._game = game
        self.rng = stream(seed, "users")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._game})"

    def _given(self, batch: Batch) -> IntArray:
        """The policy of every user."""
        _check_number(batch.users)
        return self.rng.choice(len(batch.mixture.weights), size=batch.users, p=batch.mixture.weights)


class StepPopulation(_Players):
    """Users who each play a whole episode of scores, and are counted by one random step of it."""

    _game: StepGame

    def play(self, batch: Batch) -> Counts:
        """Let every user of the batch play its episode."""
        told, returns = self._game.play(batch.mixture, self._given(batch), self.rng)
        return Counts.of(batch, Trajectories(*np.split(told, 3, axis=1)), float(returns.sum()))


class ReturnPopulation(_Players):
    """Users who each play an episode of a game, and are counted by its return."""

    _game: Game

    def play(self, batch: Batch) -> Counts:
        """Let every user of the batch play its episode."""
        given = self._given(batch)
        return _counted(batch, given, self._game.returns(batch.mixture, given, self.rng), self.rng)


def _check_number(users: int) -> None:
    if users > MAX_PLAYED:
        raise InvalidInputError(
            f"A batch of {users:,} users is more than the {MAX_PLAYED:,} that can play one by one; "
            "use CountPopulation, which draws their counts at once, or smaller batches."
        )


def _counted(batch: Batch, given: IntArray, returns: FloatArray, rng: np.random.Generator) -> Counts:
    assert isinstance(batch.query, ReturnQuery)
    return Counts.of(batch, Returns.drawn(batch.query, given, returns, rng), float(returns.sum()))


class CountPopulation:
    """Independent users of an MDP, simulated by drawing their counts: exact in law, at a cost independent of n."""

    def __init__(self, mdp: MDP, seed: Seed) -> None:
        self.mdp = mdp
        self.rng = stream(seed, "users")

    def __repr__(self) -> str:
        return f"CountPopulation({self.mdp})"

    def play(self, batch: Batch) -> Counts:
        """Draw the counts of batch.users independent episodes."""
        mdp, query, mixture = self.mdp, batch.query, batch.mixture
        if isinstance(mixture.family, Scores):
            mixture.check_fits(1, mdp.n_states, mdp.n_actions)
            mdp, mixture = one_step(mdp), mixture.as_tables(1)
        mixture.check_fits(mdp.horizon, mdp.n_states, mdp.n_actions)
        if isinstance(query, ReturnQuery):
            return _tabular_returns(mdp, batch, self.rng)
        if batch.users > MAX_EPISODES:
            raise InvalidInputError(
                f"A batch of {batch.users} users is more than the {MAX_EPISODES:.0e} that can be drawn."
            )
        moves = np.zeros(mdp.layout.size, dtype=np.int64)
        pays = np.zeros((mdp.horizon, mdp.n_states, mdp.n_actions, 2), dtype=np.int64)
        kernels.add_mixture_counts(self.rng, mdp.dynamics, mixture.policies, mixture.weights, batch.users, moves, pays)
        earned = float(pays[..., 1].sum()) * (self.mdp.horizon // mdp.horizon)
        return Counts(batch, batch.table_query.collect(mdp.layout, moves, pays), earned)


class TrajectoryPopulation:
    """Users who play one by one and whose trajectories exist: an MDP, or any environment with a `play` method."""

    def __init__(self, environment: MDP | Player, seed: Seed) -> None:
        self.mdp = environment if isinstance(environment, MDP) else None
        self._player = None if isinstance(environment, MDP) else environment
        self.rng = stream(seed, "users")

    def __repr__(self) -> str:
        return f"TrajectoryPopulation({self.mdp or self._player})"

    def trajectories(self, batch: Batch) -> Trajectories:
        """Let every user of the batch play its episode."""
        return self._trajectories(batch, batch.mixture)

    def _trajectories(self, batch: Batch, mixture: Mixture) -> Trajectories:
        _check_number(batch.users)
        if self.mdp is not None:
            mdp = self.mdp
            mixture.check_fits(mdp.horizon, mdp.n_states, mdp.n_actions)
            played = kernels.play_users(self.rng, mdp.dynamics, mixture.policies, mixture.weights, batch.users)
            return Trajectories(*played)
        return self._played(mixture, self.rng.choice(len(mixture.weights), size=batch.users, p=mixture.weights))

    def _played(self, mixture: Mixture, given: IntArray) -> Trajectories:
        assert self._player is not None
        episodes = [self._player.play(mixture.policies[m], self.rng) for m in given]
        states, actions, rewards = (np.stack(column) for column in zip(*episodes, strict=True))
        return Trajectories(states, actions, rewards)

    @property
    def _horizon(self) -> int:
        if self.mdp is not None:
            return self.mdp.horizon
        if (horizon := getattr(self._player, "horizon", None)) is None:
            raise InvalidInputError(f"{self._player} does not say how long episodes are; give it a `horizon`.")
        return int(horizon)

    def play(self, batch: Batch) -> Counts:
        """Let every user play and count."""
        if isinstance(batch.mixture.family, Scores):
            if self.mdp is not None:
                step_law(self.mdp)  # which refuses actions that steer
            episodes = self._trajectories(batch, batch.mixture.as_tables(self._horizon))
            return Counts.of(batch, random_step(episodes, self.rng), float(episodes.rewards.sum()))
        if not isinstance(batch.query, ReturnQuery):
            return Counts.of(batch, self.trajectories(batch))
        if self.mdp is not None:
            return _tabular_returns(self.mdp, batch, self.rng)
        _check_number(batch.users)
        given = self.rng.choice(len(batch.mixture.weights), size=batch.users, p=batch.mixture.weights)
        rewards = self._played(batch.mixture, given).rewards
        return _counted(batch, given, rewards.sum(axis=1).astype(np.float64), self.rng)


def random_step(episodes: Trajectories, rng: np.random.Generator) -> Trajectories:
    """One step of every simulated episode, drawn at random."""
    users, horizon = episodes.states.shape
    drawn: IntArray = rng.integers(horizon, size=(users, 1))
    columns = (episodes.states, episodes.actions, episodes.rewards)
    return Trajectories(*(np.take_along_axis(column, drawn, axis=1) for column in columns))


def _tabular_returns(mdp: MDP, batch: Batch, rng: np.random.Generator) -> Counts:
    """The counts of users of an MDP who are counted by their returns: policies are played one after the other."""
    mixture = batch.mixture
    mixture.check_fits(mdp.horizon, mdp.n_states, mdp.n_actions)
    _check_number(batch.users)
    each = rng.multinomial(batch.users, mixture.weights / mixture.weights.sum())
    returns = [kernels.play_returns(rng, mdp.dynamics, mixture.policies[m], int(users)) for m, users in enumerate(each)]
    return _counted(batch, np.repeat(np.arange(len(each)), each), np.concatenate(returns), rng)
