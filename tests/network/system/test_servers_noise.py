"""Noise by the servers, all roles in one process: one tag per group, dummies by the shuffler, noise by the coordinator.

Of m liars no counter moves by more than m, whatever they send; all reports are equally long; each server's noise is
drawn once for a batch, whoever dies when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats

from shufflerl.arrays import IntArray
from shufflerl.counts import Release
from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import BudgetExceededError, ContractError, InvalidInputError, StorageError
from shufflerl.network import faults
from shufflerl.network.coordinator import coordinator
from shufflerl.network.coordinator.coordinator import Coordinator, SpoiltSumError
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import Checked, play, randomize_episode, seal_report
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import Agreement, UnacceptableError, parse_announcement
from shufflerl.network.protocol.sources import Servers
from shufflerl.network.protocol.wire import Action, Opening, ProblemError, Reason, Report, State
from shufflerl.network.shuffler import dummies, mixing
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import BatchId, SQLiteStore
from shufflerl.noise import DiscreteLaplace, NoiseSum, PoissonNoise, TruncatedLaplace
from shufflerl.privacy.accounting import Budget, calibrate
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ServersNoise
from shufflerl.privacy.protocol import noise_counts
from tests.support.network_world import (
    EPISODE,
    QUERY,
    World,
    agreement_of,
    crash_at,
    killed_often,
    new_identity,
    pretend_to_seal,
    terms,
)

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

BUDGET = Budget(1.0, 1e-5)
LAWS = ServersNoise(BUDGET).noise(QUERY)
#: Few dummies, for what does not depend on how many.
SMALL = NoiseSum((TruncatedLaplace(1.0, 3), DiscreteLaplace(1.0)))
MDP = riverswim(np.random.default_rng(0), n_states=2, horizon=2)
ENV = TabularEnv(MDP)
RUN = Run(MDP.problem(60), "sdp-pe", Budget(8.0, 1e-5), 7, {"first": 2})
Transport = Literal["tags", "sums"]


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_seal(monkeypatch)


def world(users: int = 3, laws: NoiseSum = SMALL, **options: Any) -> World:
    made = World(users=users, servers=laws, **options)
    made.announce()
    return made


def read(world: World, released: bytes | None = None) -> dict[int, list[int]]:
    """The tags of each group of a release."""
    found: dict[int, list[int]] = {}
    for group, tags in wire.sections(world.collect() if released is None else released):
        found.setdefault(group, []).extend(world.tags(wire.SECTION.pack(group, len(tags) // 52) + bytes(tags)))
    return found


# The shape of reports.


@pytest.mark.parametrize("laws", [SMALL, LAWS, NoiseSum((PoissonNoise(40.0), PoissonNoise(40.0)))])
def test_a_report_is_one_tag_per_group_and_no_noise(laws: NoiseSum) -> None:
    there = world(laws=laws)
    agreed = agreement_of(there)
    assert randomize_episode(agreed, EPISODE).tolist() == QUERY.tags(EPISODE)[0].tolist()
    assert agreed.max_messages == QUERY.touched_counters == 3
    assert len({len(there.report().envelope) for _ in range(20)}) == 1


def test_any_other_shape_is_refused() -> None:
    """Two tags in a group, one too few, none: the envelope has one length, and positions are groups."""
    there = world()
    checked = there.checked()
    for tags in ([0], [0, 1], [0, 1, 8, 17], [0] * 57):
        token = there.mint()
        key, info = crypto.public_box_key(checked.agreement.announcement.tag_key), checked.agreement.tag_info
        sealed = [crypto.seal(key, info, tag.to_bytes(4)) for tag in tags]
        report_id = crypto.report_id(there.task, token)
        envelope = crypto.seal(
            crypto.public_box_key(checked.envelope_key),
            checked.agreement.envelope_info(report_id),
            b"".join([token, *sealed]),
        )
        (outcome,) = there.upload(Report(report_id=report_id, envelope=envelope))
        assert there.reason(outcome) == Reason.malformed


def test_a_release_has_every_group_by_itself_with_its_dummies() -> None:
    there = world(users=4)
    there.upload(*(there.report() for _ in range(4)))
    assert there.shuffler.advance()
    found = read(there)
    assert sorted(found) == [0, 1, 2]
    true = QUERY.tags(EPISODE)[0]
    for group, counters in enumerate(agreement_of(there).source.groups):
        assert set(found[group]) <= set(counters)
        counts = np.bincount(found[group], minlength=QUERY.size)
        assert counts[true[group]] >= 4
        assert (counts - 4 * np.isin(np.arange(QUERY.size), true) <= 6).all()


@pytest.mark.slow(3)
@pytest.mark.parametrize("large", [False, True])
def test_the_order_of_a_group_says_nothing_of_who_sent_what(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four users each one's tag of each group lands on each place equally often, and on whichever place its tags of
    other groups are; level 1e-7 in all. Next to no dummies; a large batch goes by slices and buckets.
    """
    if large:
        monkeypatch.setattr(mixing, "SLICE_BYTES", 1)
        monkeypatch.setattr(mixing, "BUCKET_TAGS", 2)
    runs, users, few = 250, 4, PoissonNoise(1e-9)
    there = world(users, NoiseSum((few, few)))
    groups = agreement_of(there).source.groups
    places = np.zeros((runs, len(groups), users), dtype=np.int64)
    for number in range(runs):
        if number:
            there.announce(number)
        checked = there.checked()
        sent = [[group.start + user for group in groups] for user in range(users)]
        there.upload(*(seal_report(checked, tags, there.mint()) for tags in sent), number=number)
        assert there.shuffler.advance()
        found = np.reshape(there.tags(there.collect(number), number), (len(groups), users))
        places[number] = np.argsort(found, axis=1)
        there.scrub(number)
    met = [np.bincount(places[:, group, user], minlength=users) for group in range(3) for user in range(users)]
    for one, other in itertools.combinations(range(3), 2):
        met += [np.bincount(users * places[:, one, user] + places[:, other, user], minlength=16) for user in range(4)]
    assert min(stats.chisquare(counts).pvalue for counts in met) > 1e-7 / len(met)


