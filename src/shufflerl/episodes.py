"""UCBVI on simulated users, many episodes per call: the loop's own steps in compiled code, bit for bit the same.

A learner that plans after every single episode would spend its time in Python's call overhead. This runs the same
compiled functions (plan, draw counts, add) on the same random streams, with the privatizer's noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from shufflerl.arrays import BoolArray, FloatArray, IntArray, PolicyArray, StateArray
from shufflerl.compiling import compiled
from shufflerl.layout import Layout
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.learners.ucbvi_kernels import optimistic_policy
from shufflerl.mdp import Mixture
from shufflerl.planning_kernels import policy_value
from shufflerl.population import CountPopulation, Population
from shufflerl.population_kernels import add_counts
from shufflerl.privatizers.base import AdditivePrivatizer, Privatizer
from shufflerl.privatizers.none import NoPrivacy

#: Episodes per call, so that progress can be shown and interrupted, and numbers of noise to hold at once.
LONGEST = 2048
MAX_NOISE = 4_000_000


@dataclass(frozen=True)
class EpisodeStretch:
    """A learner, population and privatizer whose episodes can be played in compiled stretches."""

    learner: UCBVI
    population: CountPopulation
    privatizer: Privatizer

    @classmethod
    def if_possible(cls, learner: Learner, population: Population, privatizer: Privatizer) -> EpisodeStretch | None:
        """The stretch player for these three, or None when they must go through the loop one batch at a time."""
        if type(learner) is not UCBVI or learner.batch != 1 or learner.waits:
            return None
        if type(population) is not CountPopulation or not _draws_ahead(privatizer):
            return None
        return cls(learner, population, privatizer)

    def play(self, most: int | None) -> tuple[PolicyArray, FloatArray]:
        """Play a stretch of at most `most` episodes: the policies[t, h, x] that were deployed and their true values."""
        learner, mdp = self.learner, self.population.mdp
        every = Layout(mdp.layout.shape) if mdp.layout.rows else mdp.layout  # the learner's sums are tables of all
        count = min(learner.episodes_left, LONGEST, LONGEST if most is None else most)
        count = max(1, min(count, MAX_NOISE // learner.query.size))
        policies = np.empty((count, *learner.policy.shape), dtype=np.int32)
        policies[0] = learner.policy
        values = np.empty(count)
        batches = range(learner.batches_observed, learner.batches_observed + count)
        noise, added_variances = self.privatizer.noise_of_episodes(learner.query, batches)
        noise_moves, noise_pays = (np.ascontiguousarray(table) for table in learner.query.scatter(noise))
        learner.noise_variance = play_episodes(
            learner.rng,
            self.population.rng,
            every.row_starts,
            every.successors,
            mdp.transitions.reshape(-1),
            mdp.rewards,
            mdp.start,
            learner.moves,
            learner.pays,
            noise_moves,
            noise_pays,
            added_variances,
            learner.noise_variance,
            *learner.bonus_arguments,
            policies,
            values,
        )
        learner.policy[:] = policies[-1]
        learner.deployed = Mixture.single(learner.policy)
        learner.episodes_played += count
        learner.batches_observed += count
        return policies, values


def _draws_ahead(privatizer: Privatizer) -> bool:
    """Whether the privatizer's noise can be drawn before the counts; not if a subclass releases in a way of its own."""
    own = type(privatizer).release
    return privatizer.draws_ahead and own in (AdditivePrivatizer.release, NoPrivacy.release)


@compiled
def add_noisy(sums: FloatArray, seen: FloatArray, noise: FloatArray) -> None:
    """Add what was seen and its noise to the sums, and forget it. In one loop: array expressions compile slowly."""
    total, part, added = sums.reshape(-1), seen.reshape(-1), noise.reshape(-1)
    for i in range(len(total)):
        total[i] += part[i] + added[i]
        part[i] = 0.0


@compiled
def play_episodes(
    planner: Generator,
    users: Generator,
    row_starts: IntArray,
    successors: StateArray,
    probabilities: FloatArray,
    rewards: FloatArray,
    start: FloatArray,
    moves: FloatArray,
    pays: FloatArray,
    noise_moves: FloatArray,
    noise_pays: FloatArray,
    added_variances: FloatArray,
    variance: float,
    support: BoolArray,
    bernstein: bool,
    scale: float,
    log_term: float,
    policies: PolicyArray,
    values: FloatArray,
) -> float:
    """One episode per entry of `policies` and `values`: plan, play one user, add its noisy counts to the sums.

    Rows lead everywhere, so that transitions stand in the order of `moves`. `policies[0]` comes in as the policy
    deployed so far. `noise_moves[t]` and `noise_pays[t]` are what the privatizer adds to the counts of episode t (no
    entries: nothing), by which the noise of the sums, of `variance` before the first episode, grows by
    `added_variances[t]`. Returns its variance after the last.
    """
    states = start.shape[0]
    value = np.empty(states)
    after = np.empty(states)
    noisy = len(noise_moves) > 0
    seen_moves = np.zeros_like(moves) if noisy else moves
    seen_pays = np.zeros_like(pays) if noisy else pays
    for t in range(len(policies)):
        policy = policies[t]
        if t > 0:
            for h, x in np.ndindex(policy.shape):
                policy[h, x] = policies[t - 1, h, x]
        optimistic_policy(planner, moves, pays, variance, support, bernstein, scale, log_term, policy, value, after)
        policy_value(row_starts, successors, probabilities, rewards, policy, value, after)
        total = 0.0
        for x in range(states):
            total += start[x] * value[x]
        values[t] = total
        add_counts(
            users, row_starts, successors, probabilities, rewards, start, policy, 1, seen_moves.reshape(-1), seen_pays
        )
        if noisy:
            add_noisy(moves, seen_moves, noise_moves[t])
            add_noisy(pays, seen_pays, noise_pays[t])
            variance += added_variances[t]
    return variance
