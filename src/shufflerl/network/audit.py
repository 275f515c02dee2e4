"""The networked system as the audit plays it: every role's own code, in one process without sockets.

The user who is replaced is a device of its own (`node.take_part`), the others are a fleet's (`composing.compose`).
Their reports go to a `Shuffler` with its store in memory, what it releases goes to a `Coordinator` in a folder that is
deleted afterwards, and what its learner is given is judged. The auditor has all keys and both servers' books: it opens
every report and dummy and finds every sealed message again in the release. Where the servers add the noise it also
lies: a report of two tags in a group must be refused, and a tag of another group must count nowhere.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shufflerl.arrays import IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import ContractError, PrivacyWarning
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.mdp import Problem
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.opening import Counted, Opener
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node import composing, node
from shufflerl.network.node.reporting import Checked, Invitation, check_signatures
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, NoiseBy, Terms, parse_announcement
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.sources import Servers, Users
from shufflerl.network.protocol.wire import Action, Outcome, Report, Signed, Transport, Verdict
from shufflerl.network.shuffler import dummies, mixing
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import BatchId, BatchRow, SQLiteStore
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import Finding, ServersSession, Session, System, Transcript, UsersSession
from shufflerl.privacy.audit.bench import Bench, unequal
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.protocol import Protocol

#: Batches of a run; after them another begins, with other keys.
BATCHES = 50


class Network(System):
    """The networked system with one of its transports, noise by users or by the servers.

    Its problem has one action, so that what users do depends on no policy, and half as many counters. Where every tag
    is sealed epsilon is larger unless told otherwise: the same code draws less noise, and there is less to seal.
    """

    problem = Problem(horizon=2, n_states=2, n_actions=1, episodes=1)

    def __init__(self, transport: Literal["tags", "sums"], noise: NoiseBy = "users") -> None:
        self._transport, self._noise = transport, noise
        self.path = transport if noise == "users" else f"servers-{transport}"
        self.samples = 100
        self.epsilon = 4.0 if transport == "tags" else 1.0
        how = {"tags": "sealed tags, shuffler, mixing, opening", "sums": "masked vectors, shuffler, summing, unmasking"}
        self.attacked = f"a node and a fleet's workers, {how[transport]} and coordinator, noise by {noise}"

    @contextmanager
    def begin(self, budget: Budget, users: int, query: CountQuery) -> Iterator[Session]:
        """See `System`."""
        with running(self._transport, budget, users, query, self._noise) as current:
            declared = current().agreed.source

            def play(trajectories: Sequence[Trajectories]) -> Transcript:
                return current().play(trajectories)

            if isinstance(declared, Users):
                yield UsersSession(query, users, play, protocol=Protocol(query, users, declared.law))
            else:
                assert isinstance(declared, Servers)
                lie = None if self._transport == "sums" else lambda: lies(current(), Bench(query))
                yield ServersSession(query, users, play, lie, dummies=declared.dummies, own=declared.own)


@contextmanager
def running(
    transport: Literal["tags", "sums"], budget: Budget, users: int, query: CountQuery, noise: NoiseBy
) -> Iterator[Callable[[], AuditRun]]:
    """Runs, one after the other: the current one has a batch to be played."""
    # There is nothing to keep, so no disk to wait for.
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shufflerl-audit-", dir=in_memory) as folder:
        runs: list[AuditRun] = []

        def current() -> AuditRun:
            if not runs or runs[-1].coordinator.pending is None:
                if runs:
                    runs[-1].coordinator.close()
                runs.append(
                    AuditRun(
                        folder=Path(folder, str(len(runs))),
                        transport=transport,
                        budget=budget,
                        users=users,
                        query=query,
                        noise=noise,
                    )
                )
            return runs[-1]

        try:
            yield current
        finally:
            if runs:
                runs[-1].coordinator.close()


class Scripted:
    """An environment in which it is written down what happens, whatever is done."""

    def __init__(self, episode: Trajectories) -> None:
        self._states, self._rewards = episode.states[0].tolist(), episode.rewards[0].tolist()
        self._step = 0

    def reset(self) -> tuple[int, dict[str, Any]]:
        """Begin at the first state."""
        self._step = 0
        return self._states[0], {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go on to the next one."""
        reward = float(self._rewards[self._step])
        self._step += 1
        over = self._step == len(self._states)
        return self._states[self._step - over], reward, over, False, {}


