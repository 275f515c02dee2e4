"""The coordinator without sockets: the learner, the ledger and the batches of one run, in one folder.

Each batch goes: announce (signed, with a key of its own), collect the release, charge the ledger, open and count,
learn, and then in one transaction: the learner's new state, the batch's noisy counts, the next announcement; the old
key is deleted. Where the servers add the noise the coordinator's own is drawn with the announcement, once, kept like
the key, and added to the counts before anything looks at them. A process killed anywhere goes on from the last
transaction: it asks for the same announced batch, is given the same bytes, finds its charge in the ledger, and learns
from it once.

Where reports are masked vectors the coordinator first opens their seeds and says, once, which it cannot open; what it
said and the seeds are stored before they are sent. Seeds are random numbers that depend on no data.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from shufflerl import checks, learners
from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Batch, Release
from shufflerl.errors import ContractError, InvalidInputError, ShuffleRLError, StateMismatchError, StorageError
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture, Problem
from shufflerl.network import faults
from shufflerl.network.coordinator.opening import Opener
from shufflerl.network.protocol import agreement, costs, crypto, masking, sources, wire
from shufflerl.network.protocol.agreement import Agreement, NoiseBy
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import Action, Command, Exclusion, ProblemError, Reason, Signed, Transport
from shufflerl.network.stores import database
from shufflerl.noise import Noise
from shufflerl.policies import Table
from shufflerl.privacy.accounting import Budget, warn_if_weak
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.mechanism import ServersNoise, ShuffledPoisson
from shufflerl.privacy.protocol import noise_counts
from shufflerl.returns import ReturnProblem

_TABLES = [
    "CREATE TABLE run (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    """CREATE TABLE batches (number INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, users INTEGER NOT NULL,
        announcement BLOB NOT NULL, key BLOB, own BLOB, noisy BLOB, messages INTEGER, invalid INTEGER, outcome TEXT,
        seeds BLOB, excluded BLOB, acknowledged INTEGER NOT NULL DEFAULT 0)""",
]


@dataclass(frozen=True)
class Run:
    """What is learned, how, and at which price: fixed for the life of a run.

    `noise`: who adds it; `honest_fraction`: the share of users who do, where users add it; `transport`: how reports
    travel, "auto" whatever is cheaper for each batch; `excludable`: the share of masked vectors that may be left out of
    a sum; where users add the noise all others make up for theirs. `admission`: how many times the users of a batch are
    drawn for it by lot, of all who are `enrolled` and have not played; without it, whoever comes first takes part.
    """

    problem: Problem | ReturnProblem
    learner: str
    budget: Budget
    seed: int
    learner_parameters: dict[str, Any] = field(default_factory=dict)
    honest_fraction: float = 1.0
    transport: Literal["auto", "tags", "sums"] = "tags"
    excludable: float = 0.01
    noise: NoiseBy = "servers"
    admission: float | None = None
    enrolled: int | None = None

    def __post_init__(self) -> None:
        checks.choice("noise", self.noise, ("users", "servers"))
        checks.fraction("honest_fraction", self.honest_fraction)
        if self.noise == "servers" and self.honest_fraction < 1:
            raise InvalidInputError(
                f"honest_fraction is {self.honest_fraction:g}, but with noise by the servers nothing rests on users; "
                'leave it out, or set noise = "users".'
            )
        checks.choice("transport", self.transport, ("auto", "tags", "sums"))
        if checks.real("excludable", self.excludable, above=0, closed=True) >= self.honest_fraction:
            raise InvalidInputError(
                f"excludable is {self.excludable:g}; expected less than the honest fraction, {self.honest_fraction:g}: "
                "somebody's noise must be left to rely on."
            )
        if self.admission is not None:
            checks.real("admission", self.admission, above=1, closed=True)
        elif self.enrolled is not None:
            raise InvalidInputError(
                f"enrolled is {self.enrolled}, but nobody is drawn among them; set admission too, such as 2."
            )
        if self.enrolled is not None:
            checks.whole("enrolled", self.enrolled, least=self.problem.episodes)
        warn_if_weak(self.budget, self.problem.episodes)

    def drawn(self, users: int, played: int, late: int) -> float:
        """The share of all tokens that is drawn for a batch of so many users, after so many have played.

        Twice as many for each attempt that was too `late`: of those who were drawn for it too few came.
        """
        if self.admission is None:
            return 1.0
        left = max(1, (self.enrolled or self.problem.episodes) - played)
        return min(1.0, self.admission * users * 2.0 ** min(late, 64) / left)

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
                "transport": self.transport,
                "excludable": self.excludable,
                "noise": self.noise,
                "seed": self.seed,
                **({} if self.admission is None else {"admission": self.admission, "enrolled": self.enrolled}),
            },
            sort_keys=True,
        )

    def mechanism(self, excludable: float = 0.0) -> ShuffledPoisson | ServersNoise:
        """How batches are made private of which this share of the users may be left out."""
        return agreement.mechanism(self.noise, self.budget, self.honest_fraction, excludable)

    def make_learner(self) -> Learner:
        """The learner at its beginning, told of the noise to come."""
        learner = learners.make(self.learner, self.problem, self.seed, **self.learner_parameters)
        learner.expect(self.mechanism().noise(learner.widest_query))
        return learner


@dataclass(frozen=True)
class BatchRecord:
    """A batch the coordinator has learned from: all that it ever saw of it.

    Messages are tags, but for those that only fill up reports, or seeds of masked vectors; `invalid` ones were left
    out.
    """

    batch: Batch
    transport: Transport
    noise_by: NoiseBy
    noise: Noise
    values: FloatArray
    variance_range: tuple[float, ...]
    messages: int
    invalid: int

    @property
    def release(self) -> Release:
        """What the learner was given."""
        return Release(self.batch, self.values.copy(), self.noise, self.noise.variance, self.variance_range)


class SpoiltSumError(ShuffleRLError):
    """A sum that no honest users can have: nothing is learned from it."""


class Coordinator:
    """Not to be used by two threads at once."""

    def __init__(self, folder: Path, run: Run, opener: Opener | None = None) -> None:
        self.run = run
        self.identity = SigningKey.load(folder / "identity.pem")
        self._opener = opener or Opener()
        self._path = folder / "coordinator.db"
        self._db = database.connect(self._path, "shufflerl coordinator 3", _TABLES)
        try:
            self.task = self._begin()
            if self.tally()[0] and not (folder / "ledger.db").exists():
                raise StorageError(
                    f"{folder} has batches that were learned from but no ledger.db, which says what they cost. Restore "
                    "that of the stopped run from a backup, or begin another run in another folder."
                )
        except BaseException:
            self._db.close()
            raise
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
            changed = _differences(str(known["identity"]), self.run.identity)
            raise StateMismatchError(
                f"The run in {self._path.parent} was begun with other settings: {changed}. Start it with its own, or "
                "use another folder for another run."
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

    def _variance_range(self, agreed: Agreement, counted: Batch) -> tuple[float, ...]:
        """The variance of noise if those who were counted had touched one counter alone, two, up to all of them."""
        asked = agreed.batch
        mechanism = self.run.mechanism(agreed.announcement.excludable / asked.users)
        variances = mechanism.variance_range(asked.query, asked.users)
        assert variances is not None  # its noise goes with the query
        share = agreed.source.noise(counted.users).variance / agreed.source.noise(asked.users).variance
        return tuple(variance * share for variance in variances)

    def _drawn(self, batch: Batch, attempt: int) -> float:
        """The share of all tokens that is drawn for an attempt at a batch.

        Those whose reports were of no use have played as well; that they filled the batch is no reason to draw more.
        """
        sizes = dict(self._db.execute("SELECT number, users FROM batches WHERE number <= ?", (batch.index,)))
        wasted = self._wasted()
        played = sum(users for number, users in sizes.items() if number < batch.index)
        played += sum(sizes[number] for number in wasted)
        return self.run.drawn(batch.users, played, attempt - wasted.count(batch.index))

    def _wasted(self) -> list[int]:
        """The batch of each attempt that was filled in vain."""
        row = self._db.execute("SELECT value FROM run WHERE key = 'wasted'").fetchone()
        return [] if row is None else list(msgspec.msgpack.decode(row[0], type=list[int]))

    def _announce(self, batch: Batch, attempt: int) -> None:
        key = crypto.new_box_key()
        noise = self.run.mechanism().noise(batch.query)
        if self.run.transport == "auto":
            transport = costs.cheaper(sources.source(batch.query, batch.users, noise))
        else:
            transport = Transport(self.run.transport)
        excludable = 0
        if transport == Transport.sums:
            excludable = int(self.run.excludable * batch.users)
            noise = self.run.mechanism(excludable / batch.users).noise(batch.query)
        announcement = agreement.announce(
            batch,
            noise,
            task=self._value("task"),
            attempt=attempt,
            tag_key=key.public_key().public_bytes_raw(),
            transport=transport,
            excludable=excludable,
            problem=self.run.problem,
            drawn=self._drawn(batch, attempt),
        )
        signed = self.identity.sign(announcement)
        # What everybody would refuse is not stored, and so not announced.
        own = agreement.parse_announcement(signed.payload).source.own
        # Drawn here, once, so that whatever fails later fails again: noise drawn until all goes well has another law.
        noise_bytes = None if own is None else noise_counts(own, batch.query.size).astype("<i8").tobytes()
        self._db.execute(
            "INSERT OR REPLACE INTO batches (number, attempt, users, announcement, key, own) VALUES (?, ?, ?, ?, ?, ?)",
            (batch.index, attempt, batch.users, wire.encode(signed), key.private_bytes_raw(), noise_bytes),
        )

    # What is asked of the shuffler.

    @property
    def pending(self) -> tuple[int, int, Signed] | None:
        """The batch to be answered: its number, attempt and announcement; None when the run is over."""
        row = self._db.execute("SELECT number, attempt, announcement FROM batches WHERE noisy IS NULL").fetchone()
        return None if row is None else (row[0], row[1], wire.decode(Signed, row[2]))

    def command(self, number: int, attempt: int, action: Action, chunk: int = 0) -> Signed:
        """A signed request about a full batch."""
        return self.identity.sign(Command(task=self.task, batch=number, attempt=attempt, action=action, chunk=chunk))

    def reopen(self, *, filled: bool = False) -> None:
        """The batch came to nothing: announce it again, to other users, with a new key.

        Too few came, or it was `filled` and what they sent is of no use.
        """
        waiting, pending = self.learner.next_batch(), self.pending
        if waiting is None or pending is None:
            raise ContractError("No batch is waiting for an answer; there is nothing to announce again.")
        with database.transaction(self._db):
            if filled:
                wasted = msgspec.msgpack.encode([*self._wasted(), waiting.index])
                self._db.execute("INSERT OR REPLACE INTO run VALUES ('wasted', ?)", (wasted,))
            self._announce(waiting, pending[1] + 1)
        database.erase(self._db)

    @property
    def exclusion(self) -> Signed | None:
        """Which seeds of the pending batch cannot be opened; None while they have not been looked at."""
        row = self._db.execute("SELECT number, attempt, excluded FROM batches WHERE noisy IS NULL").fetchone()
        if row is None or row[2] is None:
            return None
        positions = msgspec.msgpack.decode(row[2])
        return self.identity.sign(Exclusion(task=self.task, batch=row[0], attempt=row[1], positions=positions))

    def open_seeds(self, chunks: Iterable[bytes]) -> None:
        """Open the sealed seeds of the pending batch, and store them and which cannot be opened."""
        number, agreed, key = self._asked()
        opened = self._opener.seeds(key, agreed.seed_info, chunks)
        if len(opened) != agreed.batch.users:
            raise ContractError(
                f"The shuffler hands over {len(opened)} seeds of batch {number}; expected {agreed.batch.users}. "
                "Nothing is excluded, and nothing is summed."
            )
        excluded = [position for position, seed in enumerate(opened) if seed is None]
        seeds = b"".join(seed for seed in opened if seed is not None)
        with database.transaction(self._db):
            self._db.execute(
                "UPDATE batches SET seeds = ?, excluded = ? WHERE number = ?",
                (seeds, msgspec.msgpack.encode(excluded), number),
            )
            faults.reached("seeds opened")

    def _asked(self) -> tuple[int, Agreement, bytes]:
        """The pending batch's number, agreement and key."""
        pending = self.pending
        if pending is None:
            raise ContractError("No batch is waiting for an answer; a release is learned from once.")
        number, _, signed = pending
        key = bytes(self._db.execute("SELECT key FROM batches WHERE number = ?", (number,)).fetchone()[0])
        return number, agreement.parse_announcement(signed.payload), key

    def absorb(self, chunks: Iterable[bytes]) -> None:
        """Charge the ledger, then open the release of the pending batch, learn from it and announce the next."""
        number, agreed, key = self._asked()
        excluded = self._excluded(number)
        batch, noise = _counted(agreed, excluded)
        self._charge(agreed, excluded)
        faults.reached("open")
        if agreed.transport == Transport.sums:
            noisy, messages, invalid = self._unmasked(number, agreed, chunks), agreed.batch.users, excluded
        else:
            noisy, messages, invalid = self._opened(number, agreed, key, chunks)
        values = agreed.source.values(noisy, batch.users)
        try:
            with database.transaction(self._db):
                waiting = self.learner.next_batch()
                assert waiting is not None
                released = replace(waiting, users=batch.users)
                self.learner.observe(
                    Release(released, values, noise, noise.variance, self._variance_range(agreed, batch))
                )
                self._plan(self.learner)
                outcome = json.dumps(self._outcome(waiting.mixture))
                self._db.execute(
                    "UPDATE batches SET key = NULL, own = NULL, seeds = NULL, noisy = ?, messages = ?, invalid = ?, "
                    "outcome = ? WHERE number = ?",
                    (values.tobytes(), messages, invalid, outcome, number),
                )
                faults.reached("learner save")
            faults.reached("saved")
        except BaseException:
            self.learner = self._restored()  # what was not stored was not learned
            raise
        database.erase(self._db)

    def _outcome(self, played: Mixture) -> dict[str, Any]:
        """What a batch led to, for people: the value estimated since, and how the policy changed.

        `arms` are the returns of the policies that were compared, where the learner tells them.
        """
        view, playing = self.learner.view(), self.learner.playing
        assert playing is not None
        tables = isinstance(playing.family, Table)
        return {
            "estimate": None if view.estimate is None else asdict(view.estimate),
            "arms": view.details.get("arms"),
            "switched": playing != played,
            "changed_actions": int((playing.modal_policy()[0] != played.modal_policy()[0]).sum()) if tables else None,
        }

    def _excluded(self, number: int) -> int:
        """How many reports of a batch are not in its sum."""
        (positions,) = self._db.execute("SELECT excluded FROM batches WHERE number = ?", (number,)).fetchone()
        return 0 if positions is None else len(msgspec.msgpack.decode(positions))

    def _own_noise(self, number: int, agreed: Agreement) -> IntArray:
        """What the coordinator itself adds to the counters of a batch."""
        (own,) = self._db.execute("SELECT own FROM batches WHERE number = ?", (number,)).fetchone()
        return np.zeros(agreed.query.size, dtype=np.int64) if own is None else np.frombuffer(own, dtype="<i8")

    def _opened(self, number: int, agreed: Agreement, key: bytes, chunks: Iterable[bytes]) -> tuple[IntArray, int, int]:
        """The counts of sealed tags with the coordinator's noise, how many tags there are, and how many are left out.

        Tags that fill up reports are neither.
        """
        source = agreed.source
        tags: list[list[bytes]] = [[] for _ in source.groups]
        for group, some in (section for chunk in chunks for section in wire.sections(chunk)):
            if group >= len(tags):
                raise ContractError(f"The release of batch {number} has a group {group}. Is this its shuffler?")
            tags[group].append(bytes(some))
        for group, parts in enumerate(tags):
            found, right = sum(map(len, parts)) // wire.SEALED_TAG_BYTES, source.users * source.tags_per_group
            if found < right or (found > right and source.dummies is None):
                raise ContractError(
                    f"The release of batch {number} has {found:,} messages in group {group}; {source.users:,} reports "
                    f"have {right:,}. Is this its shuffler? Nothing was learned."
                )
        counts, padding, invalid = self._opener.count_all(key, agreed.tag_info, source.groups, tags)
        messages = int(counts.sum()) + invalid
        if source.padding is None:  # of a user who does not keep to the protocol
            messages, invalid = messages + padding, invalid + padding
        return counts + self._own_noise(number, agreed), messages, invalid

    def _unmasked(self, number: int, agreed: Agreement, chunks: Iterable[bytes]) -> IntArray:
        """The counts in a masked sum with the coordinator's noise; impossible ones are asked again, of other users.

        Whether they are is seen by all, so that it must be told from the noisy counts alone.
        """
        counters, size = agreed.query.size, agreed.word_bytes
        (seeds,) = self._db.execute("SELECT seeds FROM batches WHERE number = ?", (number,)).fetchone()
        if seeds is None:
            raise ContractError(f"Batch {number} was summed, but its seeds are not here. Was an old backup restored?")
        each = [seeds[start : start + wire.SEED_BYTES] for start in range(0, len(seeds), wire.SEED_BYTES)]
        sent = b"".join(chunks)
        if len(sent) != counters * size:
            raise ContractError(
                f"The sum of batch {number} has {len(sent)} bytes; expected {counters * size}. Is this its shuffler?"
            )
        own = self._own_noise(number, agreed).astype(f"<u{size}")  # modulo the range of a counter, negative ones too
        low, high = agreed.source.count_range
        noisy = masking.signed(masking.words(sent, size) - self._opener.masks(each, counters, size) + own, low)
        if (wrong := np.flatnonzero(noisy > high)).size:
            self.reopen(filled=True)
            raise SpoiltSumError(
                f"Counter {wrong[0]} of batch {number}, attempt {agreed.announcement.attempt}, is "
                f"{noisy[wrong[0]]:,} modulo 2^{8 * size}; {len(each):,} honest users raise it to {high:,} at most. "
                "At least one of them was not honest, and nobody can tell which. Nothing was learned; the batch is "
                'asked again of other users. If this goes on, use transport = "tags".'
            )
        return noisy

    def _charge(self, agreed: Agreement, excluded: int) -> None:
        """Before a release is opened it is in the ledger, once; after a crash it may be there already.

        Another attempt is made by other users, and is another release.
        """
        announcement = agreed.announcement
        name = f"batch {announcement.batch}" + (f", attempt {announcement.attempt}" if announcement.attempt else "")
        if name not in self.ledger.releases:
            faults.reached("ledger")
            self.ledger.record(name, agreed.charge(self.run.budget, self.run.honest_fraction, excluded))
            faults.reached("charged")

    def unacknowledged(self) -> list[tuple[int, int, Action]]:
        """Batches learned from, by number and attempt, whose release the shuffler may delete.

        The next batch is announced when one is learned from: where there is none, that was the last.
        """
        rows = self._db.execute(
            "SELECT number, attempt, number = (SELECT MAX(number) FROM batches) FROM batches "
            "WHERE noisy IS NOT NULL AND acknowledged = 0 ORDER BY number"
        )
        return [(number, attempt, Action.finish if last else Action.scrub) for number, attempt, last in rows]

    def acknowledged(self, number: int) -> None:
        """The shuffler has deleted this release."""
        with database.transaction(self._db):
            self._db.execute("UPDATE batches SET acknowledged = 1 WHERE number = ?", (number,))

    # What can be shown.

    @property
    def records(self) -> list[BatchRecord]:
        """Every batch learned from, in order."""
        return self._records("ORDER BY number")

    @property
    def last_record(self) -> BatchRecord:
        """The batch learned from last; `records` would read all before it, too."""
        (record,) = self._records("ORDER BY number DESC LIMIT 1")
        return record

    def _records(self, order: str) -> list[BatchRecord]:
        rows = self._db.execute(
            f"SELECT announcement, noisy, messages, invalid FROM batches WHERE noisy IS NOT NULL {order}"
        )
        records = []
        for signed, noisy, messages, invalid in rows:
            agreed = agreement.parse_announcement(wire.decode(Signed, signed).payload)
            batch, noise = _counted(agreed, 0 if agreed.transport == Transport.tags else invalid)
            values, variance_range = np.frombuffer(noisy).copy(), self._variance_range(agreed, batch)
            by = agreed.source.name
            records.append(BatchRecord(batch, agreed.transport, by, noise, values, variance_range, messages, invalid))
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
        """What every user of the run is guaranteed: all that its budget allows, as some batch may cost as much."""
        excludable = 0.0 if self.run.transport == "tags" else self.run.excludable
        certificate = self.run.mechanism(excludable).certificate(self.learner.widest_query)
        if self.run.transport == "tags":
            return certificate
        what, noise = "one count per family and step", "; noise by shuffler and coordinator, each enough alone"
        if self.run.noise == "users":
            what, noise = "counts of one-bit messages with Poisson noise tags", ""
        sums = f"{what}, added up under masks per batch, up to {excludable:g} of the reports left out{noise}"
        mechanism = sums if self.run.transport == "sums" else f"{certificate.mechanism}; or {sums}"
        if self.run.noise == "servers":
            return replace(certificate, mechanism=mechanism)
        others = [name for name in certificate.assumptions if self.run.transport == "auto" or name != "honest shuffler"]
        return replace(certificate, mechanism=mechanism, assumptions=(*others, "adding shuffler"))

    def problem(self, reason: Exception) -> ProblemError:
        """What went wrong here, as what it is: refused by the shuffler, by the disk, or anything else."""
        if isinstance(reason, ProblemError):
            return reason
        if isinstance(reason, sqlite3.Error | OSError):
            reason = database.explained(reason, self._path)
        if isinstance(reason, StorageError):
            return ProblemError(Reason.storage, str(reason))
        return ProblemError(Reason.failed, f"{type(reason).__name__}: {reason}")

    def close(self) -> None:
        """Let go of the files and workers."""
        self._opener.close()
        self.ledger.close()
        self._db.close()


def _counted(agreed: Agreement, excluded: int) -> tuple[Batch, Noise]:
    """The batch with the users who were counted, and the noise on their counts."""
    batch = replace(agreed.batch, users=agreed.batch.users - excluded)
    return batch, agreed.source.noise(batch.users)


def _differences(old: str, new: str) -> str:
    """Which settings of two runs differ, and how."""
    was, now = _settings(old), _settings(new)
    return ", ".join(
        f"{name} was {json.dumps(was.get(name))} and is {json.dumps(now.get(name))} now"
        for name in sorted(was | now)
        if was.get(name) != now.get(name)
    )


def _settings(identity: str) -> dict[str, Any]:
    """What `Run.identity` holds, by the names that the settings have."""
    settings = json.loads(identity)
    parameters = {f"learner_parameters.{name}": value for name, value in settings.pop("parameters").items()}
    return {**settings.pop("problem"), **parameters, **settings}
