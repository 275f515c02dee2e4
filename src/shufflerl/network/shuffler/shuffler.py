"""The shuffler without sockets: a state machine over a store, a clock and keys.

It knows where a report came from and when, and cannot read it: tags are sealed to the coordinator. It hands the
coordinator all tags of a batch at once, each group's in a uniformly random order, and nothing else about any report.
Where the servers add the noise its dummies are among them; they are sealed while the batch fills (see `dummies`).

A batch is `open` until exactly `users` valid reports are in, then `sealed`: membership is frozen. Its envelopes are
opened, all tags permuted with the operating system's random source and stored as the release, and in the same
transaction reports, dummies and key are deleted: `released`. Once the coordinator says that it has learned from the
release, that is deleted too: `scrubbed`, or `finished` if it was the run's last. A batch that does not fill in time is
given more, or `aborted`; never released short.
Masked vectors are not permuted but added up; see `summing`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shufflerl import checks
from shufflerl.errors import ContractError, StorageError
from shufflerl.network import faults
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement, parse_announcement
from shufflerl.network.protocol.crypto import SigningKey, VerifyKey
from shufflerl.network.protocol.wire import (
    Announcement,
    BatchStatus,
    Command,
    Exclusion,
    OpenBatch,
    Opening,
    Outcome,
    ProblemError,
    Reason,
    Report,
    Signed,
    State,
    Transport,
    Verdict,
)
from shufflerl.network.shuffler import dummies, mixing, summing
from shufflerl.network.stores.store import BatchId, BatchRow, Store

#: Seconds after an upload that could not be stored until another may be tried.
FORGIVING = 30.0


@dataclass(frozen=True)
class Limits:
    """What the shuffler's operator allows.

    `min_batch_size`: the fewest users that are mixed, whoever is excluded. `max_messages`: the longest report;
    `max_dummies`: how many dummies may be expected of the shuffler for a batch. `timeout`: seconds after which a batch
    that has not filled is given as many again ("extend") or its reports are deleted unread ("abort").
    """

    min_batch_size: int = 100
    max_messages: int = 100_000
    timeout: float = 3600.0
    when_late: Literal["extend", "abort"] = "extend"
    max_dummies: int = 10_000_000

    def __post_init__(self) -> None:
        checks.whole("min_batch_size", self.min_batch_size, least=1)
        checks.whole("max_messages", self.max_messages, least=1)
        checks.real("timeout", self.timeout, above=0)
        checks.choice("when_late", self.when_late, ("extend", "abort"))
        checks.whole("max_dummies", self.max_dummies, least=0)


class Shuffler:
    """Not to be used by two threads at once."""

    def __init__(
        self,
        store: Store,
        identity: SigningKey,
        coordinator: VerifyKey,
        enrolment: VerifyKey,
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: Counter[Reason] = Counter()
        self.accepted = 0
        self.release_seconds: list[float] = []  # of each batch released here, from its seal
        self._sealed: dict[BatchId, float] = {}  # when each was seen to be
        self._unstored: str | None = None  # why announcements or reports cannot be stored
        self._unstored_at = 0.0
        self._unreleased: str | None = None  # why batches do not advance
        self._store = store
        self._identity = identity
        self._coordinator = coordinator
        self._enrolment = enrolment
        self._limits = limits
        self._clock = clock
        self._unerased = True
        self._unfinished: set[BatchId] = set()
        self._missing: dict[BatchId, dict[int, None]] = {}  # slices of dummies not known to be stored, in order
        self.key_of = functools.lru_cache(maxsize=8)(self._load_key)

    @property
    def trouble(self) -> str | None:
        """Why the shuffler cannot do its work; None while it can.

        What cannot be stored is trouble until something is, or for a while: who is sent nothing could not find out.
        """
        return self._unstored or self._unreleased

    # What the coordinator asks.

    def announce(self, signed: Signed) -> BatchStatus:
        """Open the batch of a signed announcement. Asked again, it says how that batch is doing."""
        announcement = self._coordinator.verify(Announcement, signed)
        agreement = parse_announcement(signed.payload)
        id = BatchId(announcement.task, announcement.batch, announcement.attempt)
        if (there := self._store.get(id)) is None:
            last = self._store.latest(announcement.task)
            self._check_order(announcement, last)
            self._check_limits(agreement)
            if last is not None and last.state == State.released and last.id.number == announcement.batch:
                self._unerased = True  # as in `scrub`
                self._store.scrub(last.id)  # announced again, so it was of no use
            key = crypto.new_box_key()
            opening = Opening(announcement=agreement.digest, envelope_key=key.public_key().public_bytes_raw())
            row = BatchRow(
                id=id,
                users=announcement.users,
                announcement=wire.encode(signed),
                opening=wire.encode(self._identity.sign(opening)),
                deadline=self._clock() + self._limits.timeout,
            )
            with self._noting_storage():
                there = self._store.create(row, key.private_bytes_raw())
        if wire.decode(Signed, there.announcement).payload != signed.payload:
            raise ProblemError(
                Reason.conflict,
                f"Batch {announcement.batch} was announced with other contents; a batch is announced once.",
            )
        return self._status(there)

    def _check_order(self, announcement: Announcement, last: BatchRow | None) -> None:
        """One batch at a time, each after the one before, so that no user's run is split into smaller sets."""
        if last is None:
            wanted = (0, 0)
        elif last.state == State.finished:
            raise ProblemError(
                Reason.conflict, f"The run is over: its coordinator said that batch {last.id.number} was the last."
            )
        elif last.state == State.aborted:
            wanted = (last.id.number, last.id.attempt + 1)
        elif last.state in (State.released, State.scrubbed):
            # A sum may have been withheld or spoilt; the batch is then asked again, of users who have not taken part.
            again = announcement.batch == last.id.number and self._agreement(last).transport == Transport.sums
            wanted = (last.id.number, last.id.attempt + 1) if again else (last.id.number + 1, 0)
        else:
            raise ProblemError(
                Reason.conflict, f"Batch {last.id.number} is {last.state}; the next one is announced after its release."
            )
        if (announcement.batch, announcement.attempt) != wanted:
            raise ProblemError(
                Reason.conflict,
                f"Batch {announcement.batch}, attempt {announcement.attempt}, was announced; batch {wanted[0]}, "
                f"attempt {wanted[1]}, comes next.",
            )

    def _check_limits(self, agreement: Agreement) -> None:
        announcement = agreement.announcement
        if agreement.min_users < self._limits.min_batch_size:
            less = f", of whom {announcement.excludable} may be excluded" if announcement.excludable else ""
            raise ProblemError(
                Reason.below_minimum,
                f"The batch asks {announcement.users} users{less}; this shuffler mixes at least "
                f"{self._limits.min_batch_size} (min_batch_size). Begin a run whose learner asks more (parameter "
                "`first` or `batch`), or mix fewer.",
            )
        if agreement.max_messages > self._limits.max_messages:
            raise ProblemError(
                Reason.too_many_messages,
                f"A report of this batch may have {agreement.max_messages:,} messages; this shuffler takes at most "
                f"{self._limits.max_messages:,} (max_messages). Ask more users at once, or allow a larger epsilon.",
            )
        expected = agreement.source.expected_dummies
        if agreement.transport == Transport.tags and expected > self._limits.max_dummies:
            raise ProblemError(
                Reason.too_many_messages,
                f"The batch asks for about {expected:,.0f} dummies; this shuffler seals at most "
                f"{self._limits.max_dummies:,} (max_dummies). Ask for fewer counters, or for masked sums.",
            )

    def seeds(self, signed: Signed) -> bytes:
        """A chunk of the sealed seeds of a sealed batch: the same bytes whenever it is asked for, until the release."""
        command, batch = self._commanded(signed, wire.Action.seeds)
        seeds = summing.seeds(self._store, batch.id, command.chunk)
        if seeds is None:
            raise ProblemError(
                Reason.not_released, f"Batch {command.batch} is {batch.state}; seeds {command.chunk} are not there."
            )
        return seeds

    def exclude(self, signed: Signed) -> BatchStatus:
        """Be told which seeds cannot be opened; once, the first stands. What is left is summed at the next look."""
        exclusion = self._coordinator.verify(Exclusion, signed)
        batch = self._found(BatchId(exclusion.task, exclusion.batch, exclusion.attempt))
        if self._agreement(batch).transport != Transport.sums:
            raise ProblemError(Reason.conflict, f"Batch {exclusion.batch} is of tags, of which none is excluded.")
        if batch.state in (State.open, State.sealed):  # later it is known to have been said
            try:
                summing.exclude(self._store, batch.id, batch.users, exclusion.positions)
            except ContractError as reason:  # released just now, by another process
                raise ProblemError(Reason.conflict, str(reason)) from None
        return self._status(self._found(batch.id))

    def collect(self, signed: Signed) -> bytes:
        """A chunk of a release: the same bytes whenever it is asked for, until it is scrubbed."""
        command, batch = self._commanded(signed, wire.Action.collect)
        if batch.state in (State.scrubbed, State.finished):
            raise ProblemError(Reason.gone, f"Batch {command.batch} was scrubbed when the coordinator had it.")
        tags = self._store.chunk(batch.id, command.chunk)
        if tags is None:
            raise ProblemError(
                Reason.not_released,
                f"Batch {command.batch} is {batch.state} with {batch.accepted} of {batch.users} reports and "
                f"{batch.chunks} chunks; chunk {command.chunk} is not there.",
            )
        return tags

    def scrub(self, signed: Signed) -> BatchStatus:
        """Delete a release that the coordinator has made use of; told that it was the last one, remember that."""
        command, batch = self._commanded(signed, wire.Action.scrub, wire.Action.finish)
        last = command.action == wire.Action.finish
        if last and self._latest(command.task).id != batch.id:
            raise ProblemError(Reason.conflict, f"Batch {command.batch} is not the last that was announced.")
        self._unerased = True  # until it is erased too; if that fails here, it is tried again at the next look
        try:
            self._store.scrub(batch.id, last=last)
        except ContractError as reason:
            raise ProblemError(Reason.not_released, str(reason)) from None
        return self._status(self._found(batch.id))

    def _commanded(self, signed: Signed, *actions: wire.Action) -> tuple[Command, BatchRow]:
        command = self._coordinator.verify(Command, signed)
        if command.action not in actions:
            raise ProblemError(Reason.malformed, f"The command says {command.action}, the address {actions[0]}.")
        return command, self._found(BatchId(command.task, command.batch, command.attempt))

    # What nodes ask.

    def current(self, task: bytes) -> OpenBatch:
        """The run's last announced batch, with the shuffler's key for it and, if users are drawn, its extensions."""
        batch = self._latest(task)
        opening = wire.decode(Signed, batch.opening)
        if batch.extensions and self._agreement(batch).drawn < 1:
            extended = msgspec.structs.replace(wire.decode(Opening, opening.payload), extensions=batch.extensions)
            opening = self._identity.sign(extended)
        return OpenBatch(announcement=wire.decode(Signed, batch.announcement), opening=opening)

    def status(self, task: bytes) -> BatchStatus:
        """How the run's last batch is doing."""
        return self._status(self._latest(task))

    def upload(self, task: bytes, uploads: Sequence[tuple[int, int, Report]]) -> list[Outcome]:
        """Take reports, each with the batch and attempt it is for; one transaction for each batch among them."""
        outcomes: dict[int, Outcome] = {}
        valid: dict[BatchId, list[int]] = {}
        for place, (number, attempt, report) in enumerate(uploads):
            id = BatchId(task, number, attempt)
            try:
                self._check_report(id, report)
                valid.setdefault(id, []).append(place)
            except ProblemError as problem:
                outcomes[place] = self._refusal(report.report_id, problem)
        for id, places in valid.items():
            reports = [(uploads[place][2].report_id, uploads[place][2].envelope) for place in places]
            for place, (report_id, _), reason in zip(places, reports, self._add(id, reports), strict=True):
                if reason is None:
                    self.accepted += 1
                    outcomes[place] = Outcome(report_id, Verdict.accepted)
                else:
                    outcomes[place] = self._refusal(report_id, ProblemError(reason, _WHY_NOT[reason]))
        return [outcomes[place] for place in range(len(uploads))]

    def _add(self, id: BatchId, reports: Sequence[tuple[bytes, bytes]]) -> list[Reason | None]:
        with self._noting_storage():
            return self._store.add(id, reports)

    @contextlib.contextmanager
    def _noting_storage(self) -> Iterator[None]:
        """Note whether what others sent could be stored."""
        try:
            yield
        except StorageError as reason:
            self._unstored, self._unstored_at = str(reason), self._clock()
            raise
        self._unstored = None

    def _refusal(self, report_id: bytes, problem: ProblemError) -> Outcome:
        self.refused[problem.reason] += 1
        verdict = Verdict.duplicate if problem.reason == Reason.duplicate else Verdict.refused
        return Outcome(report_id, verdict, problem.problem)

    def _check_report(self, id: BatchId, report: Report) -> None:
        """Refuse a report that could not be mixed: only valid ones count towards the batch."""
        batch = self._store.get(id)
        if batch is None:
            raise ProblemError(Reason.unknown_batch, f"There is no batch {id.number}, attempt {id.attempt}, here.")
        agreement, size = self._agreement(batch), len(report.envelope)
        if size != agreement.envelope_bytes:
            raise ProblemError(
                Reason.malformed,
                f"The envelope has {size} bytes; every one of this batch has {agreement.envelope_bytes}.",
            )
        key = self.key_of(id)
        if key is None:
            return  # closed for good: the store says whether it was in, or is late
        token, _ = mixing.opened(agreement, key, report.report_id, report.envelope)
        if not crypto.enrolled(self._enrolment, token) or crypto.report_id(id.task, token) != report.report_id:
            raise ProblemError(Reason.unauthorized, "The token in the envelope was not issued here for this report.")
        envelope_key = key.public_key().public_bytes_raw()
        if not agreement.draws(envelope_key, token, batch.extensions):
            now = self._latest(id.task)  # another process with the same store may just have given the batch more time
            if now.id == id and agreement.draws(envelope_key, token, now.extensions):
                return
            raise ProblemError(
                Reason.not_drawn,
                f"Of all tokens {agreement.drawn:.2g} are drawn for batch {id.number}, and this one is not; it is not "
                "spent. Wait for the next batch.",
            )

    # Its own noise.

    def next_dummies(self) -> tuple[BatchId, bytes, int] | None:
        """A slice of dummies that is not stored yet: its batch, the announcement and its number; None if all are.

        Asked again it tells another, and comes back to this one if that is never added.
        """
        for batch in self._store.unfinished():
            missing = self._missing_dummies(batch)
            while missing:
                number = next(iter(missing))
                del missing[number]
                if self._store.kept(batch.id, dummies.name(number)) is None:  # else another process was faster
                    missing[number] = None
                    return batch.id, wire.decode(Signed, batch.announcement).payload, number
        return None

    def add_dummies(self, id: BatchId, number: int, tags: bytes) -> None:
        """Store a slice of dummies; the first that is stored stands. Of a batch that is over they are thrown away."""
        with contextlib.suppress(ContractError):
            dummies.keep(self._store, id, number, tags)
        self._missing.get(id, {}).pop(number, None)

    def seal_dummies(self) -> None:
        """Seal all dummies that are missing, here and now."""
        while (job := self.next_dummies()) is not None:
            id, payload, number = job
            self.add_dummies(id, number, dummies.sealed(payload, number))

    def _missing_dummies(self, batch: BatchRow) -> dict[int, None]:
        if batch.id not in self._missing:
            self._missing[batch.id] = dict.fromkeys(dummies.missing(self._store, batch.id, self._agreement(batch)))
        return self._missing[batch.id]

    # What time and full batches ask.

    def advance(self, *, seal: bool = True) -> bool:
        """Release what is sealed, extend or abort what is overdue. Safe to call at any time; says if all went well.

        A batch is released once its dummies are stored: they are sealed here, unless somebody else does that.
        Trouble with the disk is told by `trouble` and tried again at the next call.
        """
        if self._unstored is not None and self._clock() - self._unstored_at > FORGIVING:
            self._unstored = None
        try:
            if self._unerased:
                self._store.erase()
                self._unerased = False
            unfinished = self._store.unfinished()
            if {batch.id for batch in unfinished} != self._unfinished:
                self._unfinished = {batch.id for batch in unfinished}
                self._missing = {id: left for id, left in self._missing.items() if id in self._unfinished}
                self.key_of.cache_clear()
            if seal and any(batch.state == State.sealed for batch in unfinished):
                self.seal_dummies()
            for batch in unfinished:
                if batch.state == State.sealed:
                    sealed = self._sealed.setdefault(batch.id, self._clock())
                    self._unerased = True
                    if self._release(batch):
                        self.release_seconds.append(self._clock() - sealed)
                        del self._sealed[batch.id]
                    self._unerased = False
                elif self._clock() >= batch.deadline:
                    self._overdue(batch)
            self._unreleased = None
        except StorageError as reason:
            self._unreleased = str(reason)
        except Exception as reason:
            self._unreleased = f"{type(reason).__name__}: {reason}"
            raise
        return self._unreleased is None

    def _overdue(self, batch: BatchRow) -> None:
        if self._limits.when_late == "extend":
            self._store.extend(batch.id, self._clock() + self._limits.timeout, before=batch.deadline)
        else:
            self._unerased = True
            self._store.abort(batch.id)
            self._unerased = False
            self.key_of.cache_clear()

    def _release(self, batch: BatchRow) -> bool:
        """Bring a sealed batch on, by a transport of its own; says if it is released."""
        agreement = self._agreement(batch)
        if self._missing_dummies(batch):
            return False
        bring_on = summing.released if agreement.transport == Transport.sums else mixing.mixed
        key = self.key_of(batch.id)
        try:
            if key is None:
                raise StorageError(f"The key of sealed batch {batch.id.number} is missing; begin another run.")
            chunks = bring_on(self._store, batch, agreement, key)
            if chunks is None:
                return False
            faults.reached("permute")
            self._store.release(batch.id, chunks)
        except (ContractError, StorageError):
            now = self._store.get(batch.id)
            if now is None or now.state == State.sealed:
                raise
            # Another process with the same store has released it meanwhile; or this one, and could not erase the rest.
            self._store.erase()
        self.key_of.cache_clear()
        return True

    # Looking up.

    def expected_dummies(self) -> float:
        """How many dummies unfinished batches ask for, about."""
        agreements = [self._agreement(batch) for batch in self._store.unfinished()]
        return sum(said.source.expected_dummies for said in agreements if said.transport == Transport.tags)

    def unfinished(self) -> list[BatchStatus]:
        """Batches that are open or sealed."""
        return [self._status(batch) for batch in self._store.unfinished()]

    def _agreement(self, batch: BatchRow) -> Agreement:
        return parse_announcement(wire.decode(Signed, batch.announcement).payload)

    def _load_key(self, id: BatchId) -> X25519PrivateKey | None:
        raw = self._store.key(id)
        return None if raw is None else crypto.box_key(raw)

    def _latest(self, task: bytes) -> BatchRow:
        batch = self._store.latest(task)
        if batch is None:
            raise ProblemError(Reason.unknown_batch, "No batch of this task has been announced here.")
        return batch

    def _found(self, id: BatchId) -> BatchRow:
        batch = self._store.get(id)
        if batch is None:
            raise ProblemError(Reason.unknown_batch, f"There is no batch {id.number}, attempt {id.attempt}, here.")
        return batch

    def _status(self, batch: BatchRow) -> BatchStatus:
        return BatchStatus(
            batch=batch.id.number,
            attempt=batch.id.attempt,
            state=batch.state,
            users=batch.users,
            accepted=batch.accepted,
            chunks=batch.chunks,
            extensions=batch.extensions,
            seconds_left=max(0.0, batch.deadline - self._clock()),
        )


_WHY_NOT = {
    Reason.duplicate: "These very bytes are in already; they count once.",
    Reason.replayed: "A report of this token was accepted in this run before; a user takes part once.",
    Reason.late: "The batch is full or over; this report was not stored and will not be counted.",
}
