"""The ledger: what adds up, what fits, and that nothing more is spent."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.counts import CountQuery
from shufflerl.errors import BudgetExceededError, ContractError
from shufflerl.mdp import Problem
from shufflerl.noise import BinomialNoise, GaussianNoise, NoNoise, PoissonNoise, UnaryNoise
from shufflerl.privacy import ledger as ledger_module
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, calibrate_unary
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ShuffledPoisson
from tests.contracts.budget import DELTA, lattice_epsilon

BUDGET = Budget(1.0, 1e-5)
FULL = Charge(calibrate(BUDGET, 22), 22)
HALF = Charge(calibrate(Budget(0.5, 1e-5), 22), 22)


def test_disjoint_users_share_the_budget_in_parallel() -> None:
    ledger = Ledger("task", BUDGET)
    for batch in range(5):
        ledger.record(f"batch {batch}", FULL)
    assert ledger.spent == pytest.approx(1.0, rel=1e-3)
    assert ledger.spent <= 1.0 + 1e-9
    assert ledger.releases == [f"batch {batch}" for batch in range(5)]


@pytest.mark.slow
def test_the_same_users_compose() -> None:
    ledger = Ledger("task", BUDGET)
    ledger.record("first", HALF, cohort="ward 7")
    spent = ledger.spent
    ledger.record("second", HALF, cohort="ward 7")
    assert ledger.spent == pytest.approx(privacy_loss(HALF.noise, 22, 2).epsilon(1e-5))
    assert spent < ledger.spent < 2 * spent  # equal charges compose better than by adding up
    assert Ledger("other", BUDGET).spent == 0.0


def test_overspending_is_refused_and_leaves_no_trace() -> None:
    ledger = Ledger("task", BUDGET)
    ledger.record("first", FULL, cohort="ward 7")
    with pytest.raises(BudgetExceededError, match="Nothing fits any more"):
        ledger.record("second", FULL, cohort="ward 7")
    ledger.record("elsewhere", FULL, cohort="ward 8")
    assert ledger.releases == ["first", "elsewhere"]


@pytest.mark.slow
def test_the_refusal_tells_spent_from_asked_and_what_fits() -> None:
    ledger = Ledger("task", BUDGET)
    ledger.record("first", HALF, cohort="ward 7")
    with pytest.raises(BudgetExceededError) as refused:
        ledger.record("second", FULL, cohort="ward 7")
    text = str(refused.value)
    assert "epsilon 1, delta 1e-05" in text
    assert "have spent epsilon 0.5," in text
    assert "1 more is asked" in text


@pytest.mark.parametrize(
    ("history", "changed"),
    [
        ([], 22),
        ([], 2),
        ([], 66),
        ([HALF], 22),
        ([Charge(GaussianNoise(60.0), 22)], 4),
        ([Charge(GaussianNoise(60.0), 22), Charge(PoissonNoise(9000.0), 22), Charge(UnaryNoise(1, 4, 0.49), 2)], 22),
    ],
)
@pytest.mark.parametrize("failure", [0.0, 1e-6])
def test_what_it_says_would_fit_fits(history: list[Charge], changed: int, failure: float) -> None:
    ledger = Ledger("task", BUDGET)
    for number, charge in enumerate(history):
        ledger.record(str(number), charge, cohort="ward 7")
    with pytest.raises(BudgetExceededError) as refused:
        ledger.record("next", Charge(PoissonNoise(12.0), changed, failure), cohort="ward 7")
    figure = str(refused.value).split("Poisson noise of mean ")[1].split(" or more", maxsplit=1)[0]
    ledger.record("next", Charge(PoissonNoise(float(figure.replace(",", ""))), changed, failure), cohort="ward 7")
    assert ledger.spent <= 1.0


@given(parts=st.lists(st.floats(1e-9, 10), min_size=1, max_size=6), delta=st.floats(1e-12, 0.5))
def test_what_is_added_up_or_shared_out_is_rounded_against_us(parts: list[float], delta: float) -> None:
    """By no more than the last digit, and not at all where nothing need be rounded."""
    exact, stated = sum(map(Fraction, parts)), ledger_module.sum_up(parts)
    assert math.nextafter(stated, 0) < exact <= stated
    count = len(parts)
    share = ledger_module.share_of(delta, count)
    assert count * Fraction(share) <= delta < count * Fraction(math.nextafter(share, 1))
    assert ledger_module.sum_up([0.25, 0.5]) == 0.75
    assert ledger_module.sum_up([math.inf, 1.0]) == math.inf


def test_two_halves_of_a_budget_fit(tmp_path: Path) -> None:
    """Of different kinds, each calibrated to half of epsilon and delta: nothing is lost to rounding."""
    half, ledger = Budget(0.5, 0.5e-5), Ledger("task", BUDGET)
    ledger.record("first", Charge(calibrate_gaussian(half, 22), 22), cohort="ward 7")
    ledger.record("second", Charge(calibrate(half, 22), 22), cohort="ward 7")
    assert ledger.spent <= 1.0


@settings(deadline=None)
@given(epsilon=st.floats(-1, 1), delta=st.floats(-9, -2))
def test_what_is_calibrated_to_any_budget_fits_it(epsilon: float, delta: float) -> None:
    """Also where no twelve digits write the budget: an epsilon that is worked out again may be a rounding above it."""
    budget = Budget(10**epsilon, 10**delta)
    ledger = Ledger("task", budget)
    ledger.record("report", Charge(UnaryNoise(1, 3, calibrate_unary(budget)), 2), cohort="one")
    ledger.record("batch", Charge(calibrate_gaussian(budget, 22), 22), cohort="another")


def test_too_little_noise_is_refused_at_once() -> None:
    with pytest.raises(BudgetExceededError, match="What would fit: Poisson noise of mean 307"):
        Ledger("task", BUDGET).record("batch 0", Charge(PoissonNoise(300.0), 22))


def test_several_releases_are_recorded_all_or_none() -> None:
    ledger = Ledger("task", BUDGET)
    ledger.record_all(["a", "b"], FULL)
    with pytest.raises(ContractError, match="already"):
        ledger.record_all(["c", "a"], FULL)
    with pytest.raises(BudgetExceededError, match="overspend"):
        ledger.record_all(["d", "e"], FULL, cohort="same users")
    assert ledger.releases == ["a", "b"]


@pytest.mark.parametrize("failure", [0.0, 1e-15])
@pytest.mark.parametrize(
    "noise", [PoissonNoise(400.0), BinomialNoise(2000, 0.5), GaussianNoise(30.0), UnaryNoise(1, 4, 0.4)]
)
def test_every_law_comes_back_from_the_file(noise: PoissonNoise, failure: float, tmp_path: Path) -> None:
    charge = Charge(noise, 2, failure)
    with Ledger("task", BUDGET, tmp_path / "ledger") as ledger:
        ledger.record("batch 0", charge, cohort="me")
        spent = ledger.spent
    with Ledger("task", BUDGET, tmp_path / "ledger") as again:
        assert again.charges_of("me") == {charge: 1}
        assert again.spent == spent > 0


def test_what_cannot_be_accounted_cannot_be_charged() -> None:
    with pytest.raises(ContractError, match="not a law"):
        Ledger("task", BUDGET).record("batch 0", Charge(NoNoise(), 2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=8))
def test_no_order_of_charges_overspends(cohorts: list[str]) -> None:
    ledger = Ledger("task", BUDGET)
    third = Charge(calibrate_gaussian(Budget(0.3, 1e-5), 22), 22)
    accepted: dict[str, int] = {}
    for number, cohort in enumerate(cohorts):
        try:
            ledger.record(str(number), third, cohort=cohort)
            accepted[cohort] = accepted.get(cohort, 0) + 1
        except BudgetExceededError:
            assert privacy_loss(third.noise, 22, accepted[cohort] + 1).delta(1.0) > 1e-5
    assert ledger.spent <= 1.0
    assert len(ledger.releases) == sum(accepted.values())


KINDS = [Charge(PoissonNoise(mean), 2, failure) for mean, failure in ((90.0, 0.0), (90.0, 1e-10), (140.0, 3e-10))]


@settings(max_examples=25, deadline=None)
@given(asked=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), epsilon=st.floats(1.5, 5.0))
def test_noise_that_may_fail_is_charged_for_all_releases_together(asked: list[Charge], epsilon: float) -> None:
    """Against the worst there is, computed by the tests: when the noise of a release fails, all is told."""
    ledger, accepted = Ledger("task", Budget(epsilon, DELTA)), list[Charge]()
    for number, charge in enumerate(asked):
        try:
            ledger.record(str(number), charge, cohort="me")
            accepted.append(charge)
        except BudgetExceededError:
            pass
    if accepted:
        laws = [(stats.poisson(charge.noise.variance), charge.changed) for charge in accepted]
        exact = lattice_epsilon(laws, [charge.failure for charge in accepted])
        assert exact <= ledger.spent <= epsilon


def test_releases_that_fit_but_for_what_may_fail_are_refused() -> None:
    """As many fit as leave room for it: two releases that differ but for an event of probability p in either may cost
    (1 + e^epsilon) p more delta, as the event may add to one set and take from another.
    """
    noise, epsilon, failure = PoissonNoise(90.0), 2.0, 1e-11
    counts = []
    for charge in (Charge(noise, 2), Charge(noise, 2, failure)):
        ledger = Ledger("task", Budget(epsilon, DELTA))
        with contextlib.suppress(BudgetExceededError):
            for number in range(100):
                ledger.record(str(number), charge, cohort="me")
        counts.append(len(ledger.releases))
        assert ledger.spent <= epsilon
    deltas = [privacy_loss(noise, 2, times).delta(epsilon) for times in range(1, 10)]
    added = [delta + (1 + math.exp(epsilon)) * failure * times for times, delta in enumerate(deltas, 1)]
    assert counts == [sum(delta <= DELTA for delta in some) for some in (deltas, added)]


@settings(max_examples=50, deadline=None)
@given(failure=st.floats(-14, -9), about=st.floats(0.01, 4.0), mean=st.sampled_from([40.0, 90.0, 300.0]))
def test_what_is_told_to_be_spent_is_enough_whatever_the_budget(failure: float, about: float, mean: float) -> None:
    """Far above the budget too, as a refusal tells it; infinite only where more than the budget's epsilon is needed."""
    charge = Charge(PoissonNoise(mean), 2, 10**failure)
    spent = charge.epsilon(Budget(about, DELTA))
    assert charge.delta(spent) <= DELTA if math.isfinite(spent) else charge.delta(about) > DELTA