@dataclass(frozen=True, kw_only=True)
class _Asking(Run):
    """A run whose learner asks for these counters, batch after batch."""

    query: CountQuery

    def make_learner(self) -> Learner:
        learner = super().make_learner()
        assert isinstance(learner, UCBVI)
        learner.query = self.query
        return learner


class AuditRun:
    """A coordinator, a shuffler and as many devices as a batch asks for."""

    def __init__(
        self,
        folder: Path,
        transport: Literal["tags", "sums"],
        budget: Budget,
        users: int,
        query: CountQuery,
        noise: NoiseBy,
    ) -> None:
        all_that_comes = 10**9
        problem = Problem(query.horizon, query.n_states, query.n_actions, BATCHES * users)
        with warnings.catch_warnings(action="ignore", category=PrivacyWarning):  # there is nobody to protect
            run = _Asking(
                problem,
                "ucbvi",
                budget,
                0,
                {"batch": users},
                transport=transport,
                excludable=0.0,
                noise=noise,
                query=query,
            )
        folder.mkdir()
        self.opener, self.store = _Opener(), _Store(None)
        self.coordinator = Coordinator(folder, run, self.opener)
        key, identity, self.enrolment = self.coordinator.identity.public, _new_identity(), _new_identity()
        limits = Limits(min_batch_size=users, max_messages=all_that_comes, max_dummies=all_that_comes)
        self.shuffler = Shuffler(self.store, identity, key, self.enrolment.public, limits)
        self._invitation = Invitation(self.coordinator.task, "http://unused", key, identity.public)
        self._terms = Terms(budget, min_batch_size=users, max_messages=all_that_comes)

    def play(self, trajectories: Sequence[Trajectories]) -> Transcript:
        """One batch, from its announcement to what the learner is given."""
        checked, reports = self.filled(trajectories)
        own, before = self.own_noise(), self.coordinator.learner.episodes_played
        release = self.released(checked)
        self.learn(release)
        if self.coordinator.learner.episodes_played - before != len(reports):
            raise ContractError("The learner was not given the batch once.")
        bodies = self.opened(checked, reports)
        summed = checked.agreement.transport == Transport.sums
        read = (self._sums if summed else self._tags)(checked.agreement, bodies, release)
        keys = [checked.envelope_key, checked.agreement.announcement.tag_key, *(one.envelope[:32] for one in reports)]
        return replace(
            read,
            estimates=self.coordinator.last_record.values,
            own=own,
            sizes=[len(report.envelope) for report in reports],
            once=[*keys, *read.once],
        )

    def announced(self) -> tuple[Checked, bytes]:
        """The pending batch, announced, as nodes and as fleets have it."""
        self.shuffler.announce(self._pending[2])
        batch = self.shuffler.current(self.coordinator.task)
        return check_signatures(self._invitation, batch), wire.encode(batch)

    def filled(self, trajectories: Sequence[Trajectories]) -> tuple[Checked, list[Report]]:
        """Users report: the first as a device by itself, the others as those of a fleet."""
        (first, *others), (checked, batch) = trajectories, self.announced()
        reports = [self._node(checked, first), *(self._worker(batch, one) for one in others)]
        # Before anybody else looks at them: a release of reports that differ may fail for other reasons.
        if different := unequal([len(report.envelope) for report in reports]):
            raise ContractError(different)
        for outcome in self.upload(reports):
            if outcome.verdict != Verdict.accepted:
                raise ContractError(f"The shuffler did not take a report: {outcome.problem}")
        return checked, reports

    def upload(self, reports: list[Report]) -> list[Outcome]:
        """Send reports for the pending batch."""
        number, attempt, _ = self._pending
        return self.shuffler.upload(self.coordinator.task, [(number, attempt, one) for one in reports])

    def released(self, checked: Checked) -> list[bytes]:
        """Have the shuffler release a full batch, and collect that."""
        self.shuffler.advance()
        if checked.agreement.transport == Transport.sums:
            self._exclude(checked.agreement.batch.users)
        chunks = range(self.shuffler.status(self.coordinator.task).chunks)
        return [self.shuffler.collect(self._command(Action.collect, chunk)) for chunk in chunks]

    def learn(self, release: list[bytes]) -> None:
        """Let the coordinator learn from it, and the shuffler forget it."""
        scrub = self._command(Action.scrub)
        self.coordinator.absorb(release)
        self.shuffler.scrub(scrub)

    @property
    def agreed(self) -> Agreement:
        """The pending batch."""
        return parse_announcement(self._pending[2].payload)

    def own_noise(self) -> IntArray:
        """The coordinator's books: what it has drawn for the pending batch."""
        secret = self.coordinator.store.secrets(self._pending[0])
        return np.empty(0, dtype=np.int64) if secret is None or secret.own is None else secret.own

    def dummies(self, agreement: Agreement) -> list[bytes]:
        """The shuffler's books: the dummies that it has sealed for the last batch."""
        pieces = range(len(dummies.slices(agreement)))
        added = b"".join(self.store.books.get(dummies.name(piece), b"") for piece in pieces)
        return split(added, wire.SEALED_TAG_BYTES)

    def tags(self, agreement: Agreement, sealed: Iterable[bytes]) -> IntArray:
        """Open tags of the last batch."""
        key = crypto.box_key(self.opener.key)
        return row(int.from_bytes(crypto.unseal(key, agreement.tag_info, one)) for one in sealed)

    @property
    def _pending(self) -> tuple[int, int, Signed]:
        assert self.coordinator.pending is not None
        return self.coordinator.pending

    def _command(self, action: Action, chunk: int = 0) -> Signed:
        number, attempt, _ = self._pending
        return self.coordinator.command(number, attempt, action, chunk)

    def _node(self, checked: Checked, episode: Trajectories) -> Report:
        """What a device does, with its ledger in memory."""
        with Ledger("node", self._terms.budget) as ledger:
            return node.take_part(Scripted(episode), checked, self._terms, crypto.mint(self.enrolment), ledger)

    def _worker(self, batch: bytes, episode: Trajectories) -> Report:
        """What a worker of a fleet does."""
        token = crypto.mint(self.enrolment)
        return wire.decode(Report, composing.compose(Scripted(episode), {}, batch, self._invitation, token))

    def _exclude(self, users: int) -> None:
        """Have the seeds opened, and the vectors summed."""
        chunks = range(-(-users // wire.CHUNK_SEEDS))
        self.coordinator.open_seeds([self.shuffler.seeds(self._command(Action.seeds, chunk)) for chunk in chunks])
        exclusion = self.coordinator.exclusion
        assert exclusion is not None
        self.shuffler.exclude(exclusion)
        self.shuffler.advance()

    def opened(self, checked: Checked, reports: list[Report]) -> list[bytes]:
        """What is in the envelopes beside tokens."""
        key = self.store.envelope_key
        return [bytes(mixing.opened(checked.agreement, key, one.report_id, one.envelope)[1]) for one in reports]

    def _tags(self, agreement: Agreement, bodies: list[bytes], release: list[bytes]) -> Transcript:
        source, added = agreement.source, self.dummies(agreement)
        reports = [split(body, wire.SEALED_TAG_BYTES) for body in bodies]
        messages = [one for some in (*reports, added) for one in some]
        tags, places = self.tags(agreement, messages), {one: place for place, one in enumerate(messages)}
        sections = [(group, bytes(some)) for chunk in release for group, some in wire.sections(chunk)]
        labelled = [(group, one) for group, some in sections for one in split(some, wire.SEALED_TAG_BYTES)]
        order = row(places.get(one, -1) for _, one in labelled)
        if source.padding is None and any(
            tag not in source.groups[group] for (group, _), tag in zip(labelled, tags[order].tolist(), strict=True)
        ):
            raise ContractError("A release holds a tag that is not of its group.")
        sent = np.split(tags, np.cumsum([len(some) for some in reports]))
        return Transcript(
            reports=[some[some != source.padding] for some in sent[:-1]],
            released=tags[order][tags[order] != source.padding],
            order=order,
            estimates=np.empty(0),
            dummies=sent[-1],
            once=[one[:32] for one in messages],
        )

    def _sums(self, agreement: Agreement, bodies: list[bytes], release: list[bytes]) -> Transcript:
        key, size = crypto.box_key(self.opener.key), agreement.word_bytes
        sealed = [body[: wire.SEALED_SEED_BYTES] for body in bodies]
        seeds = [crypto.unseal(key, agreement.seed_info, one) for one in sealed]
        vectors = [masking.words(body[wire.SEALED_SEED_BYTES :], size) for body in bodies]
        places = {seed: place for place, seed in enumerate(seeds)}
        added = masking.words(self.store.books.get("noise", b""), size)
        return Transcript(
            reports=[unmasked(agreement, vector, [seed]) for vector, seed in zip(vectors, seeds, strict=True)],
            released=unmasked(agreement, masking.words(b"".join(release), size), seeds),
            order=row(places.get(seed, -1) for seed in self.opener.opened),
            estimates=np.empty(0),
            dummies=np.repeat(np.arange(len(added)), added),
            once=[*seeds, *(one[:32] for one in sealed)],
        )


def lies(run: AuditRun, bench: Bench) -> Finding:
    """What comes of two tags in a group, and of tags of another group among a batch of honest users."""
    checked, _ = run.announced()
    agreement, groups = checked.agreement, checked.agreement.source.groups
    last, honest = groups[-1].stop - 1, agreement.announcement.users - 1
    (outcome,) = run.upload([_report(run, checked, [0, *range(len(groups))])])
    if outcome.verdict == Verdict.accepted:
        return Finding("lies", False, None, "A report with two tags in a group was accepted.")
    others = [_report(run, checked, bench.query.tags(bench.trajectories[0])[0].tolist()) for _ in range(honest)]
    run.upload([_report(run, checked, [last] * len(groups)), *others])
    own = run.own_noise()
    run.learn(run.released(checked))
    added = np.bincount(run.tags(agreement, run.dummies(agreement)), minlength=bench.query.size)
    record = run.coordinator.last_record
    moved = record.values + agreement.source.noise(1).mean - own - added - honest * bench.counts[0]
    right = bool(moved[last] == 1 and np.abs(moved).sum() == 1 and record.invalid == len(groups) - 1)
    return Finding(
        "lies",
        right,
        None,
        f"Two tags in a group are refused; of {len(groups)} tags of one counter, one in each group, {moved[last]:g} "
        f"{'is' if right else 'are'} counted and {record.invalid} left out.",
    )


def _report(run: AuditRun, checked: Checked, tags: Sequence[int]) -> Report:
    """A report of any tags."""
    agreement, token = checked.agreement, crypto.mint(run.enrolment)
    key = crypto.public_box_key(agreement.announcement.tag_key)
    sealed = [crypto.seal(key, agreement.tag_info, int(tag).to_bytes(wire.TAG_BYTES)) for tag in tags]
    report_id = crypto.report_id(agreement.announcement.task, token)
    envelope = crypto.seal(
        crypto.public_box_key(checked.envelope_key), agreement.envelope_info(report_id), b"".join([token, *sealed])
    )
    return Report(report_id=report_id, envelope=envelope)


def _new_identity() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def split(data: bytes, size: int) -> list[bytes]:
    """Pieces of this size."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def row(numbers: Iterable[int]) -> IntArray:
    """Numbers as an array."""
    return np.fromiter(numbers, dtype=np.int64)


def unmasked(agreement: Agreement, vector: masking.Words, seeds: list[bytes]) -> IntArray:
    """The counts under these masks, as tags."""
    counters = agreement.query.size
    counts = vector - masking.sum_of_masks(seeds, counters, agreement.word_bytes)
    if (counts > agreement.source.count_range[1]).any():
        raise ContractError("A vector without its mask has larger counts than honest users raise.")
    return np.repeat(np.arange(counters), counts)


class _Opener(Opener):
    """The coordinator's, which lets the auditor have its key and the seeds that it opened."""

    key: bytes
    opened: list[bytes]

    def count_all(self, key: bytes, info: bytes, groups: Sequence[range], tags: Sequence[Sequence[bytes]]) -> Counted:
        self.key = key
        return super().count_all(key, info, groups, tags)

    def seeds(self, key: bytes, info: bytes, chunks: Iterable[bytes]) -> list[bytes | None]:
        self.key, opened = key, super().seeds(key, info, chunks)
        self.opened = [seed or b"" for seed in opened]
        return opened


class _Store(SQLiteStore):
    """The shuffler's, which lets the auditor have the key of the last batch, and its books: what it has drawn."""

    def create(self, row: BatchRow, key: bytes) -> BatchRow:
        self.envelope_key, self.books = crypto.box_key(key), dict[str, bytes]()
        return super().create(row, key)

    def keep(self, id: BatchId, name: str, value: bytes) -> bytes:
        self.books[name] = super().keep(id, name, value)
        return self.books[name]
