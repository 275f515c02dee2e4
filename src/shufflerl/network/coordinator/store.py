"""What a coordinator remembers, in one file: its batches from announcement to noisy counts, and its learner."""

from __future__ import annotations

import json
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Action, Signed
from shufflerl.network.stores import database

_TABLES = [
    "CREATE TABLE run (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    """CREATE TABLE batches (number INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, users INTEGER NOT NULL,
        announcement BLOB NOT NULL, key BLOB, own BLOB, noisy BLOB, messages INTEGER, invalid INTEGER, outcome TEXT,
        seeds BLOB, excluded BLOB, acknowledged INTEGER NOT NULL DEFAULT 0)""",
]


class Secrets(NamedTuple):
    """What is forgotten when a batch is learned from.

    The key of its tags, the coordinator's own noise, if it adds any, and the seeds of masked vectors that were opened.
    """

    key: bytes
    own: IntArray | None
    seeds: bytes | None


class Answer(NamedTuple):
    """A batch learned from: its announcement, the noisy counts, the messages in them, and how many were left out."""

    announcement: Signed
    values: FloatArray
    messages: int
    invalid: int


class RunStore:
    """One run's; what is to be stored together is stored in one `transaction`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = database.connect(path, "shufflerl coordinator 3", _TABLES)

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing, and on disk when it ends."""
        return database.transaction(self._db)

    def erase(self) -> None:
        """Let nothing that was deleted be left in any file."""
        database.erase(self._db)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def explained(self, reason: Exception) -> Exception:
        """What the database or file system says, as what the operator can do about it; other reasons as they are."""
        return database.explained(reason, self._path) if isinstance(reason, sqlite3.Error | OSError) else reason

    # The run.

    def value(self, key: str) -> Any:
        """What was kept by this name; None if nothing was."""
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def keep(self, key: str, value: str | bytes) -> None:
        """Keep it instead of what was kept by this name."""
        self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    # Attempts that were filled in vain.

    @property
    def wasted(self) -> list[int]:
        """The batch of each."""
        kept = self.value("wasted")
        return [] if kept is None else list(msgspec.msgpack.decode(kept, type=list[int]))

    def waste(self, number: int) -> None:
        """This batch has one more."""
        self.keep("wasted", msgspec.msgpack.encode([*self.wasted, number]))

    def played_before(self, number: int) -> int:
        """How many users have played when a batch is announced: those whose reports were of no use have as well."""
        sizes = dict(self._db.execute("SELECT number, users FROM batches WHERE number <= ?", (number,)))
        counted: list[int] = [batch for batch in sizes if batch < number]
        return sum(int(sizes[batch]) for batch in [*counted, *self.wasted])

    # The batch to be answered.

    @property
    def pending(self) -> tuple[int, int, Signed] | None:
        """Its number, attempt and announcement; None when the run is over."""
        row = self._db.execute("SELECT number, attempt, announcement FROM batches WHERE noisy IS NULL").fetchone()
        return None if row is None else (row[0], row[1], wire.decode(Signed, row[2]))

    def announce(self, number: int, attempt: int, users: int, announcement: Signed, secrets: Secrets) -> None:
        """Store an attempt at a batch; what was known of the one before is gone."""
        own = None if secrets.own is None else secrets.own.astype("<i8").tobytes()
        self._db.execute(
            "INSERT OR REPLACE INTO batches (number, attempt, users, announcement, key, own) VALUES (?, ?, ?, ?, ?, ?)",
            (number, attempt, users, wire.encode(announcement), secrets.key, own),
        )

    def secrets(self, number: int) -> Secrets | None:
        """Those of a batch; None once it was learned from."""
        key, own, seeds = self._db.execute("SELECT key, own, seeds FROM batches WHERE number = ?", (number,)).fetchone()
        if key is None:
            return None
        return Secrets(key, None if own is None else np.frombuffer(own, dtype="<i8"), seeds)

    def keep_seeds(self, number: int, seeds: bytes, excluded: list[int]) -> None:
        """The seeds that could be opened, and the places of those that could not."""
        positions = msgspec.msgpack.encode(excluded)
        self._db.execute("UPDATE batches SET seeds = ?, excluded = ? WHERE number = ?", (seeds, positions, number))

    def excluded(self, number: int) -> list[int] | None:
        """The places of seeds that could not be opened; None where none were looked at."""
        (positions,) = self._db.execute("SELECT excluded FROM batches WHERE number = ?", (number,)).fetchone()
        return None if positions is None else list(msgspec.msgpack.decode(positions, type=list[int]))

    # Batches learned from.

    def answer(self, number: int, values: FloatArray, messages: int, invalid: int, outcome: dict[str, Any]) -> None:
        """The counts of a batch and what it led to; its secrets are gone."""
        self._db.execute(
            "UPDATE batches SET key = NULL, own = NULL, seeds = NULL, noisy = ?, messages = ?, invalid = ?, "
            "outcome = ? WHERE number = ?",
            (values.tobytes(), messages, invalid, json.dumps(outcome), number),
        )

    def answers(self, *, last: bool = False) -> list[Answer]:
        """All in order, or the last alone."""
        rows = self._db.execute(
            "SELECT announcement, noisy, messages, invalid FROM batches WHERE noisy IS NOT NULL "
            f"ORDER BY number {'DESC LIMIT 1' if last else ''}"
        )
        return [Answer(wire.decode(Signed, row[0]), np.frombuffer(row[1]).copy(), *row[2:]) for row in rows]

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """What every batch led to, in order."""
        rows = self._db.execute("SELECT number, users, outcome FROM batches WHERE noisy IS NOT NULL ORDER BY number")
        return [{"batch": number, "users": users, **json.loads(outcome)} for number, users, outcome in rows]

    def tally(self) -> tuple[int, int, int]:
        """How many there are, messages in them, and messages that were left out."""
        row = self._db.execute(
            "SELECT COUNT(*), TOTAL(messages), TOTAL(invalid) FROM batches WHERE noisy IS NOT NULL"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def unacknowledged(self) -> list[tuple[int, int, Action]]:
        """By number and attempt those whose release the shuffler may delete.

        The next batch is announced when one is learned from: where there is none, that was the last.
        """
        rows = self._db.execute(
            "SELECT number, attempt, number = (SELECT MAX(number) FROM batches) FROM batches "
            "WHERE noisy IS NOT NULL AND acknowledged = 0 ORDER BY number"
        )
        return [(number, attempt, Action.finish if last else Action.scrub) for number, attempt, last in rows]

    def acknowledged(self, number: int) -> None:
        """The shuffler has deleted this release."""
        with self.transaction():
            self._db.execute("UPDATE batches SET acknowledged = 1 WHERE number = ?", (number,))
