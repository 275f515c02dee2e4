"""The reference in plain NumPy decides as the library does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from examples.optimistic_reference import Reference

from shufflerl import privatizers
from shufflerl.learners.optimistic import Optimistic
from shufflerl.learners.optimistic.constants import CONSTANTS as C
from shufflerl.learners.optimistic.learner import smallest_try
from shufflerl.mdp import MDP, homogeneous
from shufflerl.population import CountPopulation
from tests.support.examples import random_mdp

_RNG = np.random.default_rng(4)
#: Alike at every step, and all begin in one state.
ALIKE = homogeneous(_RNG.dirichlet(np.ones(3), (3, 2)), _RNG.random((3, 2)), 4, [1.0, 0.0, 0.0])


@pytest.mark.parametrize(("epsilon", "batches"), [(None, None), (5.0, None), (0.5, None), (0.5, 7)])
@pytest.mark.parametrize(
    "mdp",
    [
        pytest.param(random_mdp(1, 3, 3, 2, start=0), id="mdp", marks=pytest.mark.slow),
        pytest.param(random_mdp(2, 1, 1, 4), id="arms"),
        pytest.param(random_mdp(3, 4, 2, 3), id="starts", marks=pytest.mark.slow),
        pytest.param(ALIKE, id="alike", marks=pytest.mark.slow),
        pytest.param(random_mdp(5, 3, 1, 2), id="one", marks=pytest.mark.slow),
    ],
)
def test_every_batch_is_the_same(mdp: MDP, epsilon: float | None, batches: int | None) -> None:
    """What is played, by how many, and what is asked, in all batches of a run."""
    learner = Optimistic(mdp.problem(20_000), 0, batches)
    privatizer = privatizers.make("none")
    if epsilon is not None:
        privatizer = privatizers.make("shuffle", learner, epsilon=epsilon, delta=1e-5, seed=1)
        if noise := privatizer.expected_noise(learner.widest_query):
            learner.expect(noise)
    reference, population = Reference(mdp.rewards.shape, mdp.start), CountPopulation(mdp, 2)
    same = np.random.Generator(type(learner.rng.bit_generator)())
    while True:
        same.bit_generator.state = learner.rng.bit_generator.state
        left = learner.episodes_left
        batch = learner.next_batch()
        if batch is None:
            break
        ties = same.random(
            (C.policies + (round((C.batches / batches - 1) * C.probes) if batches else 0), *mdp.rewards.shape)
        )
        smallest = smallest_try(math.sqrt(learner.noise_variance))
        users, following = float(batch.users), float(learner.sizes[batch.index + 1 :][:1].sum())
        variances = learner.variances if batch.index else np.array([learner.noise_variance])
        policies, shares, asked = reference.plan(users, left - users, following, variances, smallest, ties)
        distinct, which = np.unique(policies, axis=0, return_inverse=True)
        weights = np.bincount(which.ravel(), shares / users)
        where = f"batch {batch.index}"
        np.testing.assert_array_equal(distinct, batch.mixture.policies, err_msg=where)
        np.testing.assert_allclose(weights, batch.mixture.weights, err_msg=where)
        np.testing.assert_array_equal(asked, batch.table_query.asked, err_msg=where)
        release = privatizer.release(population.play(batch))
        learner.observe(release)
        reference.learn(release)
        np.testing.assert_allclose(reference.p[:-1].ravel(), learner.model.probabilities, atol=1e-9)
    assert learner.batches_observed > 5
