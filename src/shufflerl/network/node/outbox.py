"""What a node has promised to send, on disk before it is sent, so that a retry sends the very same bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shufflerl.errors import StorageError
from shufflerl.network.stores import database

_TABLES = [
    """CREATE TABLE outbox (node TEXT, task BLOB, batch INTEGER NOT NULL, attempt INTEGER NOT NULL, report BLOB,
        verdict TEXT, PRIMARY KEY (node, task)) WITHOUT ROWID""",
]


@dataclass(frozen=True)
class Parcel:
    """One node's report of a run: encoded, or None once it has a verdict."""

    node: str
    task: bytes
    batch: int
    attempt: int
    report: bytes | None
    verdict: str | None = None


class Outbox:
    """Parcels of one node, or of a fleet of them, one per node and run."""

    def __init__(self, path: Path | None) -> None:
        self._db = database.connect(path, "shufflerl outbox 1", _TABLES)
        self._alone = threading.Lock()

    def put(self, parcels: Iterable[Parcel]) -> None:
        """Keep parcels that are about to be sent; all are on disk when this returns."""
        with self._alone, database.transaction(self._db):
            self._db.executemany(
                "INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?)",
                [(p.node, p.task, p.batch, p.attempt, p.report, p.verdict) for p in parcels],
            )

    def settle(self, verdicts: Iterable[tuple[str, bytes, str]]) -> None:
        """Note what became of reports (node, task, verdict) and delete their bytes."""
        with self._alone, database.transaction(self._db):
            self._db.executemany(
                "UPDATE outbox SET report = NULL, verdict = ? WHERE node = ? AND task = ?",
                [(verdict, node, task) for node, task, verdict in verdicts],
            )

    def get(self, node: str, task: bytes) -> Parcel | None:
        """A node's parcel of a run."""
        row = self._db.execute("SELECT * FROM outbox WHERE node = ? AND task = ?", (node, task)).fetchone()
        return None if row is None else Parcel(*row)

    def of_run(self, task: bytes) -> list[Parcel]:
        """All parcels of a run."""
        return [Parcel(*row) for row in self._db.execute("SELECT * FROM outbox WHERE task = ?", (task,))]

    def check_ledger(self, path: Path) -> None:
        """Refuse to begin another ledger beside parcels, whose nodes were charged: it would forget what they spent."""
        if not path.exists() and self._db.execute("SELECT 1 FROM outbox").fetchone() is not None:
            raise StorageError(
                f"{path.parent} has an outbox but no {path.name}, which says what its users have spent. Let others "
                "take part, in another folder."
            )

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
