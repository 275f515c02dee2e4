"""The ledger: every release is recorded against the budget before it happens, or does not happen.

What a release costs is the accountant's business; the ledger knows whose budget it comes from. Users who take part in
one batch only form a cohort of their own, and over disjoint cohorts costs do not add up (parallel composition):
what is spent is the most that any cohort has spent. That later batches depend on earlier releases changes nothing:
given the releases so far, only those to a user's own cohort depend on what it did. Releases to one cohort compose.

Every row carries a checksum over itself and the one before, checked when a file is opened. That finds damage, not
forgery: who may write the file can write new checksums, and an old copy put back in its place looks as good as new.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from shufflerl import checks
from shufflerl.errors import (
    AccountingError,
    BudgetExceededError,
    ContractError,
    InvalidInputError,
    ShuffleRLError,
    StateMismatchError,
)
from shufflerl.noise import (
    BinomialNoise,
    DiscreteLaplace,
    GaussianNoise,
    Noise,
    PoissonNoise,
    TruncatedLaplace,
    UnaryNoise,
)
from shufflerl.privacy.accounting import Budget, calibrate
from shufflerl.privacy.certificate import at_most
from shufflerl.privacy.loss import epsilon_beside, failure_delta, privacy_loss

#: Raised when the tables change, so that an older file is refused instead of misread.
FORMAT = "shufflerl ledger 2"
#: Seconds to wait for another process that is recording in the same file.
PATIENCE = 10.0

_APPLICATION_ID = int.from_bytes(b"SHRL", "big")
_TABLES = [
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE releases (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, cohort TEXT, charge TEXT NOT NULL, "
    "checksum TEXT NOT NULL)",
    "CREATE INDEX by_cohort ON releases (cohort)",
]
_ENCODER = json.JSONEncoder(default=repr)  # a value of a wrong type must only not match
_TROUBLE = (sqlite3.Error, UnicodeError, OSError)
_LAWS: dict[str, type[PoissonNoise | BinomialNoise | DiscreteLaplace | TruncatedLaplace | GaussianNoise | UnaryNoise]]
_LAWS = {
    "poisson": PoissonNoise,
    "binomial": BinomialNoise,
    "laplace": DiscreteLaplace,
    "truncated laplace": TruncatedLaplace,
    "gaussian": GaussianNoise,
    "unary": UnaryNoise,
}


@dataclass(frozen=True)
class Charge:
    """What a release takes: noise of this law on every counter, of which a replaced user changes this many.

    With probability `failure` at most that noise is not all there.
    """

    noise: Noise
    changed: int
    failure: float = 0.0

    def delta(self, epsilon: float, times: int = 1) -> float:
        """A delta at which so many such releases to one user are (epsilon, delta) private."""
        loss = privacy_loss(self.noise, self.changed, times)
        return loss.delta(epsilon) + failure_delta(times * self.failure, epsilon)

    def epsilon(self, budget: Budget) -> float:
        """What such a release costs at the budget's delta."""
        loss = privacy_loss(self.noise, self.changed)
        return epsilon_beside(self.failure, budget.delta, budget.epsilon, loss.epsilon)


