from __future__ import annotations

import contextlib
import math
import os
import signal
import sqlite3
import time
from dataclasses import replace
from fractions import Fraction
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.counts import CountQuery
from shufflerl.errors import BudgetExceededError, ContractError, InvalidInputError, ShuffleRLError, StateMismatchError
from shufflerl.mdp import Problem
from shufflerl.noise import BinomialNoise, GaussianNoise, NoNoise, PoissonNoise, UnaryNoise
from shufflerl.privacy import ledger as ledger_module
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian, calibrate_unary
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ShuffledPoisson
from tests.contracts.budget import DELTA, lattice_epsilon
from tests.support.disk import Disk
from tests.support.waiting import PATIENCE
from tests.support.warm import FORKS

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


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    """However careless the umask: when it is made, and once it is opened after a copy that others can read."""
    path, before = tmp_path / "ledger", os.umask(0)
    try:
        with Ledger("task", BUDGET, path) as ledger:
            ledger.record("batch 0", FULL)
            assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {"ledger": 0o600}
    finally:
        os.umask(before)
    path.chmod(0o666)
    with Ledger("task", BUDGET, path) as again:
        assert again.releases == ["batch 0"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_rights_of_what_is_no_ledger_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("a letter to my aunt")
    path.chmod(0o644)
    with pytest.raises(StateMismatchError, match="not a ledger"):
        Ledger("task", BUDGET, path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger("task", BUDGET, path) as ledger:
        ledger.record("batch 0", FULL)
    with Ledger("task", BUDGET, path) as again, pytest.raises(ContractError, match="batch 0 is in the ledger already"):
        again.record("batch 0", FULL)


def _record_and_die(path: Path) -> None:
    Ledger("task", BUDGET, path).record("batch 0", FULL)
    os.kill(os.getpid(), signal.SIGKILL)  # between the record and the release


@pytest.mark.slow
def test_the_record_stands_after_a_crash_before_the_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    crashed = FORKS.Process(target=_record_and_die, args=(path,))
    crashed.start()
    crashed.join(PATIENCE)
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


def test_a_cohort_is_never_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    ledger = Ledger("task", BUDGET)
    ledger.record("x", FULL, cohort="users of batch 1")
    ledger.record("batch 1", FULL)  # new users, whatever others are called
    ledger.record("batch 2", FULL)
    with pytest.raises(BudgetExceededError):
        ledger.record("y", FULL, cohort="users of batch 1")
    ledger.record("z", FULL, cohort="users of batch 2")
    assert ledger.spent <= 1.0 + 1e-9
    assert disk.ask("SELECT cohort FROM releases WHERE name LIKE 'batch%'") == [(None,)] * 2


@pytest.mark.parametrize("name", ["", None, 7, b"ward", "\ud800"])
def test_names_must_be_text(name: str) -> None:
    ledger = Ledger("task", BUDGET)
    with pytest.raises(InvalidInputError, match="name of a release"):
        ledger.record_all(["fine", name], FULL)
    if name is not None:
        with pytest.raises(InvalidInputError, match="name of a cohort"):
            ledger.record("batch 0", FULL, cohort=name)
    assert ledger.releases == []
    ledger.record_all([], Charge(PoissonNoise(1.0), 22))  # nothing asked, nothing charged


def test_commits_outlive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with Ledger("task", BUDGET, tmp_path / "ledger"):
        assert disk.ask("PRAGMA synchronous") == [(3,)]  # EXTRA: the directory is synced as well
        assert disk.ask("PRAGMA journal_mode") == [("delete",)]


def _filled(path: Path) -> Path:
    with Ledger("task", BUDGET, path) as ledger:
        ledger.record("batch 0", FULL)
        ledger.record("batch 1", Charge(GaussianNoise(64.25), 22), cohort="ward 7")
        ledger.record("batch 2", HALF)
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"sd": 64.25', b'"sd": 94.25'),
        (b'"law": "gaussian"', b'"law": "gaussiam"'),
        (b'"changed": 22', b'"changed": 12'),
        (b"ward 7", b"ward 8"),
        (b"batch 2", b"batch 3"),
        (b"batch 2", b"batch \xff"),
        (b"ward 7", b"\xff\xfe 7"),
        (b"shufflerl ledger", b"shufflerl \xffedger"),
        (b"UNIQUE", b"      "),
    ],
)
def test_a_changed_byte_is_found(before: bytes, after: bytes, tmp_path: Path) -> None:
    path = _filled(tmp_path / "ledger")
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))
    with pytest.raises(StateMismatchError, match="not a ledger, or it is damaged"):
        Ledger("task", BUDGET, path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE releases SET charge = replace(charge, '64.25', '94.25')",
        "UPDATE releases SET cohort = NULL",
        "UPDATE releases SET cohort = 'ward 8' WHERE number = 2",
        "UPDATE releases SET name = CAST('batch 9' AS BLOB) WHERE number = 1",
        "UPDATE releases SET number = 9 WHERE number = 3",
        "UPDATE meta SET value = replace(value, '3 ', '4 ') WHERE key = 'chain'",
        "DELETE FROM releases WHERE number = 1",
        "DELETE FROM releases WHERE number = 3",
        "DELETE FROM releases",
        "DELETE FROM meta WHERE key = 'chain'",
        "PRAGMA application_id = 7",
        "CREATE TRIGGER gone AFTER INSERT ON releases BEGIN DELETE FROM releases; END",
        "DROP INDEX by_cohort",
    ],
)
def test_rows_changed_behind_its_back_are_found(change: str, tmp_path: Path) -> None:
    path = _filled(tmp_path / "ledger")
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(change)
    db.close()
    with pytest.raises(StateMismatchError, match="not a ledger, or it is damaged"):
        Ledger("task", BUDGET, path)