def test_where_only_what_may_fail_is_left_nothing_fits() -> None:
    ledger = Ledger("task", Budget(8.0, DELTA))
    hardly = Charge(PoissonNoise(1e6), 2, 0.4 * DELTA / (1 + math.exp(8.0)))
    ledger.record_all(["first", "second"], hardly, cohort="me")
    with pytest.raises(BudgetExceededError, match=r"Nothing fits any more"):
        ledger.record("third", hardly, cohort="me")
    with pytest.raises(BudgetExceededError, match=r"Nothing fits any more"):
        ledger.record("third", replace(hardly, changed=4), cohort="me")
    assert ledger.releases == ["first", "second"]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_certificate_counts_what_may_fail_once_for_each_time_a_user_takes_part(times: int) -> None:
    budget, query, failure = Budget(8.0, DELTA), CountQuery(Problem(1, 2, 2, 100), [], [0]), 2e-14
    mechanism = ShuffledPoisson(budget, times, failure=failure)
    law = stats.poisson(mechanism.noise(query).mean)
    assert lattice_epsilon([(law, 2)] * times, [failure] * times) <= mechanism.certificate(query).epsilon <= 8.0
    drawn = privacy_loss(PoissonNoise(mechanism.noise(query).mean), 2, times).delta(8.0)
    assert drawn + times * (1 + math.exp(8.0)) * failure <= DELTA
    ledger = Ledger("task", budget)
    ledger.record("all times", mechanism.charge(query))
    assert ledger.spent <= 8.0
    one = ShuffledPoisson(budget, 1, failure=failure).charge(CountQuery(Problem(1, 2, 2, 100), [], [0]))
    assert mechanism.charge(query).failure == times * one.failure == times * failure