# Dummies.


def released_dummies(laws: NoiseSum, batches: int, users: int = 1) -> IntArray:
    """dummies[batch, counter] of so many batches, each by the whole way."""
    there = World(users=users, servers=laws)
    true = users * np.bincount(QUERY.tags(EPISODE)[0], minlength=QUERY.size)
    counts = []
    for number in range(batches):
        there.announce(number)
        there.upload(*(there.report() for _ in range(users)), number=number)
        assert there.shuffler.advance()
        tags = there.tags(there.collect(number), number)
        counts.append(np.bincount(tags, minlength=QUERY.size) - true)
        there.scrub(number)
    return np.array(counts)


@pytest.mark.slow(2)
@pytest.mark.parametrize("law", [TruncatedLaplace(1.5, 8), PoissonNoise(4.0)])
def test_dummies_have_the_announced_law_on_every_counter(law: TruncatedLaplace | PoissonNoise) -> None:
    """Chi-square over all counters, and the mean of each by itself; level 1e-7 in all."""
    runs = 250
    drawn = released_dummies(NoiseSum((law, DiscreteLaplace(1.5))), runs)
    values = np.arange(int(drawn.max()) + 2)
    chances = np.diff(law.cdf(values - law.mean), prepend=0.0)
    cells = np.flatnonzero(chances * drawn.size > 20)
    observed = np.array([(drawn == value).sum() for value in cells])
    rest, expected = drawn.size - observed.sum(), chances[cells] * drawn.size
    statistic = ((observed - expected) ** 2 / expected).sum()
    left = drawn.size - expected.sum()
    statistic += (rest - left) ** 2 / max(left, 1.0)
    assert stats.chi2.sf(statistic, len(cells)) > 5e-8
    scores = (drawn.mean(axis=0) - law.mean) / (law.sd / np.sqrt(runs))
    assert stats.chi2.sf((scores**2).sum(), QUERY.size) > 5e-8


