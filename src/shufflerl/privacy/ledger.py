"""The ledger: every release is recorded against the budget before it happens, or does not happen.

What a release costs is the accountant's business; the ledger knows whose budget it comes from. Users who take part in
one batch only form a cohort of their own, and over disjoint cohorts costs do not add up (parallel composition):
what is spent is the most that any cohort has spent. Releases to one cohort compose.
"""

from __future__ import annotations

import functools
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shufflerl import checks
from shufflerl.errors import BudgetExceededError, ContractError, StateMismatchError
from shufflerl.privacy.accounting import Budget, calibrate, privacy_loss
from shufflerl.privacy.noise import BinomialNoise, GaussianNoise, Noise, PoissonNoise, UnaryNoise

#: Raised when the tables change, so that an older file is refused instead of misread.
FORMAT = "shufflerl ledger 1"
_LAWS: dict[str, type[PoissonNoise | BinomialNoise | GaussianNoise | UnaryNoise]] = {
    "poisson": PoissonNoise,
    "binomial": BinomialNoise,
    "gaussian": GaussianNoise,
    "unary": UnaryNoise,
}


@dataclass(frozen=True)
class Charge:
    """What a release takes: noise of this law on every counter, of which a replaced user changes this many."""

    noise: Noise
    changed: int


class Ledger:
    """A budget and what was taken from it, in a file (durable, atomic) or in memory.

    >>> ledger = Ledger("demo", Budget(epsilon=1.0, delta=1e-5))
    >>> ledger.record("batch 0", Charge(calibrate(ledger.budget, changed=22), changed=22))
    >>> round(ledger.spent, 3)
    1.0
    """

    def __init__(self, task: str, budget: Budget, path: Path | None = None) -> None:
        self.task = task
        self.budget = budget
        self.path = path
        try:
            # Autocommit off the driver's hands: every write below is one explicit transaction.
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS releases (name TEXT PRIMARY KEY, cohort TEXT NOT NULL, "
                    "charge TEXT NOT NULL)"
                )
                self._db.execute("CREATE INDEX IF NOT EXISTS by_cohort ON releases (cohort)")
                self._check_identity()
            if self._db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages are inconsistent")
        except sqlite3.Error as reason:
            raise StateMismatchError(
                f"{path} is not a ledger, or it is damaged ({reason}). Restore it from a backup; do not start a new "
                "one for the same users, it would forget what they have spent."
            ) from None

    def _check_identity(self) -> None:
        mine = {"format": FORMAT, "task": self.task, "budget": json.dumps(asdict(self.budget))}
        found = dict(self._db.execute("SELECT key, value FROM meta"))
        if not found:
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", mine.items())
        for key, value in mine.items():
            if found and found.get(key) != value:
                raise StateMismatchError(
                    f"The ledger {self.path} has {key} {found.get(key)!r}, not {value!r}; open it with what it was "
                    "made for, or use another file for another task."
                )

    def record(self, release: str, charge: Charge, cohort: str | None = None) -> None:
        """Take a charge for a release that is about to happen. Once this returns, it stands, crash or no crash.

        `cohort` names users who may have been charged before; left out, the users of this release are new.
        """
        self.record_all([release], charge, cohort)

    def record_all(self, releases: Iterable[str], charge: Charge, cohort: str | None = None) -> None:
        """Record several releases of the same charge, all or none; each to new users unless a cohort is named."""
        names = list(releases)
        text = _to_text(charge)
        with self._transaction():
            before = [] if cohort is None else self._charges(cohort)
            asked = [charge] * (1 if cohort is None else len(names))
            if not self._fits(before + asked):
                raise BudgetExceededError(self._refusal(names, before, asked))
            try:
                self._db.executemany(
                    "INSERT INTO releases VALUES (?, ?, ?)",
                    [(name, cohort or f"users of {name}", text) for name in names],
                )
            except sqlite3.IntegrityError:
                raise ContractError(
                    f"{names[0] if len(names) == 1 else 'One of the releases'} is in the ledger already: a batch is "
                    "released once. After a crash, send the release that was made then; do not draw new noise."
                ) from None

    def _fits(self, charges: list[Charge]) -> bool:
        if len(set(charges)) == 1:
            return _fits_alone(charges[0], len(charges), self.budget)
        return self._epsilon(charges) <= self.budget.epsilon

    def _refusal(self, names: list[str], before: list[Charge], asked: list[Charge]) -> str:
        spent, more, total = (self._epsilon(charges) for charges in (before, asked, before + asked))
        return (
            f"{names[0]} would overspend the budget (epsilon {self.budget.epsilon:g}, delta {self.budget.delta:g}): "
            f"its users have spent epsilon {spent:.4g}, {more:.4g} more is asked, together {total:.4g}. "
            + self._what_fits(before, asked)
        )

    def _what_fits(self, before: list[Charge], asked: list[Charge]) -> str:
        left = self.budget.epsilon - self._epsilon([*before], parts=2 if before else 1)
        if left <= 0:
            return "Nothing fits any more; ask users who have not taken part."
        share = Budget(left, self.budget.delta / (2 if before else 1))
        mean = calibrate(share, asked[0].changed, len(asked)).mean
        return f"What would fit: Poisson noise of mean {mean:,.1f} or more on each counter (epsilon {left:.4g})."

    @property
    def spent(self) -> float:
        """Epsilon spent at the budget's delta, by the cohort that has spent most."""
        rows = self._db.execute("SELECT cohort, charge FROM releases").fetchall()
        cohorts: dict[str, list[str]] = {}
        for cohort, charge in rows:
            cohorts.setdefault(cohort, []).append(charge)
        different = {tuple(sorted(charges)) for charges in cohorts.values()}
        return max((self._epsilon([_from_text(text) for text in charges]) for charges in different), default=0.0)

    @property
    def releases(self) -> list[str]:
        """Names of all recorded releases, in order."""
        return [name for (name,) in self._db.execute("SELECT name FROM releases ORDER BY rowid")]

    def _charges(self, cohort: str) -> list[Charge]:
        rows = self._db.execute("SELECT charge FROM releases WHERE cohort = ?", (cohort,))
        return [_from_text(text) for (text,) in rows]

    def _epsilon(self, charges: list[Charge], parts: int = 1) -> float:
        """Epsilon of all these charges to one user, at the budget's delta divided into `parts`.

        Equal charges compose exactly; different ones by adding up, delta shared out evenly, which is pessimistic.
        """
        kinds = Counter(charges)
        delta = self.budget.delta / max(1, len(kinds)) / parts
        return math.fsum(
            privacy_loss(charge.noise, charge.changed, times).epsilon(delta) for charge, times in kinds.items()
        )

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """All or nothing, and alone: a second process waits at BEGIN IMMEDIATE until this one is through."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


@functools.lru_cache(maxsize=1024)
def _fits_alone(charge: Charge, times: int, budget: Budget) -> bool:
    """The very comparison that calibration certifies; remembered, as the batches of a run are mostly alike."""
    return privacy_loss(charge.noise, charge.changed, times).delta(budget.epsilon) <= budget.delta


def _to_text(charge: Charge) -> str:
    law = next((name for name, kind in _LAWS.items() if type(charge.noise) is kind), None)
    if law is None:
        raise ContractError(f"{charge.noise} is not a law the accountant can charge for.")
    changed = checks.whole("changed", charge.changed, least=2)
    return json.dumps({"law": law, **asdict(charge.noise), "changed": changed})  # type: ignore[call-overload]


def _from_text(text: str) -> Charge:
    fields = json.loads(text)
    changed = fields.pop("changed")
    return Charge(_LAWS[fields.pop("law")](**fields), changed)
