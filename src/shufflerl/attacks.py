"""Users who lie: what they say, how many they are, and what they may send.

A liar knows the environment and the policy it was given, and makes up an episode: one that somebody else's environment,
a worse one for the learner, would have made. Where the servers add the noise a report is one tag of each family and
step, so that a liar moves any counter by at most one, as an honest user does: its episode is counted like any other.
Where users add the noise, a report may have as many tags as any honest user may need, and a liar sends all of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from shufflerl import checks
from shufflerl.arrays import BoolArray, FloatArray, IntArray, PolicyArray
from shufflerl.counts import Batch, Counts, Query, Release
from shufflerl.mdp import MDP, Mixture
from shufflerl.noise import PoissonNoise
from shufflerl.planning import optimal_q
from shufflerl.population import CountPopulation
from shufflerl.privacy.certificate import Certificate
from shufflerl.privatizers.base import Privatizer
from shufflerl.seeding import Seed, stream

#: Who lies early does so among the first of all users, this part of them.
EARLY = 0.1
#: If all liars come first, they are at most this part of a batch.
MAX_CROWDED = 0.5


@dataclass(frozen=True, eq=False)
class Lie:
    """Episodes of another environment: by the policy that was given out, or by one of their own.

    `early` liars lie in the first batches only; `crowded` ones all come as early as they may, rather than evenly.
    """

    mdp: MDP
    policy: PolicyArray | None = None
    early: bool = False
    crowded: bool = False


def rewards_of_one_action(mdp: MDP) -> Lie:
    """Whoever always takes the action that is worst in the first state is paid at every step."""
    q = _q(mdp)
    action = int((mdp.start @ q[0]).argmin())
    rewards = mdp.rewards.copy()
    rewards[:, :, action] = 1.0
    always = np.full((mdp.horizon, mdp.n_states), action, dtype=np.int32)
    return Lie(_altered(mdp, rewards=rewards), always)


def hidden_way(mdp: MDP) -> Lie:
    """The best actions lead where least is to be gained."""
    return Lie(_altered(mdp, worse=_best(mdp)))


def false_episodes(mdp: MDP) -> Lie:
    """The best actions pay nothing and lead where least is to be gained, the others pay and lead where most is."""
    best = _best(mdp)
    return Lie(_altered(mdp, rewards=np.where(best, 0.0, 1.0), worse=best, better=~best))


def early_lies(mdp: MDP) -> Lie:
    """False episodes in the first batches, before much is known."""
    return replace(false_episodes(mdp), early=True)


def early_crowd(mdp: MDP) -> Lie:
    """False episodes of all the run's liars in its first batches, of which they are a half: a share of the users."""
    return replace(false_episodes(mdp), crowded=True)


def flattered_rival(mdp: MDP) -> Lie:
    """Of the actions on the best way the one that is nearest to the best of its state pays; the best there does not."""
    rewards, policy = mdp.rewards.copy(), _q(mdp).argmax(axis=2)
    h, x, rival = _rival(mdp)
    rewards[h, x, policy[h, x]] = 0.0
    rewards[h, x, rival] = 1.0
    return Lie(_altered(mdp, rewards=rewards))


def played_rival(mdp: MDP) -> Lie:
    """The same rival, by liars who say that they played it, whatever they were given."""
    h, x, rival = _rival(mdp)
    policy = _q(mdp).argmax(axis=2).astype(np.int32)
    policy[h, x] = rival
    return replace(flattered_rival(mdp), policy=policy)


#: What liars may do, by name.
ATTACKS: dict[str, Callable[[MDP], Lie]] = {
    "rewards of one action": rewards_of_one_action,
    "hidden way": hidden_way,
    "false episodes": false_episodes,
    "early lies": early_lies,
    "flattered rival": flattered_rival,
    "played rival": played_rival,
    "early crowd": early_crowd,
}


class LyingPopulation:
    """Users of whom a share lie; each is counted once in each family and step, honest or not.

    With `admission` so many times the users of each batch are drawn for it, by lot among all who have not played, as
    the network does it. Those who crowd are then the first of these, and not of all.
    """

    def __init__(
        self, mdp: MDP, attack: str, share: float, episodes: int, seed: Seed, admission: float | None = None
    ) -> None:
        self.mdp = mdp
        self.lie = ATTACKS[checks.choice("attack", attack, tuple(ATTACKS))](mdp)
        self.share = checks.real("share of liars", share, above=0, below=1, closed=True)
        self.admission = None if admission is None else checks.real("admission", admission, above=1, closed=True)
        self._episodes, self._left = episodes, round(self.share * episodes)  # of those who crowd
        self._early = EARLY * episodes
        self._played = 0
        self._honest = CountPopulation(mdp, seed)
        self._liars = CountPopulation(self.lie.mdp, np.random.SeedSequence([_entropy(seed), 1]))
        self.rng = stream(seed, "users", 1)
        #: What the liars of the last batch said: their number, and their counts.
        self.lies_told: tuple[int, IntArray] = (0, np.zeros(0, dtype=np.int64))

    def play(self, batch: Batch) -> Counts:
        """Let honest users play, and liars say what they like."""
        if self.lie.crowded:
            liars = min(self._drawn(batch.users), int(batch.users * MAX_CROWDED))
            self._left -= liars
        else:
            liars = int(self.rng.binomial(batch.users, self.share))
            liars *= not self.lie.early or self._played < self._early
        self._played += batch.users
        values, earned = np.zeros(batch.query.size, dtype=np.int64), 0.0
        if liars < batch.users:
            honest = self._honest.play(replace(batch, users=batch.users - liars))
            values, earned = honest.values, honest.earned
        lies = np.zeros_like(values)
        if liars:
            mixture = batch.mixture if self.lie.policy is None else Mixture.single(self.lie.policy)
            lies = self._liars.play(replace(batch, users=liars, mixture=mixture)).values
        self.lies_told = liars, lies
        return Counts(batch, values + lies, earned)

    def _drawn(self, users: int) -> int:
        """How many of the liars who are left may take part in a batch of so many users."""
        if self.admission is None:
            return self._left
        share = min(1.0, self.admission * users / (self._episodes - self._played))
        return int(self.rng.binomial(self._left, share))


