"""All parties of the network in one process without sockets, for tests."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shufflerl.counts import Batch, CountQuery, Trajectories
from shufflerl.mdp import Mixture, Problem
from shufflerl.network import faults
from shufflerl.network.coordinator.opening import open_seeds
from shufflerl.network.node.reporting import Checked, Invitation, check_signatures, make_report, seal_report
from shufflerl.network.protocol import agreement, crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, Terms, parse_announcement
from shufflerl.network.protocol.crypto import SigningKey, UnsealError
from shufflerl.network.protocol.sources import Users
from shufflerl.network.protocol.wire import (
    Action,
    Announcement,
    Command,
    Exclusion,
    OpenBatch,
    Outcome,
    Report,
    Signed,
    Transport,
)
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import BatchId, SQLiteStore, Store
from shufflerl.noise import NoiseSum, PoissonNoise
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.protocol import Protocol

#: Two steps, two states, two actions: 24 counters, 3 touched.
PROBLEM = Problem(horizon=2, n_states=2, n_actions=2, episodes=1000)
QUERY = CountQuery.everything(PROBLEM)
EPISODE = Trajectories([[0, 1]], [[0, 1]], [[0, 1]])


def new_identity() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


Keep = Callable[[BatchId, str, bytes], bytes]


class Crash(BaseException):
    """The process is gone."""


@contextmanager
def crash_at(label: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Die at a label, as far as one process can: nothing after it runs."""

    def reached(here: str) -> None:
        if here == label:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(faults, "reached", reached)
        try:
            yield
        except Crash:
            return
    raise AssertionError(f"{label!r} was not reached")