@pytest.mark.parametrize("counters", [1, 2, 3, 5])
def test_every_counter_has_dummies_into_however_small_slices_it_falls(
    counters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a slice that is not full: one has none with probability 4e-18."""
    monkeypatch.setattr(dummies, "SLICE", 40 * counters)
    (drawn,) = released_dummies(NoiseSum((PoissonNoise(40.0), PoissonNoise(40.0))), 1)
    assert drawn.min() > 0


@pytest.mark.slow(2)
@pytest.mark.parametrize("users", [1, 1_000, 10**6])
@pytest.mark.parametrize("law", [TruncatedLaplace(1.5, 8), PoissonNoise(4.0)])
def test_dummies_are_as_many_whatever_the_crowd(law: TruncatedLaplace | PoissonNoise, users: int) -> None:
    """Sealed and summed. Of 450 sums of eight counters and more neither mean nor variance is six deviations off."""
    said = World(users=users, servers=NoiseSum((law, DiscreteLaplace(1.5)))).announcement()
    payload, drawn = wire.encode(said), []
    source = parse_announcement(payload).source
    for _ in range(150):
        summed = dummies.drawn_dummies(source)
        for group, counters in enumerate(source.groups):
            sealed = len(dummies.sealed(payload, group)) // wire.SEALED_TAG_BYTES
            scale = np.sqrt(len(counters)) * law.sd
            drawn.append([(total - len(counters) * law.mean) / scale for total in (sealed, summed[counters].sum())])
    assert np.abs(np.mean(drawn, axis=0)).max() < 6 / np.sqrt(450)
    assert np.abs(np.var(drawn, axis=0) - 1).max() < 6 * np.sqrt(2.5 / 450)


@pytest.mark.slow(2)
@pytest.mark.parametrize("users", [10, 1_000, 10**6])
def test_the_coordinators_noise_is_as_large_whatever_the_crowd(users: int, tmp_path: Path) -> None:
    """Sixty draws for all counters; a variance that is two thirds or four thirds of what is stated is refused."""
    coordinator = Coordinator(
        tmp_path, dataclasses.replace(RUN, problem=MDP.problem(4 * users), learner_parameters={"first": users})
    )
    drawn = []
    for _ in range(60):
        assert coordinator.pending is not None
        number, _, signed = coordinator.pending
        agreed, secrets = parse_announcement(signed.payload), coordinator.store.secrets(number)
        assert agreed.batch.users >= users
        assert secrets is not None
        assert secrets.own is not None
        drawn.append(secrets.own)
        coordinator.reopen()
    own = agreed.source.own
    assert own is not None
    assert np.var(drawn) == pytest.approx(own.variance, rel=1 / 3)
    coordinator.close()


def test_how_many_dummies_were_drawn_is_not_shown() -> None:
    """The coordinator would know that much of its own protection."""
    there = world()
    shown, expected = [there.shuffler.expected_dummies()], agreement_of(there).source.expected_dummies
    there.shuffler.seal_dummies()
    shown.append(there.shuffler.expected_dummies())
    assert shown == [expected, expected]


def test_dummies_are_drawn_once_whoever_dies_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after every slice in turn: what was stored stands, and is what is released."""
    monkeypatch.setattr(dummies, "SLICE", 6)
    there = world()
    pieces = len(dummies.slices(agreement_of(there)))
    assert pieces == 12
    stored: dict[str, bytes] = {}
    for _ in range(pieces):
        with crash_at("dummies", monkeypatch):
            there.shuffler.seal_dummies()
        now = {name: there.store.kept(there_id(there), name) for name in map(dummies.name, range(pieces))}
        known = {name: value for name, value in now.items() if value is not None}
        assert stored.items() <= known.items()
        assert len(known) == len(stored) + 1
        stored = known
        there.restart()
    there.shuffler.seal_dummies()
    before = b"".join(stored.values())
    there.upload(*(there.report() for _ in range(3)))
    for label in ("permute", "release"):
        with crash_at(label, monkeypatch):
            there.shuffler.advance()
        there.restart()
    assert there.shuffler.advance()
    released = there.collect()
    assert released == there.collect()
    tags = {bytes(some[at : at + 52]) for _, some in wire.sections(released) for at in range(0, len(some), 52)}
    ours = {before[at : at + 52] for at in range(0, len(before), 52)}
    assert ours <= tags
    assert len(tags) == len(ours) + 3 * 3


def there_id(there: World, number: int = 0) -> BatchId:
    return BatchId(there.task, number, 0)


def test_of_two_processes_the_first_slice_stands() -> None:
    there = world()
    job = there.shuffler.next_dummies()
    assert job is not None
    id, payload, number = job
    first, second = (dummies.sealed(payload, number) for _ in range(2))
    there.shuffler.add_dummies(id, number, first)
    there.shuffler.add_dummies(id, number, second)
    assert there.store.kept(id, dummies.name(number)) == first
    other = Shuffler(there.store, there.identity, there.coordinator.public, there.enrolment.public, there.limits)
    other.seal_dummies()  # another process with the same store
    assert there.shuffler.next_dummies() is None


def test_a_full_batch_waits_for_its_dummies() -> None:
    there = world()
    there.upload(*(there.report() for _ in range(3)))
    assert there.shuffler.advance(seal=False)
    assert there.shuffler.status(there.task).state == State.sealed
    there.shuffler.seal_dummies()
    assert there.shuffler.advance(seal=False)
    assert there.shuffler.status(there.task).state == State.released


def test_dummies_of_a_batch_that_is_over_are_thrown_away() -> None:
    there = World(users=3, servers=SMALL, limits=Limits(min_batch_size=1, timeout=10.0, when_late="abort"))
    there.announce()
    job = there.shuffler.next_dummies()
    assert job is not None
    there.now += 11
    assert there.shuffler.advance()
    there.shuffler.add_dummies(job[0], job[2], dummies.sealed(*job[1:]))
    assert there.store.kept(job[0], dummies.name(job[2])) is None
    assert there.shuffler.next_dummies() is None
    there.announce(attempt=1)
    assert there.shuffler.next_dummies() is not None


def test_more_dummies_than_the_operator_allows_are_not_promised() -> None:
    there = World(users=3, servers=LAWS, limits=Limits(min_batch_size=1, max_dummies=100))
    with pytest.raises(ProblemError, match=r"dummies; this shuffler seals at most 100 \(max_dummies\)") as refused:
        there.announce()
    assert refused.value.reason == Reason.too_many_messages
    summed = World(users=3, servers=LAWS, limits=there.limits, transport=wire.Transport.sums)
    assert summed.announce().state == State.open


@pytest.mark.slow(1)
def test_a_large_batch_with_dummies_is_mixed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one report or one piece of dummies, buckets of a few tags; killed after every part in turn."""
    monkeypatch.setattr(mixing, "SLICE_BYTES", 1)
    monkeypatch.setattr(mixing, "BUCKET_TAGS", 8)
    monkeypatch.setattr(dummies, "SLICE", 9)
    there = world(users=5)
    there.upload(*(there.report() for _ in range(5)))
    there.shuffler.seal_dummies()
    pieces = [
        there.store.kept(there_id(there), dummies.name(number))
        for number in range(len(dummies.slices(agreement_of(there))))
    ]
    ours = sum(len(piece or b"") for piece in pieces) // 52
    assert killed_often(there, range(1, 40, 3), monkeypatch) > 1
    assert there.shuffler.advance()
    found = read(there)
    assert sum(map(len, found.values())) == ours + 15
    assert all(set(tags) <= set(agreement_of(there).source.groups[group]) for group, tags in found.items())


@pytest.mark.slow(1)
def test_true_tags_and_dummies_are_in_one_random_order() -> None:
    """Where the one true tag of a group lies among its dummies: uniform; level 1e-7."""
    places = []
    law = NoiseSum((TruncatedLaplace(1.0, 1), DiscreteLaplace(1.0)))
    there = World(users=1, servers=law)
    for number in range(400):
        there.announce(number)
        report = there.report()
        there.upload(report, number=number)
        assert there.shuffler.advance()
        true = report.envelope[32 + wire.TOKEN_BYTES :][:52]
        ((_, tags),) = [section for section in wire.sections(there.collect(number)) if section[0] == 0]
        order = [bytes(tags[at : at + 52]) for at in range(0, len(tags), 52)]
        places.append((order.index(true) + np.random.default_rng(number).random()) / len(order))
        there.scrub(number)
    assert stats.kstest(places, "uniform").pvalue > 1e-7


# All the way to the learner.


class System:
    """A coordinator and a shuffler in one process, and users who report what they like."""

    def __init__(self, folder: Path, run: Run = RUN) -> None:
        self.folder, self.run = folder, run
        self.store, self.enrolment, self.identity = SQLiteStore(None), new_identity(), new_identity()
        self.coordinator = Coordinator(folder, run)
        self.restart_shuffler()
        #: What the shuffler has added to the counters of a batch, as its own books have it.
        self.dummies: IntArray

    def restart_shuffler(self) -> None:
        self.shuffler = Shuffler(
            self.store,
            self.identity,
            self.coordinator.identity.public,
            self.enrolment.public,
            Limits(min_batch_size=1),
        )

    def restart(self) -> None:
        self.coordinator.close()
        self.coordinator = Coordinator(self.folder, self.run)

    @property
    def agreed(self) -> Agreement:
        assert self.coordinator.pending is not None
        return parse_announcement(self.coordinator.pending[2].payload)

    def own(self) -> IntArray:
        assert self.coordinator.pending is not None
        secret = self.coordinator.store.secrets(self.coordinator.pending[0])
        assert secret is not None
        assert secret.own is not None
        return secret.own

    def fill(self, *liars: Callable[[Checked, bytes], Report]) -> IntArray:
        """Users fill the batch, the first of them liars; what all others did."""
        assert self.coordinator.pending is not None
        self.shuffler.announce(self.coordinator.pending[2])
        agreed = self.agreed
        number, attempt = agreed.announcement.batch, agreed.announcement.attempt
        opening = wire.decode(Opening, self.shuffler.current(self.coordinator.task).opening.payload)
        checked, true = Checked(agreed, opening.envelope_key), np.zeros(agreed.query.size, dtype=np.int64)
        for user in range(agreed.batch.users):
            token = crypto.mint(self.enrolment)
            if user < len(liars):
                report = liars[user](checked, token)
            else:
                tags = randomize_episode(agreed, play(ENV, agreed))
                np.add.at(true, tags, 1)
                report = seal_report(checked, tags, token)
            (outcome,) = self.shuffler.upload(self.coordinator.task, [(number, attempt, report)])
            assert outcome.problem is None
        return true

    def release(self) -> list[bytes]:
        """Have the shuffler release the batch, and keep its own books."""
        assert self.coordinator.pending is not None
        number, attempt, _ = self.coordinator.pending
        agreed, id = self.agreed, BatchId(self.coordinator.task, number, attempt)
        self.shuffler.seal_dummies()
        secret = self.coordinator.store.secrets(number)
        assert secret is not None
        private = crypto.box_key(secret.key)
        self.dummies = np.zeros(agreed.query.size, dtype=np.int64)
        for piece in range(len(dummies.slices(agreed))):
            sealed = self.store.kept(id, dummies.name(piece)) or b""
            for at in range(0, len(sealed), 52):
                self.dummies[int.from_bytes(crypto.unseal(private, agreed.tag_info, sealed[at : at + 52]))] += 1
        assert self.shuffler.advance()
        if agreed.transport == wire.Transport.sums:
            self.coordinator.open_seeds([self.shuffler.seeds(self.coordinator.command(number, attempt, Action.seeds))])
            assert self.coordinator.exclusion is not None
            self.shuffler.exclude(self.coordinator.exclusion)
            drawn: list[IntArray] = []
            real = dummies.drawn_dummies
            dummies.drawn_dummies = lambda source: drawn.append(real(source)) or drawn[-1]  # type: ignore[func-returns-value]
            try:
                assert self.shuffler.advance()
            finally:
                dummies.drawn_dummies = real
            (self.dummies,) = drawn
        status = self.shuffler.status(self.coordinator.task)
        assert status.state == State.released
        return [
            self.shuffler.collect(self.coordinator.command(number, attempt, Action.collect, chunk))
            for chunk in range(status.chunks)
        ]


@pytest.fixture(params=["tags", "sums"])
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@pytest.fixture
def system(tmp_path: Path, transport: Transport) -> System:
    return System(tmp_path, dataclasses.replace(RUN, transport=transport))


def test_a_learner_is_given_true_counts_with_the_noise_of_both(
    system: System, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    """To the last digit, batch after batch, and with the law that both together have."""
    seen: list[Release] = []
    expected: list[Any] = []
    while system.coordinator.pending is not None:
        true, own, agreed = system.fill(), system.own(), system.agreed
        chunks = system.release()
        observe = system.coordinator.learner.observe

        def watched(release: Release, observe: Callable[[Release], None] = observe) -> None:
            seen.append(release)
            observe(release)

        monkeypatch.setattr(system.coordinator.learner, "observe", watched)
        system.coordinator.absorb(chunks)
        law = ServersNoise(RUN.budget).noise(agreed.query)
        expected.append((true + system.dummies + own - law.mean).tolist())
        assert seen[-1].noise == law
        assert seen[-1].added_variance == pytest.approx(law.variance)
        assert seen[-1].variance_range == ServersNoise(RUN.budget).variance_range(agreed.query)
        system.restart()
    assert [release.values.tolist() for release in seen] == expected
    records = system.coordinator.records
    assert [record.values.tolist() for record in records] == expected
    assert {(record.noise_by, record.transport, record.invalid) for record in records} == {("servers", transport, 0)}
    assert system.coordinator.ledger.spent <= 8.0
    certificate = system.coordinator.certificate()
    assert certificate.honest_fraction == 1.0
    assert ("added up under masks" in certificate.mechanism) == (transport == "sums")
    assert "each enough alone" in certificate.mechanism
    assert "separate servers" in certificate.assumptions


@pytest.mark.parametrize("label", ["ledger", "charged", "open", "learner save", "saved"])
def test_the_coordinators_noise_is_drawn_once_whoever_dies_when(
    system: System, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, own, agreed = system.fill(), system.own(), system.agreed
    chunks = system.release()
    with crash_at(label, monkeypatch):
        system.coordinator.absorb(chunks)
    system.restart()
    if label != "saved":
        assert system.own().tolist() == own.tolist()
        system.coordinator.absorb(chunks)
    (record,) = system.coordinator.records
    mean = agreed.source.noise(1).mean
    assert record.values.tolist() == (true + system.dummies + own - mean).tolist()
    assert system.coordinator.store.secrets(0) is None


def test_noise_that_was_announced_and_is_gone_is_missed(system: System) -> None:
    system.fill()
    chunks = system.release()
    system.coordinator.close()
    with contextlib.closing(sqlite3.connect(system.folder / "coordinator.db")) as database, database:
        database.execute("UPDATE batches SET own = NULL")
    system.coordinator = Coordinator(system.folder, system.run)
    with pytest.raises(StorageError, match=r"noise for batch 0 was announced and is not stored.*Nothing was learned"):
        system.coordinator.absorb(chunks)
    assert system.coordinator.store.tally()[0] == 0


def test_every_attempt_has_noise_of_its_own(system: System) -> None:
    """Of an attempt that came to nothing a shuffler may have learned the noise: where all others are its own users."""
    before = system.own()
    system.coordinator.reopen()
    after = system.own()
    # Two draws of scale 0.75 are equal with probability 0.39, on all 24 counters with 2e-10.
    assert len(before) == len(after) == 24
    assert before.tolist() != after.tolist()
    system.restart()
    assert system.own().tolist() == after.tolist()


@pytest.mark.slow(1)
def test_the_shufflers_noise_on_a_sum_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(tmp_path, dataclasses.replace(RUN, transport="sums"))
    system.fill()
    assert system.shuffler.advance()
    number, attempt, _ = system.coordinator.pending or (0, 0, None)
    system.coordinator.open_seeds([system.shuffler.seeds(system.coordinator.command(number, attempt, Action.seeds))])
    assert system.coordinator.exclusion is not None
    system.shuffler.exclude(system.coordinator.exclusion)
    id = BatchId(system.coordinator.task, 0, 0)
    for label in (*(label for label in faults.NOISE_LABELS if label == "noise"), "permute", "release"):
        with crash_at(label, monkeypatch):
            system.shuffler.advance()
        noise = system.store.kept(id, "noise")
        assert noise is not None
        system.restart_shuffler()
        if label == "noise":
            first = noise
        assert noise == first


# Liars.


def flooding(tags: Iterable[int]) -> Callable[[Checked, bytes], Report]:
    """A user who seals these tags, in these places."""

    def report(checked: Checked, token: bytes) -> Report:
        return seal_report(checked, tags, token)

    return report


def garbage(checked: Checked, token: bytes) -> Report:
    """A user whose tags nobody can open."""
    agreement = checked.agreement
    report_id = crypto.report_id(agreement.announcement.task, token)
    text = token + bytes(52 * agreement.max_messages)
    envelope = crypto.seal(crypto.public_box_key(checked.envelope_key), agreement.envelope_info(report_id), text)
    return Report(report_id=report_id, envelope=envelope)


@pytest.mark.parametrize(
    "lies",
    [
        [flooding([8, 8, 8])] * 2,
        [flooding([8, 0, 16]), flooding([wire.PADDING] * 3)],
        [flooding([0, 0, 0]), garbage],
        [flooding([2**31, 9, 5]), flooding([0, 8, 8])],
    ],
)
def test_liars_move_no_counter_by_more_than_their_number(
    tmp_path: Path, lies: list[Callable[[Checked, bytes], Report]]
) -> None:
    """And what is not of its group, or cannot be opened, is left out and counted."""
    system = System(tmp_path, dataclasses.replace(RUN, learner_parameters={"first": 4}))
    agreed = system.agreed
    true, own = system.fill(*lies), system.own()
    system.coordinator.absorb(system.release())
    (record,) = system.coordinator.records
    moved = record.values + agreed.source.noise(1).mean - true - system.dummies - own
    assert (moved >= 0).all()
    assert moved.max() <= len(lies)
    groups = np.add.reduceat(moved, agreed.query.group_starts)
    assert (groups <= len(lies)).all()
    assert groups.sum() == len(lies) * agreed.query.touched_counters - record.invalid
    assert record.messages == true.sum() + len(lies) * agreed.query.touched_counters + system.dummies.sum()


@pytest.mark.parametrize("sections", [1, 100])
def test_a_tag_that_is_handed_over_twice_counts_once(tmp_path: Path, sections: int) -> None:
    """A shuffler that repeated one user's tag a thousand times would read it through any noise; also chunk by chunk."""
    system = System(tmp_path)
    agreed = system.agreed
    true, own = system.fill(), system.own()
    chunks = system.release()
    copied = next(bytes(tags[:52]) for group, tags in wire.sections(b"".join(chunks)) if group == 0)
    again = wire.SECTION.pack(0, 100 // sections) + 100 // sections * copied
    system.coordinator.absorb([*chunks, *sections * [again]])
    (record,) = system.coordinator.records
    assert record.values.tolist() == (true + system.dummies + own - agreed.source.noise(1).mean).tolist()
    assert record.invalid == 100


def test_a_release_without_some_tags_is_refused(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.fill()
    users = system.agreed.batch.users
    short = [
        wire.SECTION.pack(group, min(len(tags) // 52, users - 1)) + bytes(tags[: 52 * (users - 1)])
        for group, tags in wire.sections(b"".join(system.release()))
    ]
    with pytest.raises(ContractError, match="Is this its shuffler"):
        system.coordinator.absorb(short)


def test_whether_a_sum_is_impossible_is_told_from_noisy_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a batch is asked again is seen by the shuffler, which knows all but the coordinator's noise.

    A user of its own may lift a counter to where one more would be impossible: it must not hear which it was.
    """
    real = noise_counts
    for own, refused in ((5, True), (-5, False)):
        with monkeypatch.context() as patch:

            def fixed(law: Any, size: int, own: int = own) -> IntArray:
                return np.full(size, own) if isinstance(law, DiscreteLaplace) else real(law, size)

            patch.setattr(coordinator, "noise_counts", fixed)
            system = System(tmp_path / str(own), dataclasses.replace(RUN, transport="sums"))
            agreed = system.agreed
            _, high = agreed.source.count_range
            seed = bytes(32)

            def lifted(checked: Checked, token: bytes, high: int = high, seed: bytes = seed) -> Report:
                agreement = checked.agreement
                vector = np.zeros(agreement.query.size, dtype=np.int64)
                vector[3] = high
                words = (vector.astype("<u2") + masking.mask(seed, len(vector), 2)).tobytes()
                key = crypto.public_box_key(agreement.announcement.tag_key)
                text = token + crypto.seal(key, agreement.seed_info, seed) + words
                report_id = crypto.report_id(agreement.announcement.task, token)
                envelope = crypto.seal(
                    crypto.public_box_key(checked.envelope_key), agreement.envelope_info(report_id), text
                )
                return Report(report_id=report_id, envelope=envelope)

            patch.setattr(dummies, "drawn_dummies", lambda source: np.zeros(source.query.size, dtype=np.int64))
            system.fill(lifted)
            try:
                system.coordinator.absorb(system.release())
            except SpoiltSumError:
                assert refused
            else:
                assert not refused


@pytest.mark.parametrize(
    ("dummies", "own"),
    [(PoissonNoise(300.0), PoissonNoise(400.0)), (TruncatedLaplace(4.0, 60), DiscreteLaplace(5.0))],
)
def test_counts_are_unbiased_whichever_law_either_server_draws(
    dummies: PoissonNoise | TruncatedLaplace, own: PoissonNoise | DiscreteLaplace
) -> None:
    """Drawn as the servers draw; their mean is off by six deviations with 2e-9."""
    source, draws = Servers(QUERY, 5, dummies, own), 20_000
    sent = 7 + noise_counts(dummies, draws) + noise_counts(own, draws)
    values = source.values(sent, 5)
    assert abs(values.mean() - 7) < 6 * source.noise(5).sd / np.sqrt(draws)
    assert values.std() == pytest.approx(source.noise(5).sd, rel=0.1)


# What nodes accept.


def test_a_node_computes_what_either_server_protects_from() -> None:
    """Noise by either that is too little is refused, whatever the other adds; others need not be honest."""
    dummies, own = LAWS.parts
    assert isinstance(dummies, TruncatedLaplace)
    assert isinstance(own, DiscreteLaplace)
    for honest in (1.0, 0.2):
        terms(honest_fraction=honest).check(agreement_of(World(servers=LAWS)))
    charged = terms(honest_fraction=0.1).charge(agreement_of(World(servers=LAWS)))
    assert charged.noise == dummies
    little = [
        NoiseSum((dummies, DiscreteLaplace(0.9 * own.scale))),
        NoiseSum((TruncatedLaplace(0.9 * dummies.scale, 10_000), own)),
        NoiseSum((TruncatedLaplace(dummies.scale, dummies.shift // 2), own)),
    ]
    for laws in little:
        with pytest.raises(UnacceptableError, match=r"by the shuffler and .* by the coordinator"):
            terms().check(agreement_of(World(servers=laws)))
    for laws in little[1:]:
        charge = terms().charge(agreement_of(World(servers=laws)))
        assert privacy_loss(charge.noise, charge.changed).delta(1.0) > 1e-5


def test_one_charge_holds_for_both_servers_however_many_runs() -> None:
    """Of laws of two kinds that cost the same in one run, Laplace noise costs far more in many: a ledger that went by
    the other would let a user be asked again and again. So nodes accept one kind, and charge what protects less.
    """
    laplace, changed = TruncatedLaplace(6.0, 200), QUERY.changed_counters
    poisson = calibrate(Budget(1.01 * privacy_loss(laplace, changed).epsilon(1e-5), 1e-5), changed)
    assert privacy_loss(laplace, changed, 32).epsilon(1e-5) > 1.5 * privacy_loss(poisson, changed, 32).epsilon(1e-5)
    for laws in (NoiseSum((laplace, poisson)), NoiseSum((poisson, DiscreteLaplace(6.0)))):
        agreed = agreement_of(World(servers=laws))
        with pytest.raises(UnacceptableError, match=r"the same law uncut, or a wider one"):
            terms(8.0).check(agreed)
        with pytest.raises(InvalidInputError, match=r"the same law uncut, or a wider one"):
            terms(8.0).charge(agreed)
    for added, own in ((laplace, DiscreteLaplace(6.0)), (laplace, DiscreteLaplace(9.0)), (poisson, poisson)):
        agreed = agreement_of(World(servers=NoiseSum((added, own))))
        terms(8.0).check(agreed)
        charge, ledger = terms(8.0).charge(agreed), Ledger("node", Budget(8.0, 1e-5))
        runs = 0
        with contextlib.suppress(BudgetExceededError):
            for runs in range(100):
                ledger.record(f"run {runs}", charge, cohort="this node")
        for law in (added, own):
            assert privacy_loss(law, changed, runs).epsilon(1e-5) <= 8.0
        assert privacy_loss(added, changed, runs + 1).epsilon(1e-5) > 8.0


@pytest.mark.parametrize("mode", ["users", "servers"])
def test_a_node_says_whose_noise_it_accepts(mode: Literal["users", "servers"]) -> None:
    agreed = agreement_of(World(servers=LAWS)) if mode == "servers" else agreement_of(World(), noise_mean=1e3)
    other: Literal["users", "servers"] = "users" if mode == "servers" else "servers"
    for accepted in ("either", mode):
        terms(noise=accepted).check(agreed)
    with pytest.raises(UnacceptableError, match=f"noise by {mode}; this node was told to accept noise by {other}"):
        terms(noise=other).check(agreed)
    with pytest.raises(InvalidInputError, match="noise"):
        terms(noise="nobody")


def test_with_servers_nobody_is_relied_on() -> None:
    with pytest.raises(InvalidInputError, match="nothing rests on users"):
        dataclasses.replace(RUN, honest_fraction=0.9)
    assert Servers(QUERY, 5, *LAWS.parts).noise(5) == Servers(QUERY, 5, *LAWS.parts).noise(1) == LAWS  # type: ignore[arg-type]