@pytest.mark.slow
def test_any_flipped_byte_is_found_or_harmless(tmp_path: Path) -> None:
    original = _filled(tmp_path / "ledger")
    content = original.read_bytes()
    with Ledger("task", BUDGET, original) as ledger:
        spent = ledger.spent
    found = 0
    used = [position for position, byte in enumerate(content) if byte]
    for position in used[::11]:
        path = tmp_path / str(position)
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            with Ledger("task", BUDGET, path) as ledger:
                assert (ledger.releases, ledger.spent) == (["batch 0", "batch 1", "batch 2"], spent)
                with pytest.raises(BudgetExceededError):
                    ledger.record("more", FULL, cohort="ward 7")
        except ShuffleRLError:
            found += 1
    assert found > len(used[::11]) / 2


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_a_truncated_file_is_not_taken_as_new(size: int, tmp_path: Path) -> None:
    path = _filled(tmp_path / "ledger")
    os.truncate(path, size)
    with pytest.raises(StateMismatchError, match="not a ledger"):
        Ledger("task", BUDGET, path)
    assert path.stat().st_size == size


def test_the_file_of_another_application_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "contacts"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE contacts (name TEXT)")
    db.close()
    content = path.read_bytes()
    with pytest.raises(StateMismatchError, match="not a ledger"):
        Ledger("task", BUDGET, path)
    assert path.read_bytes() == content


def test_a_new_ledger_leaves_nothing_else_behind(tmp_path: Path) -> None:
    Ledger("task", BUDGET, tmp_path / "a ledger? #1 100%").close()
    assert [path.name for path in tmp_path.iterdir()] == ["a ledger? #1 100%"]


@pytest.mark.parametrize("place", ["missing/ledger", "file/ledger", "directory"])
def test_a_place_where_no_file_can_be_is_an_invalid_input(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    with pytest.raises(InvalidInputError, match="cannot be opened for writing") as refused:
        Ledger("task", BUDGET, tmp_path / place)
    assert str(tmp_path / place) in str(refused.value)
    assert "backup" not in str(refused.value)


def test_a_file_that_may_not_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with Ledger("task", BUDGET, tmp_path / "ledger") as ledger:
        disk.ask("PRAGMA query_only = ON")
        with pytest.raises(InvalidInputError, match="cannot be opened for writing"):
            ledger.record("batch 0", FULL)
    with pytest.raises(ContractError, match="closed"):
        ledger.record("batch 0", FULL)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with Ledger("task", BUDGET, tmp_path / "ledger") as ledger:
        disk.fill()
        with pytest.raises(StateMismatchError, match="Do not release; make room"):
            ledger.record_all([f"batch {number}" for number in range(500)], FULL)
        assert ledger.releases == []
        ledger.record("batch 0", FULL)


# The second lets others begin to write, and stops them only when they commit.
@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN; SELECT * FROM releases"])
def test_a_locked_file_is_not_called_damaged(lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "PATIENCE", 0.05)
    path = _filled(tmp_path / "ledger")
    with Ledger("task", BUDGET, path) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        for statement in lock.split(";"):
            other.execute(statement).fetchall()
        with pytest.raises(StateMismatchError, match=r"locked by another process.*Nothing was recorded.*try again"):
            ledger.record("batch 3", FULL)
        if "EXCLUSIVE" in lock:
            with pytest.raises(StateMismatchError, match=r"locked by another process.*try again"):
                Ledger("task", BUDGET, path)
        other.execute("ROLLBACK")
        other.close()
        assert ledger.releases == ["batch 0", "batch 1", "batch 2"]
        ledger.record("batch 3", FULL)
    with Ledger("task", BUDGET, path) as again:
        assert again.releases[-1] == "batch 3"


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


def _record_what_fits(path: Path, who: int, together: Barrier) -> None:
    together.wait(PATIENCE)
    with Ledger("task", BUDGET, path) as ledger:  # the first to come makes the file
        for number in range(6):
            try:
                ledger.record(f"{who}: {number}", Charge(GaussianNoise(60.0), 22), cohort="ward 7")
            except BudgetExceededError:
                return


@pytest.mark.slow
def test_processes_together_do_not_overspend(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    together = FORKS.Barrier(4)
    processes = [FORKS.Process(target=_record_what_fits, args=(path, who, together)) for who in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * 4
    loss = Charge(GaussianNoise(60.0), 22)
    most = max(times for times in range(1, 25) if privacy_loss(loss.noise, 22, times).delta(1.0) <= 1e-5)
    assert 4 <= most < 24
    with Ledger("task", BUDGET, path) as ledger:
        assert len(ledger.releases) == most
        assert ledger.spent <= 1.0


def test_recording_is_quick() -> None:
    """Simulations record thousands of batches; ten times the processor time it takes, as machines differ."""
    ledger = Ledger("task", BUDGET)
    ledger.record("warm", FULL)
    start = time.process_time()
    ledger.record_all([f"batch {number}" for number in range(2000)], FULL)
    assert time.process_time() - start < 0.3