class Ledger:
    """A budget and what was taken from it, in a file (durable, atomic) or in memory.

    A new file is made only where there is none; any other must be a ledger of the same task and budget.

    >>> ledger = Ledger("demo", Budget(epsilon=1.0, delta=1e-5))
    >>> ledger.record("batch 0", Charge(calibrate(ledger.budget, changed=22), changed=22))
    >>> round(ledger.spent, 3)
    1.0
    """

    def __init__(self, task: str, budget: Budget, path: Path | None = None) -> None:
        self.task = task
        self.budget = budget
        self.path = path
        self._identity = {"format": FORMAT, "task": task, "budget": json.dumps(asdict(budget))}
        with self._explained():
            if path is None:
                self._db = _connect(":memory:")
                self._create(self._db)
            else:
                if not path.exists():
                    self._create_file(path)
                self._db = _connect(f"{path.absolute().as_uri()}?mode=rw")
        try:
            with self._transaction():
                self._verify()
                self._keep_to_owner()
        except BaseException:
            self._db.close()
            raise

    def _create_file(self, path: Path) -> None:
        """Made aside and put in place complete, so that nobody, and no crash, ever meets half a ledger."""
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as aside:
            complete = Path(aside, "ledger")
            complete.touch(0o600)  # it tells what a user took part in; its journal gets the same rights
            with contextlib.closing(_connect(complete.absolute().as_uri())) as db:
                self._create(db)
            with contextlib.suppress(FileExistsError):  # another process was first; its ledger is verified like any
                os.link(complete, path)

    def _keep_to_owner(self) -> None:
        """Take from others the right to read a file that was made or copied with it."""
        if self.path is not None and self.path.stat().st_mode & 0o077:
            self.path.chmod(0o600)

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        for table in _TABLES:
            db.execute(table)
        meta = {**self._identity, "chain": f"0 {self._chain_start}"}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.execute("COMMIT")

    def _verify(self) -> None:
        if self._db.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
            raise sqlite3.DatabaseError("it is empty or another application's")
        schema = self._db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        if [sql for (sql,) in schema] != _TABLES:
            raise sqlite3.DatabaseError("its tables are not those of a ledger")
        if self._db.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("its pages are inconsistent")
        meta = dict(self._db.execute("SELECT key, value FROM meta"))
        for key, value in self._identity.items():
            if meta.get(key) != value:
                raise StateMismatchError(
                    f"The ledger {self.path} has {key} {meta.get(key)!r}, not {value!r}; open it with what it was "
                    "made for, or use another file for another task."
                )
        count, checksum = 0, self._chain_start
        rows = self._db.execute("SELECT number, checksum, name, cohort, charge FROM releases ORDER BY number")
        for count, (number, stored, name, cohort, text) in enumerate(rows, 1):
            checksum = _checksum(checksum, name, cohort, text)
            if (number, stored) != (count, checksum):
                raise sqlite3.DatabaseError(f"row {count}, {name!r}, does not match its checksum")
            _from_text(text)
        if meta.get("chain") != f"{count} {checksum}":
            raise sqlite3.DatabaseError("its last rows are missing")

    @property
    def _chain_start(self) -> str:
        return _checksum(*self._identity.values())

    def record(self, release: str, charge: Charge, cohort: str | None = None) -> None:
        """Take a charge for a release that is about to happen. Once this returns, it stands, crash or no crash.

        `cohort` names users who may have been charged before; left out, the users of this release are new.
        """
        self.record_all([release], charge, cohort)

    def record_all(self, releases: Iterable[str], charge: Charge, cohort: str | None = None) -> None:
        """Record several releases of the same charge, all or none; each to new users unless a cohort is named."""
        names = list(releases)
        _check_names("release", names)
        _check_names("cohort", [] if cohort is None else [cohort])
        if not names:
            return
        text = _to_text(charge)
        asked = Counter({_from_text(text): 1 if cohort is None else len(names)})
        with self._transaction():
            before = Counter[Charge]() if cohort is None else self.charges_of(cohort)
            if not self._fits(before + asked):
                raise BudgetExceededError(self._refusal(names, before, asked))
            count, checksum = self._db.execute("SELECT value FROM meta WHERE key = 'chain'").fetchone()[0].split()
            rows = []
            for number, name in enumerate(names, int(count) + 1):
                checksum = _checksum(checksum, name, cohort, text)
                rows.append((number, name, cohort, text, checksum))
            try:
                self._db.executemany("INSERT INTO releases VALUES (?, ?, ?, ?, ?)", rows)
            except sqlite3.IntegrityError:
                raise ContractError(
                    f"{names[0] if len(names) == 1 else 'One of the releases'} is in the ledger already: a batch is "
                    "released once. After a crash, send the release that was made then; do not draw new noise."
                ) from None
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'chain'", (f"{rows[-1][0]} {checksum}",))

    def _fits(self, charges: Counter[Charge]) -> bool:
        """By the very comparison that calibration certifies where it composes exactly."""
        ((charge, times), *others) = charges.items()
        if others or (isinstance(charge.noise, UnaryNoise) and times > 1):
            return self._epsilon(charges) <= self.budget.epsilon
        return charge.delta(self.budget.epsilon, times) <= self.budget.delta

    def _refusal(self, names: list[str], before: Counter[Charge], asked: Counter[Charge]) -> str:
        spent, more, total = (self._epsilon(charges) for charges in (before, asked, before + asked))
        return (
            f"{names[0]} would overspend the budget (epsilon {self.budget.epsilon:g}, delta {self.budget.delta:g}): "
            f"its users have spent epsilon {at_most(spent)}, {at_most(more)} more is asked, together {at_most(total)}. "
            + self._what_fits(before, asked)
        )

    def _what_fits(self, before: Counter[Charge], asked: Counter[Charge]) -> str:
        ((charge, times),) = asked.items()
        kinds = len(before) + 1
        failure = _failure(before + asked)
        left = self.budget.epsilon - self._epsilon(before, kinds, failure)
        try:
            share = Budget(left, (self.budget.delta - failure_delta(failure, self.budget.epsilon)) / kinds)
            mean = math.ceil(10 * calibrate(share, charge.changed, times).mean) / 10
            while not self._fits(before + Counter({replace(charge, noise=PoissonNoise(mean)): times})):
                mean = math.ceil(10 * mean * 1.0001) / 10
        except (InvalidInputError, AccountingError):  # no epsilon is left, or too little for any noise we can draw
            return "Nothing fits any more; ask users who have not taken part."
        return f"What would fit: Poisson noise of mean {mean:,.1f} or more on each counter (epsilon {left:.4g})."

    @property
    def spent(self) -> float:
        """Epsilon spent at the budget's delta, by the cohort that has spent most."""
        with self._explained():
            alone = self._db.execute("SELECT DISTINCT charge FROM releases WHERE cohort IS NULL")
            different = {frozenset([(_from_text(text), 1)]) for (text,) in alone}
            named = self._db.execute("SELECT DISTINCT cohort FROM releases WHERE cohort IS NOT NULL").fetchall()
            different |= {frozenset(self.charges_of(cohort).items()) for (cohort,) in named}
        return max((self._epsilon(Counter(dict(charges))) for charges in different), default=0.0)

    @property
    def releases(self) -> list[str]:
        """Names of all recorded releases, in order."""
        with self._explained():
            return [name for (name,) in self._db.execute("SELECT name FROM releases ORDER BY number")]

    def charges_of(self, cohort: str) -> Counter[Charge]:
        """What users of a cohort were charged, and how often."""
        rows = self._db.execute("SELECT charge FROM releases WHERE cohort = ?", (cohort,))
        return Counter(_from_text(text) for (text,) in rows)

    def _epsilon(self, charges: Counter[Charge], kinds: int | None = None, failure: float | None = None) -> float:
        """Epsilon of all these charges to one user, when they are all, or `kinds` with others to come.

        Equal charges compose exactly; different ones by adding up, delta shared out evenly, which is pessimistic. That
        the noise of any of them fails is accounted for apart, by the probability of all, those to come included.
        """

        def without_failure(delta: float) -> float:
            share = share_of(delta, kinds or len(charges) or 1)
            return sum_up([_epsilon_alone(charge, times, share) for charge, times in charges.items()])

        fails = _failure(charges) if failure is None else failure
        return epsilon_beside(fails, self.budget.delta, self.budget.epsilon, without_failure)

    def close(self) -> None:
        """Close the file; what was recorded stays."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and alone: a second process waits at BEGIN IMMEDIATE until this one is through."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as reason:
            with contextlib.suppress(sqlite3.Error):  # some failures have rolled it back already
                self._db.execute("ROLLBACK")
            if isinstance(reason, _TROUBLE):
                raise self._explanation(reason) from None
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the database or the file system says into what the user can do about it."""
        try:
            yield
        except _TROUBLE as reason:
            raise self._explanation(reason) from None

    def _explanation(self, reason: Exception) -> ShuffleRLError:
        code = getattr(reason, "sqlite_errorcode", 0) & 0xFF  # without the details in the higher bits
        if isinstance(reason, sqlite3.ProgrammingError):
            return ContractError(f"The ledger {self.path} cannot be used: {reason}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StateMismatchError(
                f"The ledger {self.path} is locked by another process, for more than {PATIENCE:g} seconds. Nothing "
                "was recorded, so do not release; try again when the other is through."
            )
        if isinstance(reason, OSError) or code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            return InvalidInputError(
                f"The ledger {self.path} cannot be opened for writing ({reason}); expected a file, or a place for a "
                "new one, in a directory that exists and in which you may write."
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return StateMismatchError(
                f"The ledger {self.path} could not be read or written ({reason}). Do not release; make room or repair "
                "the disk, and try again."
            )
        return StateMismatchError(
            f"{self.path} is not a ledger, or it is damaged ({reason}). Restore it from a backup; do not start a new "
            "one for the same users, it would forget what they have spent."
        )


def _connect(address: str) -> sqlite3.Connection:
    # Autocommit off the driver's hands: every write is one explicit transaction. EXTRA: once committed, not even a
    # power cut brings the journal back and with it the state before.
    db = sqlite3.connect(address, timeout=PATIENCE, isolation_level=None, uri=True)
    db.execute("PRAGMA synchronous = EXTRA")
    return db


def _epsilon_alone(charge: Charge, times: int, delta: float) -> float:
    """Epsilon of equal charges whose noise does not fail: composed exactly; of unary reports, where that is not known,
    added up.
    """
    if isinstance(charge.noise, UnaryNoise):
        return sum_up([privacy_loss(charge.noise, charge.changed).epsilon(share_of(delta, times))] * times)
    return privacy_loss(charge.noise, charge.changed, times).epsilon(delta)


def _failure(charges: Counter[Charge]) -> float:
    """With which probability at most the noise of any of these fails."""
    return sum_up([times * charge.failure for charge, times in charges.items()])


def share_of(delta: float, parts: int) -> float:
    """One of equal parts of delta, rounded down: together they are no more than all of it."""
    share = delta / parts
    return share if parts * Fraction(share) <= delta else math.nextafter(share, 0.0)


def sum_up(epsilons: list[float]) -> float:
    """Their sum, rounded up."""
    total = math.fsum(epsilons)  # the nearest
    short = math.isfinite(total) and math.fsum([*epsilons, -total]) > 0
    return math.nextafter(total, math.inf) if short else total


def _checksum(*parts: Any) -> str:
    return hashlib.sha256(_ENCODER.encode(parts).encode()).hexdigest()


def _check_names(kind: str, names: list[str]) -> None:
    """Refuse names that the file cannot hold and find again."""
    for name in names:
        if not (isinstance(name, str) and name.encode(errors="ignore").decode() == name != ""):
            raise InvalidInputError(f"The name of a {kind} is {name!r}; expected text of at least one character.")


@functools.lru_cache(maxsize=1024)
def _to_text(charge: Charge) -> str:
    law = next((name for name, kind in _LAWS.items() if type(charge.noise) is kind), None)
    if law is None:
        raise ContractError(f"{charge.noise} is not a law the accountant can charge for.")
    changed = checks.whole("changed", charge.changed, least=2)
    fields = {"law": law, **asdict(charge.noise), "changed": changed}  # type: ignore[call-overload]
    return json.dumps(fields | ({"failure": charge.failure} if charge.failure else {}))


@functools.lru_cache(maxsize=1024)
def _from_text(text: str) -> Charge:
    try:
        fields = json.loads(text)
        changed = checks.whole("changed", fields.pop("changed"), least=2)
        failure = checks.real("failure", fields.pop("failure", 0.0), above=0, below=1, closed=True)
        return Charge(_LAWS[fields.pop("law")](**fields), changed, failure)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise sqlite3.DatabaseError(f"{text!r} is not a charge") from None
