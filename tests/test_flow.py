"""The flow step: exact identities, unbiasedness, less noise; and the model made of its output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl.checks import FloatArray
from shufflerl.counts import Batch, CountQuery, Release
from shufflerl.estimation.flow import conserve
from shufflerl.estimation.model import Evidence
from shufflerl.mdp import MDP, Mixture
from shufflerl.population import CountPopulation
from shufflerl.privacy.noise import GaussianNoise, Silent
from tests.examples import mdps, random_mdp, random_mixture


def _release(mdp: MDP, users: int, mixture: Mixture, sd: float, seed: int) -> tuple[Release, FloatArray]:
    batch = Batch(0, users, mixture, CountQuery.everything(mdp.problem(users)))
    counts = CountPopulation(mdp, seed).play(batch).values.astype(np.float64)
    if sd == 0:
        return Release(batch, counts, Silent(), 0.0), counts
    noise = GaussianNoise(sd)
    return Release(batch, counts + noise.sample(np.random.default_rng(seed), counts.size), noise, sd**2), counts


@settings(max_examples=60, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6), users=st.integers(1, 10**6))
def test_users_are_conserved_afterwards(mdp: MDP, seed: int, users: int) -> None:
    release, _ = _release(mdp, users, random_mixture(mdp, 2, seed), 25.0, seed)
    moves, pays = release.batch.query.scatter(conserve(release, mdp.start).values)
    everyone = pays.sum(axis=(1, 2, 3))
    np.testing.assert_allclose(everyone, users, rtol=1e-9, atol=1e-6)
    if mdp.support is None:
        # Where all cells are possible the step is exact: rows agree with rewards, arrivals with departures.
        np.testing.assert_allclose(moves.sum(axis=-1), pays[:-1].sum(axis=-1), atol=1e-6)
        np.testing.assert_allclose(moves.sum(axis=(1, 2)), pays[1:].sum(axis=(2, 3)), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(mdp=mdps, seed=st.integers(0, 10**6))
def test_true_counts_are_left_alone(mdp: MDP, seed: int) -> None:
    """What already obeys the identities does not move, noise law or not: the step is a projection."""
    release, counts = _release(mdp, 1000, random_mixture(mdp, 2, seed), 0.0, seed)
    pretended = Release(release.batch, counts, GaussianNoise(5.0), 25.0)
    conserved = conserve(pretended, mdp.start)
    np.testing.assert_allclose(conserved.values, release.values, atol=1e-8)
    np.testing.assert_allclose(conserved.visits, release.tables[1].sum(axis=(2, 3)), atol=1e-8)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("start", [None, 0])
def test_it_is_unbiased_and_removes_noise(sparse: bool, start: int | None) -> None:
    """4,000 draws: each cell's mean error within 6 deviations; the mean squared error falls by a third or more."""
    mdp = random_mdp(3, horizon=4, states=4, actions=2, sparse=sparse, start=start)
    mixture = random_mixture(mdp, 2, 0)
    errors, raw = [], []
    for seed in range(4000):
        release, counts = _release(mdp, 500, mixture, 20.0, seed)
        errors.append(conserve(release, mdp.start).values - counts)
        raw.append(release.values - counts)
    bias = np.mean(errors, axis=0)
    assert (np.abs(bias) < 6 * 20.0 / np.sqrt(4000)).all()
    assert np.mean(np.square(errors)) < 0.67 * np.mean(np.square(raw))


def test_what_nobody_was_told_to_do_is_nothing() -> None:
    mdp = random_mdp(0, start=1)
    policy = np.zeros((3, 3), dtype=np.int32)
    release, _ = _release(mdp, 100, Mixture.single(policy), 10.0, 1)
    moves, pays = release.batch.query.scatter(conserve(release, mdp.start).values)
    assert not moves[:, :, 1].any()
    assert not pays[:, :, 1].any()
    assert not pays[0, [0, 2]].any()


def test_pooled_evidence_finds_the_model() -> None:
    """Many releases of noise together tell what one cannot; small batches hardly count."""
    mdp = random_mdp(5, horizon=3, states=3, actions=2)
    evidence = Evidence(mdp.problem(10**7))
    for seed in range(20):
        evidence.add(_release(mdp, 100_000, random_mixture(mdp, 6, seed), 30.0, seed)[0])
    model = evidence.model()
    assert model.known[1:].all()
    np.testing.assert_allclose(model.transitions[model.known[:-1]], mdp.transitions[model.known[:-1]], atol=0.02)
    np.testing.assert_allclose(model.rewards[model.known], mdp.rewards[model.known], atol=0.02)
    np.testing.assert_allclose(model.transitions[model.known[:-1]].sum(axis=-1), 1.0)


def test_stated_errors_cover_the_errors_made() -> None:
    """Rewards of known rows: squared errors over stated variances average to about one or less."""
    scores = []
    for seed in range(200):
        mdp = random_mdp(seed, horizon=2, states=3, actions=2)
        evidence = Evidence(mdp.problem(10**6))
        for part in range(4):
            evidence.add(_release(mdp, 3000, random_mixture(mdp, 4, part), 15.0, 10 * seed + part)[0])
        model = evidence.model()
        sure = model.known & (model.noise < 0.01)
        variance = model.sampling * mdp.rewards * (1 - mdp.rewards) + 0.5 * model.noise
        scores.append((((model.rewards - mdp.rewards) ** 2) / variance)[sure])
    mean = np.concatenate(scores).mean()
    assert 0.5 < mean < 1.2


def test_noise_alone_makes_nothing_known() -> None:
    mdp = random_mdp(1, horizon=3, states=4, actions=2, start=0)
    evidence = Evidence(mdp.problem(100))
    evidence.add(_release(mdp, 1, random_mixture(mdp, 4, 0), 200.0, 0)[0])
    assert evidence.model().known.mean() < 0.5
    assert np.isfinite(evidence.model().transitions).all()
