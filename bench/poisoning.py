"""What users who lie can do: the shift of a counter beside its bound, and the regret of a run with liars in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.measure import Figure
from shufflerl import CountPopulation, CountQuery, Release, envs, learn, learners
from shufflerl.arrays import IntArray
from shufflerl.counts import Batch, Counter, Counts, Query, Trajectories
from shufflerl.mdp import MDP
from shufflerl.network.protocol import agreement, wire
from shufflerl.network.protocol.agreement import Agreement
from shufflerl.network.protocol.sources import Users
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.protocol import analyze, randomize, shuffle
from shufflerl.privatizers.base import Privatizer, Service
from shufflerl.privatizers.shuffle import shuffle as shuffled

BUDGET, SEEDS, EPISODES = Budget(1.0, 1e-5), range(20), 20_000
SHARES = (0.0, 0.0001, 0.001, 0.01)


def run() -> list[Figure]:
    """One liar in 1,000 users of RiverSwim, and 20 seeds of a run where up to a hundredth of the users lie."""
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    regrets = [float(np.mean([regret(mdp, share, seed) for seed in SEEDS])) for share in SHARES]
    rows = [
        Figure.at_most(2, f"regret, {share:.2%} of users lie", "", value, regrets[0], "nobody lies")
        for share, value in zip(SHARES[1:], regrets[1:], strict=True)
    ]
    return [shift(mdp), *rows]


def shift(mdp: MDP, users: int = 1000) -> Figure:
    """How far one liar moves a counter in the real protocol, less what the noise does, beside the cap on messages."""
    learner = learners.make("optimistic", mdp.problem(EPISODES), 0, first=users)
    batch = learner.next_batch()
    assert batch is not None
    said = understood(batch)
    assert isinstance(said.source, Users)
    protocol = said.source.protocol
    tag = _favoured(batch.query)[0]
    episode = _still(mdp)
    honest = [randomize(protocol, episode) for _ in range(users - 1)]
    lie: IntArray = np.full(said.max_messages, tag)
    truth = randomize(protocol, episode)
    lied, told = (analyze(protocol, shuffle([*honest, last]), users)[tag] for last in (lie, truth))
    moved = float(lied - told)
    return Figure.at_most(1, "shift of one counter by one liar of 1,000", "", moved, said.max_messages, "cap")


def regret(mdp: MDP, share: float, seed: int) -> float:
    """Of a run in which this share of the users says that staying at the left end pays, as loudly as it can."""
    learner = learners.make("optimistic", mdp.problem(EPISODES), seed, first=100)
    privatizer = Poisoned(shuffled(BUDGET, Service.of(learner, seed)), share)
    return learn(learner, CountPopulation(mdp, seed), privatizer).total_regret


class Poisoned(Privatizer):
    """Releases of another privatizer with the messages of liars on top."""

    def __init__(self, inner: Privatizer, share: float) -> None:
        self._inner, self._share = inner, share
        self._rng = np.random.default_rng(0)

    def release(self, counts: Counts) -> Release:
        """All that the cap allows, on the rewards of the first action in the first state of all steps asked."""
        release = self._inner.release(counts)
        liars, tags = self._rng.binomial(counts.batch.users, self._share), _favoured(counts.batch.query)
        values = release.values.copy()
        values[tags] += liars * understood(counts.batch).max_messages / max(1, len(tags))
        return replace(release, values=values)

    def certificate(self, query: Query) -> None:
        """Nothing is guaranteed to liars."""


def understood(batch: Batch) -> Agreement:
    """The batch as the network announces it."""
    noise = agreement.by_users(BUDGET, 1.0).noise(batch.query)
    said = agreement.announce(batch, noise, task=bytes(16), attempt=0, tag_key=bytes(32))
    return agreement.parse_announcement(wire.encode(said))


def _favoured(query: CountQuery) -> list[int]:
    return [query.tag(Counter("reward", step, 0, 0, 1)) for step in query.reward_steps]


def _still(mdp: MDP) -> Trajectories:
    """An episode that stays where it began and is paid nothing."""
    zeros = np.zeros((1, mdp.horizon), dtype=np.int64)
    return Trajectories(zeros, zeros, zeros)
