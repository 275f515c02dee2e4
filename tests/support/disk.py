"""A disk that can be full, under the databases that a test opens."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest


class Disk:
    """From now on every database of this process is on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: list[sqlite3.Connection] = []
        connect = sqlite3.connect

        def connected(*args: Any, **options: Any) -> sqlite3.Connection:
            self.opened.append(connect(*args, **options))
            return self.opened[-1]

        patch.setattr(sqlite3, "connect", connected)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """What the database says that was opened last, over its own connection."""
        return self.opened[-1].execute(query).fetchall()

    def fill(self) -> None:
        """Allow no page more."""
        for one in self.opened:
            with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed
                one.execute(f"PRAGMA max_page_count = {one.execute('PRAGMA page_count').fetchone()[0]}")

    def free(self) -> None:
        """There is room again."""
        for one in self.opened:
            with contextlib.suppress(sqlite3.ProgrammingError):
                one.execute("PRAGMA max_page_count = 1000000")