def test_unary_reports_of_one_cohort_add_up() -> None:
    report = Charge(UnaryNoise(1, 4, 0.4), 2)
    alone = privacy_loss(report.noise, 2)
    ledger = Ledger("task", BUDGET)
    ledger.record("first", report, cohort="me")
    assert ledger.spent == alone.epsilon(1e-5)
    ledger.record("second", report, cohort="me")
    assert ledger.spent == 2 * alone.epsilon(0.5e-5)
    with pytest.raises(BudgetExceededError, match=r"0\.4055 more is asked, together 1\.217"):
        ledger.record("third", report, cohort="me")
    # Three reports by brute force: the one user's bit is a fair coin, the other's a one with probability 0.4.
    mine = np.array([[0.6, 0.4], [0.6, 0.4]]) / 2
    yours = mine.T
    joint = [np.multiply.outer(np.multiply.outer(one, one), one) for one in (mine, yours)]
    truth = np.clip(joint[0] - math.exp(3 * alone.epsilon(1e-5 / 3)) * joint[1], 0, None).sum()
    assert truth <= 1e-5


def test_different_kinds_share_the_delta() -> None:
    poisson, gaussian = Charge(PoissonNoise(120.0), 2), Charge(GaussianNoise(10.0), 2)
    budget = Budget(5.0, 1e-5)
    ledger = Ledger("task", budget)
    ledger.record("first", poisson, cohort="ward 7")
    ledger.record("second", gaussian, cohort="ward 7")
    losses = [privacy_loss(charge.noise, charge.changed) for charge in (poisson, gaussian)]
    assert ledger.spent == pytest.approx(sum(loss.epsilon(0.5e-5) for loss in losses), rel=1e-12)
    assert ledger.spent > 1.01 * sum(loss.epsilon(1e-5) for loss in losses)

    # The exact delta of both: over all pairs of Poisson counts, one moved down and one up, what the Gaussian leaves.
    counts = np.arange(1, 400)
    masses = stats.poisson.pmf(counts, 120.0)
    loss = np.log(120.0 / counts)[:, None] + np.log((counts + 1) / 120.0)
    mu = math.sqrt(2) / 10.0

    def exact(epsilon: float) -> float:
        rest = epsilon - loss
        gaussian = stats.norm.cdf(mu / 2 - rest / mu) - np.exp(rest) * stats.norm.cdf(-mu / 2 - rest / mu)
        return float(masses @ gaussian @ masses + stats.poisson.pmf(0, 120.0))

    assert exact(ledger.spent) <= 1e-5 < exact(0.5 * ledger.spent)


def test_two_charges_that_each_use_up_the_delta_do_not_fit_together() -> None:
    """An empty counter gives its user away. It is less probable than delta under either law, but not under both."""
    first, second = Charge(PoissonNoise(11.6), 2), Charge(PoissonNoise(11.7), 2)
    assert math.exp(-11.6) < 1e-5 < math.exp(-11.6) + math.exp(-11.7)
    ledger = Ledger("task", Budget(20.0, 1e-5))
    ledger.record("first", first, cohort="ward 7")
    ledger.record("second", second, cohort="ward 8")
    with pytest.raises(BudgetExceededError):
        ledger.record("third", second, cohort="ward 7")


def test_recording_is_quick() -> None:
    """Simulations record thousands of batches; ten times the processor time it takes, as machines differ."""
    ledger = Ledger("task", BUDGET)
    ledger.record("warm", FULL)
    start = time.process_time()
    ledger.record_all([f"batch {number}" for number in range(2000)], FULL)
    assert time.process_time() - start < 0.3
