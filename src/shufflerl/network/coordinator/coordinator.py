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

import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.counts import Batch, Release
from shufflerl.errors import ContractError, ShuffleRLError, StateMismatchError, StorageError
from shufflerl.learners.base import Learner
from shufflerl.mdp import Mixture
from shufflerl.network import faults
from shufflerl.network.coordinator.opening import Opener
from shufflerl.network.coordinator.run import Run, differences
from shufflerl.network.coordinator.store import Answer, RunStore, Secrets
from shufflerl.network.protocol import agreement, costs, crypto, masking, sources, wire
from shufflerl.network.protocol.agreement import Agreement, NoiseBy
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import Action, Command, Exclusion, ProblemError, Reason, Signed, Transport
from shufflerl.noise import Noise
from shufflerl.policies import Table
from shufflerl.privacy.certificate import Certificate
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.protocol import noise_counts


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
        self.store = RunStore(folder / "coordinator.db")
        try:
            self.task = self._begin(folder)
            if self.store.tally()[0] and not (folder / "ledger.db").exists():
                raise StorageError(
                    f"{folder} has batches that were learned from but no ledger.db, which says what they cost. Restore "
                    "that of the stopped run from a backup, or begin another run in another folder."
                )
        except BaseException:
            self.store.close()
            raise
        self.ledger = Ledger(self.task.hex(), run.budget, folder / "ledger.db")
        self.learner = self._restored()

    def _begin(self, folder: Path) -> bytes:
        """A new run, or the one in this folder; refuse to continue one with other settings."""
        with self.store.transaction():
            known = self.store.value("identity")
            if known is None:
                self.store.keep("identity", self.run.identity)
                self.store.keep("task", secrets.token_bytes(wire.TASK_BYTES))
                self._plan(self.run.make_learner())
        if known not in (None, self.run.identity):
            raise StateMismatchError(
                f"The run in {folder} was begun with other settings: {differences(known, self.run.identity)}. Start it "
                "with its own, or use another folder for another run."
            )
        return bytes(self.store.value("task"))

    def _restored(self) -> Learner:
        learner = self.run.make_learner()
        learner.restore(self.store.value("learner"))
        return learner

    def _plan(self, learner: Learner) -> None:
        """Within a transaction: store the learner and announce what it asks for."""
        batch = learner.next_batch()
        self.store.keep("learner", learner.save())
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

    def _announce(self, batch: Batch, attempt: int) -> None:
        late = attempt - self.store.wasted.count(batch.index)  # that others filled it is no reason to draw more
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
            task=self.store.value("task"),
            attempt=attempt,
            tag_key=key.public_key().public_bytes_raw(),
            transport=transport,
            excludable=excludable,
            problem=self.run.problem,
            drawn=self.run.drawn(batch.users, self.store.played_before(batch.index), late),
        )
        signed = self.identity.sign(announcement)
        # What everybody would refuse is not stored, and so not announced.
        own = agreement.parse_announcement(signed.payload).source.own
        # Drawn here, once, so that whatever fails later fails again: noise drawn until all goes well has another law.
        drawn = None if own is None else noise_counts(own, batch.query.size)
        secret = Secrets(key.private_bytes_raw(), drawn, None)
        self.store.announce(batch.index, attempt, batch.users, signed, secret)

    # What is asked of the shuffler.

    @property
    def pending(self) -> tuple[int, int, Signed] | None:
        """The batch to be answered: its number, attempt and announcement; None when the run is over."""
        return self.store.pending

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
        with self.store.transaction():
            if filled:
                self.store.waste(waiting.index)
            self._announce(waiting, pending[1] + 1)
        self.store.erase()

    @property
    def exclusion(self) -> Signed | None:
        """Which seeds of the pending batch cannot be opened; None while they have not been looked at."""
        pending = self.pending
        if pending is None or (positions := self.store.excluded(pending[0])) is None:
            return None
        return self.identity.sign(Exclusion(task=self.task, batch=pending[0], attempt=pending[1], positions=positions))

    def open_seeds(self, chunks: Iterable[bytes]) -> None:
        """Open the sealed seeds of the pending batch, and store them and which cannot be opened."""
        number, agreed, secret = self._asked()
        opened = self._opener.seeds(secret.key, agreed.seed_info, chunks)
        if len(opened) != agreed.batch.users:
            raise ContractError(
                f"The shuffler hands over {len(opened)} seeds of batch {number}; expected {agreed.batch.users}. "
                "Nothing is excluded, and nothing is summed."
            )
        excluded = [position for position, seed in enumerate(opened) if seed is None]
        seeds = b"".join(seed for seed in opened if seed is not None)
        with self.store.transaction():
            self.store.keep_seeds(number, seeds, excluded)
            faults.reached("seeds opened")

    def _asked(self) -> tuple[int, Agreement, Secrets]:
        """The pending batch's number, agreement and secrets."""
        pending = self.pending
        if pending is None:
            raise ContractError("No batch is waiting for an answer; a release is learned from once.")
        number, _, signed = pending
        secret = self.store.secrets(number)
        assert secret is not None
        return number, agreement.parse_announcement(signed.payload), secret

    def absorb(self, chunks: Iterable[bytes]) -> None:
        """Charge the ledger, then open the release of the pending batch, learn from it and announce the next."""
        number, agreed, secret = self._asked()
        excluded = len(self.store.excluded(number) or ())
        batch, noise = _counted(agreed, excluded)
        self._charge(agreed, excluded)
        faults.reached("open")
        if agreed.transport == Transport.sums:
            noisy = self._unmasked(number, agreed, secret.seeds, chunks)
            messages, invalid = agreed.batch.users, excluded
        else:
            noisy, messages, invalid = self._opened(number, agreed, secret.key, chunks)
        values = agreed.source.values(noisy, batch.users)
        try:
            with self.store.transaction():
                waiting = self.learner.next_batch()
                assert waiting is not None
                released = replace(waiting, users=batch.users)
                self.learner.observe(
                    Release(released, values, noise, noise.variance, self._variance_range(agreed, batch))
                )
                self._plan(self.learner)
                self.store.answer(number, values, messages, invalid, self._outcome(waiting.mixture))
                faults.reached("learner save")
            faults.reached("saved")
        except BaseException:
            self.learner = self._restored()  # what was not stored was not learned
            raise
        self.store.erase()

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

    def _own_noise(self, number: int, agreed: Agreement) -> IntArray:
        """What the coordinator itself adds to the counters of a batch."""
        if agreed.source.own is None:
            return np.zeros(agreed.query.size, dtype=np.int64)
        secret = self.store.secrets(number)
        if secret is None or secret.own is None:
            raise StorageError(
                f"The coordinator's noise for batch {number} was announced and is not stored: its database is damaged. "
                "Nothing was learned; begin another run in another folder."
            )
        return secret.own

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

    def _unmasked(self, number: int, agreed: Agreement, seeds: bytes | None, chunks: Iterable[bytes]) -> IntArray:
        """The counts in a masked sum with the coordinator's noise; impossible ones are asked again, of other users.

        Whether they are is seen by all, so that it must be told from the noisy counts alone.
        """
        counters, size = agreed.query.size, agreed.word_bytes
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

    # What can be shown.

    @property
    def records(self) -> list[BatchRecord]:
        """Every batch learned from, in order."""
        return [self._record(answer) for answer in self.store.answers()]

    @property
    def last_record(self) -> BatchRecord:
        """The batch learned from last; `records` would read all before it, too."""
        (answer,) = self.store.answers(last=True)
        return self._record(answer)

    def _record(self, answer: Answer) -> BatchRecord:
        agreed = agreement.parse_announcement(answer.announcement.payload)
        batch, noise = _counted(agreed, 0 if agreed.transport == Transport.tags else answer.invalid)
        return BatchRecord(
            batch=batch,
            transport=agreed.transport,
            noise_by=agreed.source.name,
            noise=noise,
            values=answer.values,
            variance_range=self._variance_range(agreed, batch),
            messages=answer.messages,
            invalid=answer.invalid,
        )

    @property
    def policy(self) -> Mixture | None:
        """What was deployed last: at the end of a run, what was learned."""
        return self.learner.deployed

    def certificate(self) -> Certificate:
        """What every user of the run is guaranteed."""
        return self.run.certificate(self.learner.widest_query)

    def problem(self, reason: Exception) -> ProblemError:
        """What went wrong here, as what it is: refused by the shuffler, by the disk, or anything else."""
        if isinstance(reason, ProblemError):
            return reason
        reason = self.store.explained(reason)
        if isinstance(reason, StorageError):
            return ProblemError(Reason.storage, str(reason))
        return ProblemError(Reason.failed, f"{type(reason).__name__}: {reason}")

    def close(self) -> None:
        """Let go of the files and workers."""
        self._opener.close()
        self.ledger.close()
        self.store.close()


def _counted(agreed: Agreement, excluded: int) -> tuple[Batch, Noise]:
    """The batch with the users who were counted, and the noise on their counts."""
    batch = replace(agreed.batch, users=agreed.batch.users - excluded)
    return batch, agreed.source.noise(batch.users)
