"""The shuffler's SQLite store: the contract of stores, and what its files hold."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from shufflerl.errors import StateMismatchError, StorageError
from shufflerl.network.node.outbox import Outbox
from shufflerl.network.protocol.wire import State
from shufflerl.network.stores import database
from shufflerl.network.stores.store import SQLiteStore, Store
from tests.contracts.store import ID, KEY, REPORTS, ROW, StoreContract
from tests.support.disk import Disk
from tests.support.network_world import crash_at
from tests.support.waiting import PATIENCE


class TestSQLite(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shuffler.db"

    def make(self) -> Store:
        return SQLiteStore(self.path)

    def reopen(self, store: Store) -> Store:
        store.close()
        return SQLiteStore(self.path)


def raw(folder: Path) -> bytes:
    """Every byte in every file of a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file())


def left_of(secrets: Iterable[bytes], folder: Path, size: int = 12) -> list[bytes]:
    """Which pieces of some secrets are anywhere in the files of a folder."""
    files = raw(folder)
    there = {files[start : start + size] for start in range(len(files) - size + 1)}
    cut = (secret[start : start + size] for secret in secrets for start in range(0, len(secret) - size + 1, size))
    return [piece for piece in cut if piece in there]


@pytest.mark.parametrize("label", [None, "released", "scrubbed"])
def test_what_is_deleted_is_on_no_disk(tmp_path: Path, label: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched in the raw files, the log of the database included; also after a crash between deleting and erasing."""
    store = SQLiteStore(tmp_path / "shuffler.db")
    sizes = [30, 300, 3_000, 30_000] * 10
    reports = [(os.urandom(16), os.urandom(size)) for size in sizes]
    tags = [os.urandom(5_000), os.urandom(80_000)]
    store.create(replace(ROW, users=len(reports)), KEY)
    for start in range(0, len(reports), 7):
        store.add(ID, reports[start : start + 7])
    before = raw(tmp_path)
    assert KEY in before
    assert left_of([KEY, *(envelope for _, envelope in reports)], tmp_path)
    # The whole of the short ones is there: the search below could find them.
    assert all(envelope in before for _, envelope in reports if len(envelope) <= 300)

    if label == "released":
        with crash_at("released", monkeypatch):
            store.release(ID, tags)
        store.close()
        store = SQLiteStore(tmp_path / "shuffler.db")
    else:
        store.release(ID, tags)
    assert left_of([KEY, *(envelope for _, envelope in reports)], tmp_path) == []

    if label == "scrubbed":
        with crash_at("scrubbed", monkeypatch):
            store.scrub(ID)
        store.close()
        store = SQLiteStore(tmp_path / "shuffler.db")
    else:
        store.scrub(ID)
    assert left_of(tags, tmp_path) == []
    store.close()


def test_an_aborted_batch_is_on_no_disk(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "shuffler.db")
    store.create(ROW, KEY)
    store.add(ID, REPORTS[:2])
    store.abort(ID)
    assert left_of([KEY, REPORTS[0][1], REPORTS[1][1]], tmp_path) == []
    store.close()


def test_spent_ids_do_not_keep_the_order_of_arrival(tmp_path: Path) -> None:
    """After a release only a set of ids is left: no row numbers, no batch, no time."""
    store = SQLiteStore(tmp_path / "shuffler.db")
    reports = [(os.urandom(16), os.urandom(40)) for _ in range(50)]
    store.create(replace(ROW, users=50), KEY)
    for report in reports:
        store.add(ID, [report])
    store.release(ID, [b"tags"])
    store.close()
    with sqlite3.connect(tmp_path / "shuffler.db") as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(spent)")]
        ids = [row[0] for row in db.execute("SELECT id FROM spent")]
        with pytest.raises(sqlite3.OperationalError, match="rowid"):
            db.execute("SELECT rowid FROM spent")
    db.close()
    assert columns == ["task", "id"]
    assert ids == sorted(ids)


def test_a_full_disk_refuses_reports_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = SQLiteStore(tmp_path / "shuffler.db")
    store.create(ROW, KEY)
    store.add(ID, REPORTS[:1])
    disk.fill()
    with pytest.raises(StorageError, match="full"):
        store.add(ID, [(os.urandom(16), os.urandom(500_000))])
    batch = store.get(ID)
    assert batch is not None
    assert (batch.accepted, batch.state) == (1, State.open)
    disk.free()
    assert store.add(ID, REPORTS[1:]) == [None, None]
    store.close()


def test_a_full_disk_while_releasing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = SQLiteStore(tmp_path / "shuffler.db")
    store.create(ROW, KEY)
    store.add(ID, REPORTS)
    disk.fill()
    with pytest.raises(StorageError, match="full"):
        store.release(ID, [os.urandom(500_000)])
    assert len(list(store.reports(ID))) == 3
    assert store.key(ID) == KEY
    disk.free()
    store.release(ID, [b"tags"])
    assert store.chunk(ID, 0) == b"tags"
    store.close()


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SQLiteStore(tmp_path / "shuffler.db")
    code = f"""
from pathlib import Path
from shufflerl.network.stores import database
from shufflerl.network.stores.store import SQLiteStore
database.PATIENCE = 0.1
SQLiteStore(Path({str(tmp_path / "shuffler.db")!r}))
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "in use by another process" in other.stderr
    store.close()


def test_another_roles_file_is_refused(tmp_path: Path) -> None:
    Outbox(tmp_path / "file.db").close()
    with pytest.raises(StateMismatchError, match="outbox"):
        SQLiteStore(tmp_path / "file.db")
    (tmp_path / "text").write_text("not a database" * 100)
    with pytest.raises(StorageError, match="not a database"):
        SQLiteStore(tmp_path / "text")
    with pytest.raises(StorageError):
        SQLiteStore(tmp_path / "text" / "below")


def test_every_commit_is_synchronous(tmp_path: Path) -> None:
    db = database.connect(tmp_path / "a.db", "x", [])
    pragmas = {
        name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode", "secure_delete")
    }
    assert pragmas == {"synchronous": 2, "journal_mode": "wal", "secure_delete": 1}
    db.close()


def test_files_that_hold_keys_are_their_owners_alone(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "shuffler.db")
    store.create(ROW, bytes(32))
    private = {"shuffler.db": 0o600, "shuffler.db-wal": 0o600}
    assert _rights(tmp_path) == private
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in private:
        shutil.copy(tmp_path / name, copied)
        (copied / name).chmod(0o664)
    store.close()
    again = SQLiteStore(copied / "shuffler.db")
    assert _rights(copied) == private
    again.close()


def _rights(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_file()}
