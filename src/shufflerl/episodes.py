"""UCBVI on simulated users, many episodes per call: the loop's own steps in compiled code, bit for bit the same.

A learner that plans after every single episode would spend its time in Python's call overhead. This runs the same
compiled functions (plan, draw counts, add) on the same random streams, with the privatizer's noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shufflerl import checks
from shufflerl.arrays import FloatArray, PolicyArray
from shufflerl.episodes_kernels import play_episodes
from shufflerl.layout import Layout
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.mdp import Mixture
from shufflerl.population import CountPopulation, Population
from shufflerl.privatizers.base import AdditivePrivatizer, Privatizer
from shufflerl.privatizers.none import NoPrivacy

#: Episodes per call, so that progress can be shown and interrupted, and numbers of noise to hold at once.
MAX_EPISODES = 2048
MAX_NOISE = 4_000_000


@dataclass(frozen=True)
class CompiledUCBVI:
    """A learner, population and privatizer whose episodes can be played in compiled code."""

    learner: UCBVI
    population: CountPopulation
    privatizer: Privatizer

    @classmethod
    def if_possible(cls, learner: Learner, population: Population, privatizer: Privatizer) -> CompiledUCBVI | None:
        """The compiled loop of these three, or None when they must go through the loop one batch at a time."""
        if type(learner) is not UCBVI or learner.batch != 1 or learner.waits:
            return None
        if type(population) is not CountPopulation or not _draws_ahead(privatizer):
            return None
        return cls(learner, population, privatizer)

    def play(self, most: int | None) -> tuple[PolicyArray, FloatArray]:
        """Play at most `most` episodes: the policies[t, h, x] that were deployed and their true values."""
        learner, mdp = self.learner, self.population.mdp
        every = Layout(mdp.layout.shape) if mdp.layout.rows else mdp.layout  # the learner's sums are tables of all
        count = min(learner.episodes_left, MAX_EPISODES, MAX_EPISODES if most is None else most)
        count = max(1, min(count, MAX_NOISE // learner.query.size))
        policies = np.empty((count, *learner.policy.shape), dtype=np.int32)
        policies[0] = learner.policy
        values = np.empty(count)
        batches = range(learner.batches_observed, learner.batches_observed + count)
        noise, added_variances = self.privatizer.noise_of_episodes(learner.query, batches)
        noise_moves, noise_pays = (np.ascontiguousarray(table) for table in learner.query.scatter(noise))
        dynamics = mdp.dynamics._replace(
            row_starts=every.row_starts, successors=every.successors, probabilities=mdp.transitions.ravel()
        )
        if len(mdp.transition_rewards):
            table = checks.frozen(mdp.layout.table(mdp.transition_rewards).ravel())
            dynamics = dynamics._replace(transition_rewards=table)
        learner.noise_variance = play_episodes(
            learner.rng,
            self.population.rng,
            dynamics,
            learner.moves,
            learner.pays,
            noise_moves,
            noise_pays,
            added_variances,
            learner.noise_variance,
            learner.compiled_bonus,
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
