"""The ledger's file: it outlives crashes, other processes and damage, and is never taken for another."""

from __future__ import annotations

import os
import signal
import sqlite3
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from shufflerl.errors import BudgetExceededError, ContractError, InvalidInputError, ShuffleRLError, StateMismatchError
from shufflerl.noise import GaussianNoise, PoissonNoise
from shufflerl.privacy import ledger as ledger_module
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.loss import privacy_loss
from tests.privacy.test_ledger import BUDGET, FULL, HALF
from tests.support.disk import Disk
from tests.support.waiting import PATIENCE
from tests.support.warm import FORKS


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
