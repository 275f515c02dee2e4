"""The coordinator without sockets: the learner, the ledger and the batches of one run, in one folder.

Each batch goes: announce (signed, with a key of its own), collect the release, charge the ledger, open and count,
learn, and then in one transaction: the learner's new state, the batch's noisy counts, the next announcement; the old
key is deleted. A process killed anywhere goes on from the last transaction: it asks for the same announced batch, is
given the same bytes, finds its charge in the ledger, and learns from it once.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shufflerl import checks, learners
from shufflerl.checks import FloatArray
from shufflerl.counts import Batch, CountQuery, Release
from shufflerl.errors import ContractError, ShuffleRLError, StateMismatchError
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture, Problem
from shufflerl.network import agreement, crypto, database, faults, wire
from shufflerl.network.crypto import SigningKey
from shufflerl.network.opening import Opener
from shufflerl.network.wire import Action, Command, Signed
from shufflerl.privacy.accounting import Budget, privacy_loss, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Charge, Ledger
from shufflerl.privacy.noise import PoissonNoise
from shufflerl.privacy.protocol import analyze
from shufflerl.privatizers.shuffle import Shuffle

_TABLES = [
    "CREATE TABLE run (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    """CREATE TABLE batches (number INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, users INTEGER NOT NULL,
        announcement BLOB NOT NULL, key BLOB, noisy BLOB, messages INTEGER, invalid INTEGER, outcome TEXT,
        acknowledged INTEGER NOT NULL DEFAULT 0)""",
]


@dataclass(frozen=True)
class Run:
    """What is learned, how, and at which price: fixed for the life of a run."""

    problem: Problem
    learner: str
    budget: Budget
    seed: int
    learner_parameters: dict[str, Any] = field(default_factory=dict)
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        checks.fraction("honest_fraction", self.honest_fraction)
        warn_if_weak(self.budget, self.problem.episodes)

    @property
    def identity(self) -> str:
        """Text that is equal for equal runs."""
        return json.dumps(
            {
                "problem": self.problem.fingerprint,
                "learner": self.learner,
                "parameters": self.learner_parameters,
                "epsilon": self.budget.epsilon,
                "delta": self.budget.delta,
                "honest_fraction": self.honest_fraction,
                "seed": self.seed,
            },
            sort_keys=True,
        )

    def make_learner(self) -> Learner:
        """The learner at its beginning."""
        return learners.make(self.learner, self.problem, self.seed, **self.learner_parameters)


@dataclass(frozen=True)
class BatchRecord:
    """A batch the coordinator has learned from: all that it ever saw of it."""

    batch: Batch
    noise: PoissonNoise
    values: FloatArray
    messages: int
    invalid: int

    @property
    def release(self) -> Release:
        """What the learner was given."""
        return Release(self.batch, self.values.copy(), self.noise, self.noise.variance)


class Coordinator:
    """Not to be used by two threads at once."""

    def __init__(self, folder: Path, run: Run, opener: Opener | None = None) -> None:
        self.run = run
        self.identity = SigningKey.load(folder / "identity.pem")
        self._opener = opener or Opener()
        self._path = folder / "coordinator.db"
        self._db = database.connect(self._path, "shufflerl coordinator 2", _TABLES)
        self.task = self._begin()
        self.ledger = Ledger(self.task.hex(), run.budget, folder / "ledger.db")
        self.learner = self._restored()

    def _begin(self) -> bytes:
        """A new run, or the one in this folder; refuse to continue one with other settings."""
        with database.transaction(self._db):
            known = dict(self._db.execute("SELECT key, value FROM run"))
            if not known:
                known = {"identity": self.run.identity, "task": secrets.token_bytes(wire.TASK_BYTES)}
                self._db.executemany("INSERT INTO run VALUES (?, ?)", known.items())
                learner = self.run.make_learner()
                self._plan(learner)
        if known["identity"] != self.run.identity:
            self._db.close()
            raise StateMismatchError(
                f"The run in {self._path.parent} has the settings {known['identity']}, not {self.run.identity}; start "
                "it with its own settings, or use another folder for another run."
            )
        return bytes(known["task"])

    def _restored(self) -> Learner:
        learner = self.run.make_learner()
        learner.restore(self._value("learner"))
        return learner

    def _value(self, key: str) -> bytes:
        return bytes(self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()[0])

    def _plan(self, learner: Learner) -> None:
        """Within a transaction: store the learner and announce what it asks for."""
        batch = learner.next_batch()
        self._db.execute("INSERT OR REPLACE INTO run VALUES ('learner', ?)", (learner.save(),))
        if batch is not None:
            self._announce(batch, 0)

    def _announce(self, batch: Batch, attempt: int) -> None:
        key = crypto.new_box_key()
        noise = agreement.noise_for(self.run.budget, batch.query, self.run.honest_fraction)
        said = agreement.announce(
            batch,
            noise,
            task=self._value("task"),
            attempt=attempt,
            tag_key=key.public_key().public_bytes_raw(),
        )
        signed = wire.encode(self.identity.sign(said))
        self._db.execute(
            "INSERT OR REPLACE INTO batches (number, attempt, users, announcement, key) VALUES (?, ?, ?, ?, ?)",
            (batch.index, attempt, batch.users, signed, key.private_bytes_raw()),
        )

    # What is asked of the shuffler.

    @property
    def pending(self) -> tuple[int, int, Signed] | None:
        """The batch to be answered: its number, attempt and announcement; None when the run is over."""
        row = self._db.execute("SELECT number, attempt, announcement FROM batches WHERE noisy IS NULL").fetchone()
        return None if row is None else (row[0], row[1], wire.decode(Signed, row[2]))

    def command(self, number: int, attempt: int, action: Action, chunk: int = 0) -> Signed:
        """A signed request about a released batch."""
        return self.identity.sign(Command(task=self.task, batch=number, attempt=attempt, action=action, chunk=chunk))

    def reopen(self) -> None:
        """The shuffler aborted the batch: announce it again, to other users, with a new key. Nothing was released."""
        waiting, pending = self.learner.next_batch(), self.pending
        if waiting is None or pending is None:
            raise ContractError("No batch is waiting for an answer; there is nothing to announce again.")
        with database.transaction(self._db):
            self._announce(waiting, pending[1] + 1)

    def absorb(self, chunks: Iterable[bytes]) -> None:
        """Charge the ledger, then open the release of the pending batch, learn from it and announce the next."""
        pending = self.pending
        if pending is None:
            raise ContractError("No batch is waiting for an answer; a release is learned from once.")
        number, _, signed = pending
        meaning = agreement.understand(signed.payload)
        query, noise = meaning.protocol.query, PoissonNoise(meaning.announcement.noise_mean)
        self._charge(number, Charge(PoissonNoise(noise.mean * self.run.honest_fraction), query.changed_counters))
        faults.reached("open")
        key = bytes(self._db.execute("SELECT key FROM batches WHERE number = ?", (number,)).fetchone()[0])
        counted = self._opener.count_all(key, meaning.tag_info, query.size, chunks)
        tags = np.repeat(np.arange(query.size), counted.counts)
        values = analyze(meaning.protocol, tags, reports=meaning.batch.users)
        try:
            with database.transaction(self._db):
                waiting = self.learner.next_batch()
                assert waiting is not None
                self.learner.observe(Release(waiting, values, noise, noise.variance))
                self._plan(self.learner)
                outcome = json.dumps(self._outcome(waiting.mixture))
                self._db.execute(
                    "UPDATE batches SET key = NULL, noisy = ?, messages = ?, invalid = ?, outcome = ? WHERE number = ?",
                    (values.tobytes(), len(tags) + counted.invalid, counted.invalid, outcome, number),
                )
                faults.reached("learner save")
            faults.reached("saved")
        except BaseException:
            self.learner = self._restored()  # what was not stored was not learned
            raise
        database.erase(self._db)

    def _outcome(self, played: Mixture) -> dict[str, Any]:
        """What a batch led to, for people: the value estimated since, and how the policy changed."""
        estimate, playing = self.learner.view().estimate, self.learner.playing
        assert playing is not None
        return {
            "estimate": None if estimate is None else asdict(estimate),
            "switched": playing != played,
            "changed_actions": int((playing.likeliest()[0] != played.likeliest()[0]).sum()),
        }

    def _charge(self, number: int, charge: Charge) -> None:
        """Before a release is opened it is in the ledger, once; after a crash it may be there already."""
        name = f"batch {number}"
        if name not in self.ledger.releases:
            faults.reached("ledger")
            self.ledger.record(name, charge)
            faults.reached("charged")

    def unacknowledged(self) -> list[tuple[int, int]]:
        """Batches learned from, by number and attempt, whose release the shuffler may delete."""
        rows = self._db.execute("SELECT number, attempt FROM batches WHERE noisy IS NOT NULL AND acknowledged = 0")
        return list(rows)

    def acknowledged(self, number: int) -> None:
        """The shuffler has deleted this release."""
        with database.transaction(self._db):
            self._db.execute("UPDATE batches SET acknowledged = 1 WHERE number = ?", (number,))

    # What can be shown.

    @property
    def records(self) -> list[BatchRecord]:
        """Every batch learned from, in order."""
        rows = self._db.execute(
            "SELECT announcement, noisy, messages, invalid FROM batches WHERE noisy IS NOT NULL ORDER BY number"
        )
        records = []
        for signed, noisy, messages, invalid in rows:
            meaning = agreement.understand(wire.decode(Signed, signed).payload)
            noise = PoissonNoise(meaning.announcement.noise_mean)
            records.append(BatchRecord(meaning.batch, noise, np.frombuffer(noisy).copy(), messages, invalid))
        return records

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """What every batch learned from led to, in order."""
        rows = self._db.execute("SELECT number, users, outcome FROM batches WHERE noisy IS NOT NULL ORDER BY number")
        return [{"batch": number, "users": users, **json.loads(outcome)} for number, users, outcome in rows]

    def tally(self) -> tuple[int, int, int]:
        """Batches learned from, messages in them, and messages that were left out."""
        row = self._db.execute(
            "SELECT COUNT(*), TOTAL(messages), TOTAL(invalid) FROM batches WHERE noisy IS NOT NULL"
        ).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    @property
    def policy(self) -> Mixture | None:
        """What was deployed last: at the end of a run, what was learned."""
        return self.learner.deployed

    def certificate(self) -> Certificate:
        """What every user of the run is guaranteed."""
        query = CountQuery.everything(self.run.problem)
        noise = agreement.noise_for(self.run.budget, query, self.run.honest_fraction)
        honest = PoissonNoise(noise.mean * self.run.honest_fraction)
        return Certificate(
            epsilon=privacy_loss(honest, query.changed_counters).epsilon(self.run.budget.delta),
            delta=self.run.budget.delta,
            budget_epsilon=self.run.budget.epsilon,
            model=Shuffle.model,
            mechanism=Shuffle.mechanism,
            noise_sd=noise.sd,
            noise_on=Shuffle.noise_on,
            changed_counters=query.changed_counters,
            participations=1,
            honest_fraction=self.run.honest_fraction,
            assumptions=Shuffle.assumptions,
        )

    def close(self) -> None:
        """Let go of the files and workers."""
        self._opener.close()
        self.ledger.close()
        self._db.close()


#: What may go wrong with the coordinator's own files.
TROUBLE = (sqlite3.Error, ShuffleRLError, OSError)
