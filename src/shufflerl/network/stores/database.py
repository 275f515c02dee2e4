"""SQLite as the roles use it: durable when a transaction returns, alone on its file, and what is deleted is gone."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from shufflerl.errors import StateMismatchError, StorageError

#: Seconds to wait for a process that is just letting go of the file.
PATIENCE = 5.0


def connect(path: Path | None, format: str, tables: list[str]) -> sqlite3.Connection:
    """Open a database of that format, making it where there is none; in memory without a path.

    WAL with synchronous=FULL: a commit is one fsync and survives a power cut. secure_delete: what is deleted is
    overwritten. Exclusive: a second process on the same state would be a second shuffler or coordinator.
    """
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # it holds keys; its log gets the same rights
        db = sqlite3.connect(
            path or ":memory:", timeout=PATIENCE, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            "temp_store = MEMORY",
            "wal_autocheckpoint = 4000",
        ):
            db.execute(f"PRAGMA {pragma}")
        with transaction(db):
            db.execute("CREATE TABLE IF NOT EXISTS format (name TEXT PRIMARY KEY) WITHOUT ROWID")
            names = [name for (name,) in db.execute("SELECT name FROM format")]
            if not names:
                for table in tables:
                    db.execute(table)
                db.execute("INSERT INTO format VALUES (?)", (format,))
        if names and names != [format]:
            db.close()
            raise StateMismatchError(f"{path} holds {names[0]!r}, not {format!r}; use another folder for this role.")
        if path is not None:
            for file in (path, path.with_name(f"{path.name}-wal")):
                if file.exists() and file.stat().st_mode & 0o077:  # it was made or copied with rights for others
                    file.chmod(0o600)
        erase(db)  # a process that died between deleting and erasing left this to us
        return db
    except (sqlite3.Error, OSError) as reason:
        raise explained(reason, path) from None


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, and on disk when it ends."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some failures have rolled it back already
            db.execute("ROLLBACK")
        raise


def erase(db: sqlite3.Connection) -> None:
    """Bring deletions from the log into the file and empty the log, so that neither holds what was deleted."""
    busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise sqlite3.OperationalError("the log could not be emptied")


def explained(reason: Exception, path: Path | None) -> StorageError:
    """What the database or file system says, as what the operator can do about it."""
    code = getattr(reason, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(f"{path} is in use by another process; stop that one first, or use another folder.")
    if code == sqlite3.SQLITE_FULL:
        return StorageError(f"The disk of {path} is full; nothing was stored. Make room; it is tried again.")
    return StorageError(f"{path} cannot be read or written ({reason}); check the disk, the folder and its rights.")
