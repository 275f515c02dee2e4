"""Where the shuffler keeps its batches. `Store` is the contract; `tests/contracts` has the suite that checks it.

Operations are few, atomic, durable when they return, and safe to repeat after a crash. Each can be had from a store
with per-key creation and compare-and-set: reports are created once by id, membership is frozen by a change of state,
the first release of a batch stands.
"""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shufflerl.errors import ContractError
from shufflerl.network import faults
from shufflerl.network.protocol.wire import Reason, State
from shufflerl.network.stores import database

#: States of a batch that was released.
RELEASED = (State.released, State.scrubbed, State.finished)


@dataclass(frozen=True)
class BatchId:
    """One attempt at one batch of one run."""

    task: bytes
    number: int
    attempt: int


@dataclass(frozen=True)
class BatchRow:
    """What is stored of a batch. `announcement` and `opening` are encoded `Signed` messages."""

    id: BatchId
    users: int
    announcement: bytes
    opening: bytes
    deadline: float
    state: State = State.open
    accepted: int = 0
    chunks: int = 0
    extensions: int = 0


class Store(ABC):
    """The shuffler's memory. Raises `StorageError` if an operation may not have been stored, and then changes nothing
    that a repetition would not put right.
    """

    @abstractmethod
    def create(self, row: BatchRow, key: bytes) -> BatchRow:
        """Store a new open batch and its private key; if it exists already, return what is there, unchanged."""

    @abstractmethod
    def get(self, id: BatchId) -> BatchRow | None:
        """Look a batch up."""

    @abstractmethod
    def latest(self, task: bytes) -> BatchRow | None:
        """The last attempt at the last batch of a run."""

    @abstractmethod
    def unfinished(self) -> list[BatchRow]:
        """All batches that are open or sealed."""

    @abstractmethod
    def key(self, id: BatchId) -> bytes | None:
        """The batch's private key; None once it is destroyed."""

    @abstractmethod
    def add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> list[Reason | None]:
        """Take reports (id, envelope) into an open batch; None for each accepted, else why not.

        The report that fills the batch seals it in the same step: membership then never changes. An id is accepted
        once per run; the same bytes again are a `duplicate` as long as they are kept, others `replayed`.
        """

    @abstractmethod
    def reports(self, id: BatchId, first: int = 0, count: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The frozen membership of a sealed batch: ids and envelopes, all or a slice of them.

        Always in the same order, so that slices are the same for all who ask.
        """

    @abstractmethod
    def keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        """Store a partial result of an open or sealed batch; the first under a name stands, and is returned.

        Partial results go with the reports: they are deleted when the batch is released or aborted.
        """

    @abstractmethod
    def kept(self, id: BatchId, name: str) -> bytes | None:
        """The partial result of that name."""

    @abstractmethod
    def release(self, id: BatchId, chunks: Iterable[bytes]) -> None:
        """Store the release of a sealed batch and delete reports, partial results and key, in one step.

        Later ones are ignored.
        """

    @abstractmethod
    def chunk(self, id: BatchId, number: int) -> bytes | None:
        """A part of a release, always the same bytes."""

    @abstractmethod
    def scrub(self, id: BatchId, *, last: bool = False) -> None:
        """Delete a release that its coordinator has; only that the batch was there remains, and if it was the last.

        That it was the last is never forgotten.
        """

    @abstractmethod
    def abort(self, id: BatchId) -> None:
        """Delete an open batch's reports and key; they will never be released."""

    @abstractmethod
    def extend(self, id: BatchId, deadline: float, *, before: float) -> None:
        """Give an open batch more time whose deadline is still as it was `before`: once, whoever sees it pass."""

    @abstractmethod
    def erase(self) -> None:
        """Leave no byte of what was deleted on disk."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""


_TABLES = [
    """CREATE TABLE batches (
        task BLOB, number INTEGER, attempt INTEGER, users INTEGER NOT NULL, announcement BLOB NOT NULL,
        opening BLOB NOT NULL, deadline REAL NOT NULL, state TEXT NOT NULL, accepted INTEGER NOT NULL,
        chunks INTEGER NOT NULL, extensions INTEGER NOT NULL, PRIMARY KEY (task, number, attempt)) WITHOUT ROWID""",
    """CREATE TABLE keys (task BLOB, number INTEGER, attempt INTEGER, key BLOB NOT NULL,
        PRIMARY KEY (task, number, attempt)) WITHOUT ROWID""",
    """CREATE TABLE reports (task BLOB, number INTEGER, attempt INTEGER, id BLOB, envelope BLOB NOT NULL,
        PRIMARY KEY (task, id))""",
    # Without row numbers: those would keep the order of arrival, and with it who sent which report of a batch.
    "CREATE TABLE spent (task BLOB, id BLOB, PRIMARY KEY (task, id)) WITHOUT ROWID",
    """CREATE TABLE parts (task BLOB, number INTEGER, attempt INTEGER, name TEXT, value BLOB NOT NULL,
        PRIMARY KEY (task, number, attempt, name))""",
    """CREATE TABLE releases (task BLOB, number INTEGER, attempt INTEGER, chunk INTEGER, tags BLOB NOT NULL,
        PRIMARY KEY (task, number, attempt, chunk))""",
]
_COLUMNS = "task, number, attempt, users, announcement, opening, deadline, state, accepted, chunks, extensions"
_THIS = "task = ? AND number = ? AND attempt = ?"


class SQLiteStore(Store):
    """One file, one process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._db = database.connect(path, "shufflerl shuffler 2", _TABLES)

    def create(self, row: BatchRow, key: bytes) -> BatchRow:
        """See `Store`."""
        with self._stored():
            if (there := self.get(row.id)) is not None:
                return there
            fixed = (row.users, row.announcement, row.opening, row.deadline, State.open, 0, 0, 0)
            self._db.execute(
                f"INSERT INTO batches ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*_args(row.id), *fixed)
            )
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (*_args(row.id), key))
        return row

    def get(self, id: BatchId) -> BatchRow | None:
        """See `Store`."""
        rows = self._rows(f"WHERE {_THIS}", _args(id))
        return rows[0] if rows else None

    def latest(self, task: bytes) -> BatchRow | None:
        """See `Store`."""
        rows = self._rows("WHERE task = ? ORDER BY number DESC, attempt DESC LIMIT 1", (task,))
        return rows[0] if rows else None

    def unfinished(self) -> list[BatchRow]:
        """See `Store`."""
        return self._rows("WHERE state IN (?, ?)", (State.open, State.sealed))

    def _rows(self, where: str, arguments: tuple[object, ...]) -> list[BatchRow]:
        found = self._read(f"SELECT {_COLUMNS} FROM batches {where}", arguments)
        return [
            BatchRow(BatchId(task, number, attempt), users, announcement, opening, deadline, State(state), *counts)
            for task, number, attempt, users, announcement, opening, deadline, state, *counts in found
        ]

    def key(self, id: BatchId) -> bytes | None:
        """See `Store`."""
        rows = self._read(f"SELECT key FROM keys WHERE {_THIS}", _args(id))
        return bytes(rows[0][0]) if rows else None

    def add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> list[Reason | None]:
        """See `Store`."""
        verdicts: list[Reason | None] = []
        with self._stored():
            batch = self._known(id)
            accepted = batch.accepted
            for report, envelope in reports:
                verdict = self._known_report(id, report, envelope)
                if verdict is None and not (batch.state == State.open and accepted < batch.users):
                    verdict = Reason.late
                if verdict is None:
                    self._db.execute("INSERT INTO spent VALUES (?, ?)", (id.task, report))
                    self._db.execute("INSERT INTO reports VALUES (?, ?, ?, ?, ?)", (*_args(id), report, envelope))
                    accepted += 1
                verdicts.append(verdict)
            if accepted > batch.accepted:
                state = State.sealed if accepted == batch.users else State.open
                self._update(id, state=state, accepted=accepted)
                if state == State.sealed:
                    faults.reached("seal")
            faults.reached("ingest")
        return verdicts

    def _known_report(self, id: BatchId, report: bytes, envelope: bytes) -> Reason | None:
        if not self._db.execute("SELECT 1 FROM spent WHERE task = ? AND id = ?", (id.task, report)).fetchone():
            return None
        kept = self._db.execute(
            f"SELECT envelope FROM reports WHERE {_THIS} AND id = ?", (*_args(id), report)
        ).fetchone()
        return Reason.duplicate if kept is not None and kept[0] == envelope else Reason.replayed

    def reports(self, id: BatchId, first: int = 0, count: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """See `Store`."""
        slice = f"{_THIS} ORDER BY rowid LIMIT ? OFFSET ?"
        limit = -1 if count is None else count
        try:
            yield from self._db.execute(f"SELECT id, envelope FROM reports WHERE {slice}", (*_args(id), limit, first))
        except sqlite3.Error as reason:
            raise database.explained(reason, self.path) from None

    def keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        """See `Store`."""
        with self._stored():
            batch = self._known(id)
            if batch.state not in (State.open, State.sealed):
                raise ContractError(f"Batch {id.number} is {batch.state}; only an unfinished one has partial results.")
            if (there := self.kept(id, name)) is not None:
                return there
            self._db.execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", (*_args(id), name, value))
        return value

    def kept(self, id: BatchId, name: str) -> bytes | None:
        """See `Store`."""
        rows = self._read(f"SELECT value FROM parts WHERE {_THIS} AND name = ?", (*_args(id), name))
        return bytes(rows[0][0]) if rows else None

    def release(self, id: BatchId, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        with self._stored():
            batch = self._known(id)
            if batch.state in RELEASED:
                return
            if batch.state != State.sealed:
                raise ContractError(f"Batch {id.number} is {batch.state}; only a sealed batch is released.")
            count = 0
            for count, tags in enumerate(chunks, 1):
                self._db.execute("INSERT INTO releases VALUES (?, ?, ?, ?, ?)", (*_args(id), count - 1, tags))
            self._forget(id)
            self._update(id, state=State.released, chunks=count)
            faults.reached("release")
        faults.reached("released")
        self.erase()

    def chunk(self, id: BatchId, number: int) -> bytes | None:
        """See `Store`."""
        rows = self._read(f"SELECT tags FROM releases WHERE {_THIS} AND chunk = ?", (*_args(id), number))
        return bytes(rows[0][0]) if rows else None

    def scrub(self, id: BatchId, *, last: bool = False) -> None:
        """See `Store`."""
        with self._stored():
            batch = self._known(id)
            if batch.state not in RELEASED:
                raise ContractError(f"Batch {id.number} is {batch.state}; only a released batch is scrubbed.")
            self._db.execute(f"DELETE FROM releases WHERE {_THIS}", _args(id))
            self._update(id, state=State.finished if last or batch.state == State.finished else State.scrubbed)
            faults.reached("scrub")
        faults.reached("scrubbed")
        self.erase()

    def abort(self, id: BatchId) -> None:
        """See `Store`."""
        with self._stored():
            if self._known(id).state == State.open:
                self._forget(id)
                self._update(id, state=State.aborted)
        self.erase()

    def extend(self, id: BatchId, deadline: float, *, before: float) -> None:
        """See `Store`."""
        with self._stored():
            batch = self._known(id)
            if batch.state == State.open and batch.deadline == before:
                self._update(id, deadline=deadline, extensions=batch.extensions + 1)

    def erase(self) -> None:
        """See `Store`."""
        try:
            database.erase(self._db)
        except sqlite3.Error as reason:
            raise database.explained(reason, self.path) from None

    def close(self) -> None:
        """See `Store`."""
        self._db.close()

    def _known(self, id: BatchId) -> BatchRow:
        batch = self.get(id)
        if batch is None:
            raise ContractError(f"There is no batch {id.number}, attempt {id.attempt}, of this run.")
        return batch

    def _update(self, id: BatchId, **values: object) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE batches SET {names} WHERE {_THIS}", (*values.values(), *_args(id)))

    def _forget(self, id: BatchId) -> None:
        for table in ("reports", "parts", "keys"):
            self._db.execute(f"DELETE FROM {table} WHERE {_THIS}", _args(id))

    def _read(self, query: str, arguments: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """All rows of a query, whose failures are storage errors."""
        try:
            return self._db.execute(query, arguments).fetchall()
        except sqlite3.Error as reason:
            raise database.explained(reason, self.path) from None

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """A transaction whose failures are storage errors."""
        try:
            with database.transaction(self._db):
                yield
        except sqlite3.Error as reason:
            raise database.explained(reason, self.path) from None


def _args(id: BatchId) -> tuple[bytes, int, int]:
    return id.task, id.number, id.attempt