@dataclass
class World:
    """A coordinator's keys, a shuffler and as many nodes as are asked for."""

    users: int = 3
    limits: Limits = field(default_factory=lambda: Limits(min_batch_size=1, timeout=100.0))
    store: Store = field(default_factory=lambda: SQLiteStore(None))
    noise_mean: float = 2.0
    now: float = 1000.0
    transport: Transport = Transport.tags
    excludable: int = 0
    servers: NoiseSum | None = None  # the noise of both, instead of the users'

    def __post_init__(self) -> None:
        self.coordinator, self.identity, self.enrolment = new_identity(), new_identity(), new_identity()
        self.task = secrets.token_bytes(wire.TASK_BYTES)
        self.tag_keys: dict[tuple[int, int], Any] = {}
        self.restart()

    def restart(self) -> None:
        """A new process over the same store."""
        self.shuffler = Shuffler(
            self.store, self.identity, self.coordinator.public, self.enrolment.public, self.limits, lambda: self.now
        )

    def mint(self) -> bytes:
        return crypto.mint(self.enrolment)

    @property
    def invitation(self) -> Invitation:
        return Invitation(self.task, "http://unused", self.coordinator.public, self.identity.public)

    def announcement(self, number: int = 0, attempt: int = 0, **changes: Any) -> Announcement:
        key = self.tag_keys.setdefault((number, attempt), crypto.new_box_key())
        policy = np.zeros((2, 2), dtype=int)
        said = agreement.announce(
            Batch(number, changes.pop("users", self.users), Mixture.single(policy), QUERY),
            self.servers or PoissonNoise(changes.pop("noise_mean", self.noise_mean)),
            task=changes.pop("task", self.task),
            attempt=attempt,
            tag_key=key.public_key().public_bytes_raw(),
            transport=self.transport,
            excludable=self.excludable,
        )
        return altered(said, **changes)

    def announce(self, number: int = 0, attempt: int = 0, **changes: Any) -> wire.BatchStatus:
        return self.shuffler.announce(self.coordinator.sign(self.announcement(number, attempt, **changes)))

    def checked(self) -> Checked:
        return check_signatures(self.invitation, self.shuffler.current(self.task))

    def report(self, token: bytes | None = None) -> Report:
        return make_report(self.checked(), EPISODE, token or self.mint())

    def marked_report(self, mark: int, token: bytes | None = None) -> Report:
        """A report of three tags that no other has, so that a count of two proves a replay."""
        tags = [3 * mark, 3 * mark + 1, 3 * mark + 2]
        return seal_report(self.checked(), tags, token or self.mint())

    def upload(self, *reports: Report, number: int = 0, attempt: int = 0) -> list[Outcome]:
        return self.shuffler.upload(self.task, [(number, attempt, report) for report in reports])

    def command(self, action: Action, number: int = 0, attempt: int = 0, chunk: int = 0) -> Signed:
        return self.coordinator.sign(Command(task=self.task, batch=number, attempt=attempt, action=action, chunk=chunk))

    def collect(self, number: int = 0, attempt: int = 0) -> bytes:
        chunks = self.shuffler.status(self.task).chunks
        return b"".join(
            self.shuffler.collect(self.command(Action.collect, number, attempt, chunk)) for chunk in range(chunks)
        )

    def seeds(self, number: int = 0, attempt: int = 0) -> list[bytes]:
        """The sealed seeds in the order in which they are handed over."""
        chunks = -(-self.users // wire.CHUNK_SEEDS)
        asked = (self.command(Action.seeds, number, attempt, chunk) for chunk in range(chunks))
        sealed, size = b"".join(map(self.shuffler.seeds, asked)), wire.SEALED_SEED_BYTES
        return [sealed[start : start + size] for start in range(0, len(sealed), size)]

    def exclude(self, *positions: int, number: int = 0, attempt: int = 0) -> wire.BatchStatus:
        said = Exclusion(task=self.task, batch=number, attempt=attempt, positions=list(positions))
        return self.shuffler.exclude(self.coordinator.sign(said))

    def opened(self, sealed: list[bytes], number: int = 0, attempt: int = 0) -> list[bytes]:
        """The seeds that the coordinator can open."""
        info = parse_announcement(wire.encode(self.announcement(number, attempt))).seed_info
        return [
            seed
            for seed in open_seeds(self.tag_keys[number, attempt].private_bytes_raw(), info, b"".join(sealed))
            if seed
        ]

    def counts(self, seeds: list[bytes], number: int = 0, attempt: int = 0) -> list[int]:
        """What the coordinator reads in a released sum."""
        size = agreement_of(self).word_bytes
        total = masking.words(self.collect(number, attempt), size)
        counts: list[int] = (total - masking.sum_of_masks(seeds, len(total), size)).tolist()
        return counts

    def scrub(self, number: int = 0, attempt: int = 0) -> wire.BatchStatus:
        return self.shuffler.scrub(self.command(Action.scrub, number, attempt))

    def tags(self, released: bytes, number: int = 0, attempt: int = 0) -> list[int]:
        """What the coordinator reads in a release, in its order, without padding and whatever the group."""
        info = parse_announcement(self.coordinator.sign(self.announcement(number, attempt)).payload).tag_info
        key, size = self.tag_keys[number, attempt], wire.SEALED_TAG_BYTES
        some = b"".join(tags for _, tags in wire.sections(released))
        sealed = [some[start : start + size] for start in range(0, len(some), size)]
        read = (int.from_bytes(crypto.unseal(key, info, one)) for one in sealed)
        return [tag for tag in read if tag != wire.PADDING]

    def reason(self, outcome: Outcome) -> str | None:
        return None if outcome.problem is None else outcome.problem.type.rpartition(":")[2]


def altered(said: Announcement, **changes: Any) -> Announcement:
    """The announcement with other values, of its query too."""
    of_query = {name: changes.pop(name) for name in said.query.__struct_fields__ if name in changes}
    return msgspec.structs.replace(said, query=msgspec.structs.replace(said.query, **of_query), **changes)


def agreement_of(world: World, **changes: Any) -> Agreement:
    return parse_announcement(wire.encode(world.announcement(**changes)))


def protocol_of(agreed: Agreement) -> Protocol:
    """What users agree on who add the noise."""
    assert isinstance(agreed.source, Users)
    return agreed.source.protocol


def terms(epsilon: float = 1.0, **options: Any) -> Terms:
    return Terms(Budget(epsilon, 1e-5), **{"min_batch_size": 1, **options})


def open_batch(world: World) -> OpenBatch:
    return world.shuffler.current(world.task)


def dying(keep: Keep, calls: int) -> Keep:
    """A store's `keep` that crashes at the last of so many calls."""
    left = itertools.count(calls - 1, -1)

    def kept(id: BatchId, name: str, value: bytes) -> bytes:
        if next(left) == 0:
            raise Crash
        return keep(id, name, value)

    return kept


def killed_often(world: World, deaths: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Die after so many stored parts, start again and die after others, until all is done; how often it died."""
    keep, killed = world.store.keep, 0
    for death in deaths:
        with monkeypatch.context() as patch:
            patch.setattr(world.store, "keep", dying(keep, death))
            try:
                world.shuffler.advance()
                break
            except Crash:
                killed += 1
                world.restart()
    return killed


def pretend_to_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seals that bind key and info and never repeat, but hide nothing: a thousand schedules cost what one does."""

    def code(public: bytes, info: bytes, once: bytes) -> bytes:
        return hashlib.sha256(public + info + once).digest()[:16]

    def seal(key: Any, info: bytes, text: bytes) -> bytes:
        once = os.urandom(32)
        return once + text + code(key.public_bytes_raw(), info, once)

    @functools.lru_cache
    def public(key: Any) -> bytes:
        public: bytes = key.public_key().public_bytes_raw()
        return public

    def unseal(key: Any, info: bytes, sealed: bytes) -> bytes:
        if sealed[-16:] != code(public(key), info, sealed[:32]) or len(sealed) < 48:
            raise UnsealError
        return sealed[32:-16]

    monkeypatch.setattr(crypto, "seal", seal)
    monkeypatch.setattr(crypto, "unseal", unseal)


def sealed_seed(report: Report) -> bytes:
    """The sealed seed in an envelope that only pretends to be sealed."""
    first = 32 + wire.TOKEN_BYTES
    return report.envelope[first : first + wire.SEALED_SEED_BYTES]