class Flooding(Privatizer):
    """Noise by users, among whom liars fill their reports to the last message: each repeats its lie about rewards."""

    def __init__(self, inner: Privatizer, population: LyingPopulation) -> None:
        self._inner, self._population = inner, population

    def release(self, counts: Counts) -> Release:
        """What honest users would have had released, and what liars send beyond one tag of each family and step."""
        release = self._inner.release(counts)
        liars, lies = self._population.lies_told
        query = counts.batch.table_query
        loudest = lies.copy()
        if query.reward_steps:
            loudest[: query.row_starts[-1]] = 0
        noise = release.noise
        assert isinstance(noise, PoissonNoise)
        excess = liars * (messages_per_report(query, counts.batch.users, noise.mean) - query.touched_counters)
        values = release.values + loudest * (excess / max(1, int(loudest.sum())))
        return replace(release, values=values)

    def certificate(self, query: Query) -> Certificate | None:
        """Lies cost nobody's privacy."""
        return self._inner.certificate(query)


def messages_per_report(query: Query, users: int, noise_mean: float) -> int:
    """How many tags a report may have where users add the noise: what any honest user of the batch may need.

    One that draws more than so many of a Poisson count occurs in a batch with a probability below exp(-35).
    """
    mean, limit = query.size * noise_mean / users, 35 + math.log(users)
    most = math.ceil(mean)
    while (most + 1) * math.log((most + 1) / mean) - (most + 1) + mean < limit:
        most += 1
    return query.touched_counters + most


def _entropy(seed: Seed) -> int:
    return int(seed.generate_state(1)[0]) if isinstance(seed, np.random.SeedSequence) else seed


@functools.lru_cache(maxsize=8)
def _q(mdp: MDP) -> FloatArray:
    return optimal_q(mdp.transitions, mdp.rewards)


def _best(mdp: MDP) -> BoolArray:
    """best[h, x, a]: whether an action is optimal."""
    q = _q(mdp)
    return np.asarray(q >= q.max(axis=2, keepdims=True) - 1e-12)


def _rival(mdp: MDP) -> tuple[int, int, int]:
    """Step, state and action of the least gap on the way of an optimal policy."""
    q = _q(mdp)
    policy, met = q.argmax(axis=2), mdp.start.copy()
    gaps = np.full(q.shape, math.inf)
    for h in range(mdp.horizon):
        gap = q[h].max(axis=1, keepdims=True) - q[h]
        gaps[h] = np.where((met[:, None] > 0.05) & (gap > 1e-9), gap, math.inf)
        if h < mdp.horizon - 1:
            met = np.einsum("x,xy->y", met, mdp.transitions[h, np.arange(mdp.n_states), policy[h]])
    step, state, action = np.unravel_index(int(gaps.argmin()), gaps.shape)
    return int(step), int(state), int(action)


def _altered(
    mdp: MDP, rewards: FloatArray | None = None, worse: BoolArray | None = None, better: BoolArray | None = None
) -> MDP:
    """The environment with other rewards, and moves of some rows that surely end where least, or most, is to be gained.

    Only where it is known to be possible: a transition outside the support has no counter.
    """
    transitions, values = mdp.transitions.copy(), _q(mdp).max(axis=2)
    told = mdp.layout.table(mdp.transition_rewards) if len(mdp.transition_rewards) and rewards is None else None
    for rows, sign in ((worse, -1.0), (better, 1.0)):
        if rows is None:
            continue
        for h, x, a in zip(*np.nonzero(rows[: mdp.horizon - 1]), strict=True):
            possible = np.ones(mdp.n_states, dtype=np.bool_) if mdp.support is None else mdp.support[h, x, a]
            end = int(np.where(possible, sign * values[h + 1], -math.inf).argmax())
            transitions[h, x, a] = 0.0
            transitions[h, x, a, end] = 1.0
    means = mdp.rewards.copy() if rewards is None else rewards
    if told is None:
        return MDP(transitions, means, mdp.start, support=mdp.support)
    means[:-1] = (transitions * told).sum(axis=-1)  # as where they say they end pays
    return MDP(transitions, means, mdp.start, support=mdp.support).paying(told)
