"""The statistics of an audit: of few draws too they raise no more false alarms than they state."""

from __future__ import annotations

import numpy as np
import pytest

from shufflerl.noise import DiscreteLaplace, PoissonNoise, TruncatedLaplace, Whole
from shufflerl.privacy.audit.statistics import cells, fit, outcomes, spread_fit, tails_fit

LAWS = [DiscreteLaplace(2.0), TruncatedLaplace(2.0, 24), PoissonNoise(12.7)]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_three_batches_raise_no_false_alarm(law: Whole) -> None:
    """One in a hundred of 4,000 tables, give or take four deviations; normal scores would raise three or four."""
    tables = law.sample(np.random.default_rng(1), 4000 * 3 * 12).reshape(4000, 3, 12)
    by_counter = [tails_fit(table.sum(axis=0), law.repeated(3)) for table in tables]
    narrow = [spread_fit(table, law)[0] for table in tables]
    for p_values in (by_counter, narrow):
        assert np.mean(np.array(p_values) < 0.01) < 0.01 + 4 * np.sqrt(0.01 / 4000)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_tails_are_those_of_the_law(law: Whole) -> None:
    """The p-value of one draw is twice the smaller of its tails, itself included; 1e-12 of the law is not listed."""
    values, masses = outcomes(law)
    assert masses.sum() == pytest.approx(1)
    for place in range(0, len(values), 5):
        tail = min(masses[: place + 1].sum(), masses[place:].sum())
        assert tails_fit(values[place : place + 1], law) == pytest.approx(min(1.0, 2 * tail), rel=1e-6, abs=4e-12)


@pytest.mark.parametrize("law", [*LAWS, DiscreteLaplace(0.3)], ids=str)
def test_cells_have_the_draws_and_their_probabilities(law: Whole) -> None:
    """Of a law of few outcomes too, of which none is left with hardly any draw to expect."""
    noise = law.sample(np.random.default_rng(2), 2000)
    observed, probabilities = cells(noise, law)
    assert observed.sum() == 2000
    assert probabilities.sum() == pytest.approx(1)
    assert 2000 * probabilities.min() >= 5
    assert np.abs(observed / 2000 - probabilities).max() < 4 * 0.5 / np.sqrt(2000)
    assert fit(noise, law) > 1e-4
    assert fit(noise + 2, law) < 1e-6


def test_halved_noise_varies_too_little_and_doubled_too_much() -> None:
    law = DiscreteLaplace(4.0)
    draws = law.sample(np.random.default_rng(3), 400)
    assert spread_fit(draws / 2, law)[0] < 1e-12 < spread_fit(draws / 2, law)[1]
    assert spread_fit(draws * 2, law)[1] < 1e-12 < spread_fit(draws * 2, law)[0]
    sums = draws.reshape(-1, 4).sum(axis=1)
    assert min(spread_fit(sums, law, each=4)) > 0.01
