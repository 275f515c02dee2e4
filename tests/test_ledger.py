from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl.errors import BudgetExceededError, ContractError, StateMismatchError
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, privacy_loss
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.noise import BinomialNoise, GaussianNoise, PoissonNoise, Silent, UnaryNoise

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


def test_the_refusal_tells_spent_from_asked_and_what_fits() -> None:
    ledger = Ledger("task", BUDGET)
    ledger.record("first", HALF, cohort="ward 7")
    with pytest.raises(BudgetExceededError) as refused:
        ledger.record("second", FULL, cohort="ward 7")
    text = str(refused.value)
    assert "epsilon 1, delta 1e-05" in text
    assert "have spent epsilon 0.5," in text
    assert "1 more is asked" in text
    mean = float(text.split("Poisson noise of mean ")[1].split(" or more", maxsplit=1)[0].replace(",", ""))
    ledger.record("second", Charge(PoissonNoise(mean + 0.1), 22), cohort="ward 7")  # what it said would fit, fits
    assert ledger.spent <= 1.0


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


@pytest.mark.parametrize(
    "noise", [PoissonNoise(400.0), BinomialNoise(2000, 0.5), GaussianNoise(30.0), UnaryNoise(1, 4, 0.4)]
)
def test_every_law_comes_back_from_the_file(noise: PoissonNoise, tmp_path: Path) -> None:
    charge = Charge(noise, 2)
    with Ledger("task", BUDGET, tmp_path / "ledger") as ledger:
        ledger.record("batch 0", charge, cohort="me")
        spent = ledger.spent
    with Ledger("task", BUDGET, tmp_path / "ledger") as again:
        assert again._charges("me") == [charge]
        assert again.spent == spent > 0


def test_what_cannot_be_accounted_cannot_be_charged() -> None:
    with pytest.raises(ContractError, match="not a law"):
        Ledger("task", BUDGET).record("batch 0", Charge(Silent(), 2))


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


def test_a_file_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger("task", BUDGET, path) as ledger:
        ledger.record("batch 0", FULL)
    with Ledger("task", BUDGET, path) as again, pytest.raises(ContractError, match="batch 0 is in the ledger already"):
        again.record("batch 0", FULL)


def _record_and_die(path: Path) -> None:
    Ledger("task", BUDGET, path).record("batch 0", FULL)
    os.kill(os.getpid(), signal.SIGKILL)  # between the record and the release


def test_the_record_stands_after_a_crash_before_the_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    crashed = multiprocessing.get_context("spawn").Process(target=_record_and_die, args=(path,))
    crashed.start()
    crashed.join(60)
    assert crashed.exitcode == -signal.SIGKILL
    with Ledger("task", BUDGET, path) as ledger:
        assert ledger.releases == ["batch 0"]


@pytest.mark.parametrize(("task", "budget"), [("other task", BUDGET), ("task", Budget(2.0, 1e-5))])
def test_a_ledger_of_another_task_or_budget_is_refused(task: str, budget: Budget, tmp_path: Path) -> None:
    Ledger("task", BUDGET, tmp_path / "ledger").close()
    with pytest.raises(StateMismatchError, match="open it with what it was made for"):
        Ledger(task, budget, tmp_path / "ledger")


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("not a database, but long enough to be taken for one" * 50)
    with pytest.raises(StateMismatchError, match="damaged"):
        Ledger("task", BUDGET, path)
    other = tmp_path / "other"
    with Ledger("task", BUDGET, other) as ledger:
        for batch in range(200):
            ledger.record(f"batch {batch}", FULL)
    content = bytearray(other.read_bytes())
    content[4096:12288] = os.urandom(8192)
    other.write_bytes(content)
    with pytest.raises(StateMismatchError, match="damaged"):
        Ledger("task", BUDGET, other)


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger("task", BUDGET, path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 'shufflerl ledger 0' WHERE key = 'format'")
    db.close()
    with pytest.raises(StateMismatchError, match="has format 'shufflerl ledger 0'"):
        Ledger("task", BUDGET, path)
