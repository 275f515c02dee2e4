"""The coordinator of masked sums: it counts what was sent, says once what it cannot open, and refuses spoilt sums."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from shufflerl import learners
from shufflerl.arrays import IntArray
from shufflerl.counts import CountQuery, Release
from shufflerl.errors import ContractError, InvalidInputError, LostWorkersError
from shufflerl.mdp import Problem
from shufflerl.network.coordinator.coordinator import Coordinator, SpoiltSumError
from shufflerl.network.coordinator.opening import Opener
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import Checked, play, randomize_episode, seal_report
from shufflerl.network.protocol import costs, crypto, masking, sources, wire
from shufflerl.network.protocol.agreement import Agreement, parse_announcement
from shufflerl.network.protocol.sources import Users
from shufflerl.network.protocol.wire import Action, Exclusion, Opening, Signed, State, Transport
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import SQLiteStore
from shufflerl.noise import PoissonNoise
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import ShuffledPoisson
from tests.network.coordinator.test_coordinator import ENV, MDP
from tests.support.network_world import QUERY, crash_at, new_identity, protocol_of

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

#: What is left of delta if noise that does not fit into a report has its part.
DELTA = 1e-5 - (1 + math.exp(8.0)) * math.exp(-35)
RUN = Run(
    MDP.problem(80), "sdp-pe", Budget(8.0, 1e-5), 7, {"first": 8}, transport="sums", excludable=0.2, noise="users"
)
#: What a user does to its vector; None makes its seed unreadable.
Tamper = Callable[[masking.Words], None] | None


class System:
    """A coordinator and a shuffler in one process."""

    def __init__(self, folder: Path, run: Run = RUN) -> None:
        self.folder, self.run = folder, run
        self.coordinator = Coordinator(folder, run)
        self.enrolment = new_identity()
        self.shuffler = Shuffler(
            SQLiteStore(None),
            new_identity(),
            self.coordinator.identity.public,
            self.enrolment.public,
            Limits(min_batch_size=1),
        )

    def mint(self) -> bytes:
        return crypto.mint(self.enrolment)

    def restart(self) -> None:
        self.coordinator.close()
        self.coordinator = Coordinator(self.folder, self.run)

    @property
    def pending(self) -> tuple[int, int, Signed]:
        pending = self.coordinator.pending
        assert pending is not None
        return pending

    @property
    def agreed(self) -> Agreement:
        return parse_announcement(self.pending[2].payload)

    def fill(self, *tampers: Tamper) -> IntArray:
        """Users fill the batch, the first of them tampered with; what all whose seed can be read have sent."""
        self.shuffler.announce(self.pending[2])
        agreed = self.agreed
        task, number, attempt = agreed.announcement.task, agreed.announcement.batch, agreed.announcement.attempt
        opening = wire.decode(Opening, self.shuffler.current(task).opening.payload)
        sent = np.zeros(agreed.query.size, dtype=np.int64)
        for user in range(agreed.batch.users):
            tags = randomize_episode(agreed, play(ENV, agreed))
            report = seal_report(Checked(agreed, opening.envelope_key), tags, self.mint())
            if user < len(tampers):
                report = self.tampered(agreed, opening, tampers[user], tags)
            if user >= len(tampers) or tampers[user] is not None:
                np.add.at(sent, tags, 1)
            (outcome,) = self.shuffler.upload(task, [(number, attempt, report)])
            assert outcome.problem is None
        assert self.shuffler.advance()
        return sent

    def tampered(self, agreed: Agreement, opening: Opening, tamper: Tamper, tags: IntArray) -> wire.Report:
        token, seed = self.mint(), secrets.token_bytes(32)
        vector = masking.words(masking.masked(tags, seed, agreed.query.size, agreed.word_bytes), 2).copy()
        key, info = crypto.public_box_key(agreed.announcement.tag_key), agreed.seed_info
        if tamper is None:
            info += b"?"
        else:
            tamper(vector)
        report_id = crypto.report_id(agreed.announcement.task, token)
        text = token + crypto.seal(key, info, seed) + vector.tobytes()
        sealed = crypto.seal(crypto.public_box_key(opening.envelope_key), agreed.envelope_info(report_id), text)
        return wire.Report(report_id=report_id, envelope=sealed)

    def exclude(self) -> Exclusion:
        """The coordinator opens the seeds and tells the shuffler, which sums."""
        number, attempt, _ = self.pending
        if self.coordinator.exclusion is None:
            self.coordinator.open_seeds([self.shuffler.seeds(self.coordinator.command(number, attempt, Action.seeds))])
        said = self.coordinator.exclusion
        assert said is not None
        self.shuffler.exclude(said)
        assert self.shuffler.advance()
        return wire.decode(Exclusion, said.payload)

    def secrets(self) -> tuple[bytes, bytes]:
        """The first batch's key and opened seeds."""
        secret = self.coordinator.store.secrets(0)
        assert secret is not None
        assert secret.seeds is not None
        return secret.key, secret.seeds

    def release(self) -> list[bytes]:
        number, attempt, _ = self.pending
        status = self.shuffler.status(self.coordinator.task)
        assert status.state == State.released
        commands = (self.coordinator.command(number, attempt, Action.collect, chunk) for chunk in range(status.chunks))
        return [self.shuffler.collect(command) for command in commands]


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_a_run_from_beginning_to_end(system: System) -> None:
    values = []
    while system.coordinator.pending is not None:
        sent = system.fill()
        protocol = protocol_of(system.agreed)
        assert system.exclude().positions == []
        system.coordinator.absorb(system.release())
        values.append((sent - protocol.users * float(protocol.rate)).tolist())
        system.restart()
    records = system.coordinator.records
    assert [record.values.tolist() for record in records] == values
    assert {record.transport for record in records} == {Transport.sums}
    assert sum(record.batch.users for record in records) == 80
    assert [record.messages for record in records] == [record.batch.users for record in records]
    assert system.coordinator.ledger.spent <= 8.0
    certificate = system.coordinator.certificate()
    assert certificate.epsilon <= 8.0
    assert "added up under masks" in certificate.mechanism
    assert "adding shuffler" in certificate.assumptions
    assert "honest shuffler" not in certificate.assumptions


@pytest.mark.parametrize(
    ("transport", "trusted"),
    [
        ("tags", {"honest shuffler"}),
        ("sums", {"adding shuffler"}),
        ("auto", {"honest shuffler", "adding shuffler"}),
    ],
)
def test_a_certificate_says_what_the_shuffler_is_trusted_with(
    transport: Literal["tags", "sums", "auto"], trusted: set[str], tmp_path: Path
) -> None:
    coordinator = Coordinator(tmp_path, dataclasses.replace(RUN, transport=transport))
    certificate = coordinator.certificate()
    assert {name for name in certificate.assumptions if "shuffler" in name} == trusted
    assert set(ShuffledPoisson.assumptions) - {"honest shuffler"} <= set(certificate.assumptions)
    assert ("shuffled per batch" in certificate.mechanism) == ("honest shuffler" in trusted)
    assert ("added up under masks" in certificate.mechanism) == ("adding shuffler" in trusted)
    coordinator.close()


def test_who_is_excluded_is_counted_nowhere(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, noise, users of the release and the charge are of those who were summed; all have played."""
    users = system.agreed.batch.users
    assert system.agreed.announcement.excludable == int(0.2 * users) >= 1
    sent = system.fill(None)
    protocol = protocol_of(system.agreed)
    mean = protocol.noise.mean
    assert len(system.exclude().positions) == 1
    seen: list[Release] = []
    observe = system.coordinator.learner.observe

    def watched(release: Release) -> None:
        seen.append(release)
        observe(release)

    monkeypatch.setattr(system.coordinator.learner, "observe", watched)
    system.coordinator.absorb(system.release())
    (record,) = system.coordinator.records
    assert record.values.tolist() == (sent - (users - 1) * float(protocol.rate)).tolist()
    assert (record.batch.users, record.messages, record.invalid) == (users - 1, users, 1)
    assert record.noise == seen[0].noise == PoissonNoise(mean * (users - 1) / users)
    assert seen[0].batch == record.batch
    assert seen[0].added_variance == record.noise.variance
    spent = privacy_loss(PoissonNoise(mean * (1 - 1 / users)), protocol.query.changed_counters).epsilon(DELTA)
    assert system.coordinator.ledger.spent == pytest.approx(spent, rel=1e-9)
    assert system.coordinator.ledger.spent <= 8.0
    assert system.coordinator.learner.episodes_played == users


def test_the_ledger_has_what_the_noise_of_the_honest_who_were_summed_costs(tmp_path: Path) -> None:
    """Whoever was excluded may have been honest: its noise is missing from that of the honest fraction."""
    system = System(tmp_path, dataclasses.replace(RUN, honest_fraction=0.7))
    said, query = system.agreed.announcement, system.agreed.batch.query
    honest = (0.7 * said.users - 1) * protocol_of(system.agreed).noise.mean / said.users
    system.fill(None)
    system.exclude()
    system.coordinator.absorb(system.release())
    spent = privacy_loss(PoissonNoise(honest), query.changed_counters).epsilon(DELTA)
    assert system.coordinator.ledger.spent == pytest.approx(spent, rel=1e-9)
    assert spent <= 8.0


def test_too_many_that_cannot_be_opened_are_told_and_not_summed(system: System) -> None:
    users = system.agreed.batch.users
    system.fill(*[None] * users)
    assert system.exclude().positions == list(range(users))
    assert system.release() == []
    system.coordinator.reopen(filled=True)
    sent = system.fill()
    assert system.coordinator.exclusion is None  # of another attempt, nothing was said yet
    rate = float(protocol_of(system.agreed).rate)
    system.exclude()
    system.coordinator.absorb(system.release())
    assert system.coordinator.records[0].values.tolist() == (sent - users * rate).tolist()
    assert system.coordinator.ledger.releases == ["batch 0, attempt 1"]


def shift(by: int) -> Tamper:
    def tamper(vector: masking.Words) -> None:
        vector[3:4] += np.uint16(by % 2**16)

    return tamper


@pytest.mark.parametrize("by", [-20_000, 2_000, 30_000])
def test_impossible_sums_are_refused_and_asked_again(system: System, by: int) -> None:
    system.fill(shift(by))
    system.exclude()
    before = system.coordinator.learner.save()
    with pytest.raises(SpoiltSumError, match=r"Counter 3 of batch 0, attempt 0, is .* nobody can tell which"):
        system.coordinator.absorb(system.release())
    assert system.coordinator.records == []
    assert system.coordinator.learner.save() == before
    assert system.pending[:2] == (0, 1)
    system.fill()
    system.exclude()
    system.coordinator.absorb(system.release())
    assert system.coordinator.ledger.releases == ["batch 0", "batch 0, attempt 1"]


class ByLot(System):
    """Whose users come if they are drawn."""

    def mint(self) -> bytes:
        key = wire.decode(Opening, self.shuffler.current(self.coordinator.task).opening.payload).envelope_key
        return next(token for token in iter(super().mint, b"") if self.agreed.draws(key, token, 0))


def test_a_spoilt_sum_draws_no_more_liars_than_before(tmp_path: Path) -> None:
    everybody = 800
    system = ByLot(tmp_path, dataclasses.replace(RUN, problem=MDP.problem(everybody), admission=2.0))
    users = system.agreed.batch.users
    for spoilt in range(3):
        assert system.agreed.drawn == pytest.approx(2 * users / (everybody - spoilt * users))
        system.fill(shift(30_000))
        system.exclude()
        with pytest.raises(SpoiltSumError):
            system.coordinator.absorb(system.release())


def test_a_possible_falsehood_is_not_seen(system: System) -> None:
    """What the documentation warns of: within what honest users could have done, one user moves a counter at will."""
    sent = system.fill(shift(5))
    rate, users = float(protocol_of(system.agreed).rate), system.agreed.batch.users
    system.exclude()
    system.coordinator.absorb(system.release())
    assert (system.coordinator.records[0].values - (sent - users * rate))[3] == pytest.approx(5)


@pytest.mark.parametrize("label", ["seeds opened", "ledger", "charged", "open", "learner save", "saved"])
def test_a_crash_at_any_point_changes_nothing(system: System, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = system.fill(None)
    values = (sent - (system.agreed.batch.users - 1) * float(protocol_of(system.agreed).rate)).tolist()

    def go_on() -> None:
        if system.pending[0] == 0:
            system.exclude()
            system.coordinator.absorb(system.release())

    with crash_at(label, monkeypatch):
        go_on()
    said = system.coordinator.exclusion
    system.restart()
    assert system.coordinator.exclusion == said
    go_on()
    assert system.coordinator.records[0].values.tolist() == values
    assert system.coordinator.ledger.releases == ["batch 0"]
    assert system.pending[0] == 1


def test_seeds_and_keys_of_answered_batches_are_gone(system: System) -> None:
    system.fill()
    system.exclude()
    key, seeds = system.secrets()
    everything = b"".join(path.read_bytes() for path in system.folder.iterdir())
    assert seeds[:32] in everything
    system.coordinator.absorb(system.release())
    everything = b"".join(path.read_bytes() for path in system.folder.iterdir())
    assert not any(secret in everything for secret in (key, seeds[:32], seeds[-32:]))


def test_seeds_and_keys_of_an_attempt_that_came_to_nothing_are_gone(system: System) -> None:
    system.fill(shift(30_000))
    system.exclude()
    key, seeds = system.secrets()
    drawn = {seeds[start : start + 32] for start in range(0, len(seeds), 32)} - {bytes(32)}  # the tampered one's
    with pytest.raises(SpoiltSumError):
        system.coordinator.absorb(system.release())
    everything = b"".join(path.read_bytes() for path in system.folder.iterdir())
    assert not any(secret in everything for secret in (key, *drawn))


def test_a_shuffler_that_hands_over_other_than_was_agreed_is_refused(system: System) -> None:
    system.fill()
    number, attempt, _ = system.pending
    seeds = system.shuffler.seeds(system.coordinator.command(number, attempt, Action.seeds))
    with pytest.raises(ContractError, match="nothing is summed"):
        system.coordinator.open_seeds([seeds[: -wire.SEALED_SEED_BYTES]])
    system.coordinator.close()
    backup = (system.folder / "coordinator.db").read_bytes()
    system.coordinator = Coordinator(system.folder, system.run)
    system.exclude()
    with pytest.raises(ContractError, match="expected 48"):
        system.coordinator.absorb([b"".join(system.release())[:-2]])
    release = system.release()
    system.coordinator.close()
    (system.folder / "coordinator.db").write_bytes(backup)
    system.coordinator = Coordinator(system.folder, system.run)
    with pytest.raises(ContractError, match="old backup"):
        system.coordinator.absorb(release)


def test_one_users_vector_handed_over_again_and_again_is_not_summed(tmp_path: Path) -> None:
    """By a shuffler that hands over its seed for every user's, and its masked vector as often: far above any noise."""
    system = System(tmp_path, dataclasses.replace(RUN, noise="servers"))
    agreed, (_, attempt, signed) = system.agreed, system.pending
    users, tags, seed = agreed.batch.users, agreed.source.tags(play(ENV, agreed)), bytes(range(32))
    sealed = crypto.seal(crypto.public_box_key(agreed.announcement.tag_key), agreed.seed_info, seed)
    vector = masking.words(masking.masked(tags, seed, agreed.query.size, agreed.word_bytes), agreed.word_bytes)
    before = system.coordinator.learner.save()
    system.shuffler.announce(signed)
    system.coordinator.open_seeds([users * sealed])
    assert system.coordinator.exclusion is not None
    said = wire.decode(Exclusion, system.coordinator.exclusion.payload)
    assert said.positions == list(range(1, users))
    with pytest.raises(SpoiltSumError):
        system.coordinator.absorb([np.asarray(users * vector, dtype=vector.dtype).tobytes()])
    assert system.coordinator.learner.save() == before
    assert system.pending[:2] == (0, attempt + 1)


@pytest.mark.slow(2)
def test_a_worker_that_is_killed_is_told_and_replaced() -> None:
    key, opener = crypto.new_box_key(), Opener(2)
    sealed = [crypto.seal(key.public_key(), b"info", bytes([number]) * 32) for number in range(2)]
    opener.starmap(math.sqrt, [(1.0,), (4.0,)])
    with pytest.raises(LostWorkersError, match="A process that opens messages has died"):
        opener.starmap(os._exit, [(9,), (9,)])
    assert opener.seeds(key.private_bytes_raw(), b"info", sealed) == [b"\0" * 32, b"\1" * 32]
    opener.close()


def test_workers_unmask_as_one_process_does() -> None:
    key = crypto.new_box_key()
    seeds = [bytes([number]) * 32 for number in range(9)]
    sealed = b"".join(crypto.seal(key.public_key(), b"info", seed) for seed in seeds)
    spoilt = sealed[:-1] + b"?"
    opener = Opener(2)
    raw = key.private_bytes_raw()
    assert opener.seeds(raw, b"info", [sealed, spoilt]) == [*seeds, *[None] * 9]  # those that came again left out
    assert Opener().seeds(raw, b"info", [sealed, spoilt]) == [*seeds, *[None] * 9]
    assert Opener().seeds(raw, b"info", [spoilt]) == [*seeds[:-1], None]
    masks = opener.masks(seeds, 50, 4)
    opener.close()
    assert masks.tolist() == Opener().masks(seeds, 50, 4).tolist() == masking.sum_of_masks(seeds, 50, 4).tolist()


def test_a_learner_takes_an_answer_of_fewer_users_but_not_of_more() -> None:
    learner = learners.make("sdp-pe", RUN.problem, 7, first=8)
    batch = learner.next_batch()
    assert batch is not None
    noise = PoissonNoise(1.0)
    more, fewer = (dataclasses.replace(batch, users=batch.users + change) for change in (1, -1))
    with pytest.raises(ContractError, match="asked for"):
        learner.observe(Release(more, np.zeros(batch.query.size), noise, 1.0))
    learner.observe(Release(fewer, np.zeros(batch.query.size), noise, 1.0))
    assert learner.episodes_played == batch.users


def test_transports_by_cost() -> None:
    """Few users share much noise: tags are dear. With many each sends few; vectors are as long as ever."""
    big = Users(CountQuery.everything(Problem(5, 50, 5, 100)), 100, PoissonNoise(300.0))
    after = costs.switch_over(big)
    assert after is not None
    for users, best in ((after - 1, Transport.sums), (after, Transport.tags), (2**40, Transport.tags)):
        assert costs.cheaper(big.of(users)) == best
    assert costs.of_tags(big).bytes == wire.TOKEN_BYTES + 48 + 52 * big.tags_per_report
    assert costs.of_sums(big).bytes == wire.TOKEN_BYTES + 128 + 2 * big.query.size
    assert "more than can be summed" in costs.in_words(big.of(2**40))
    assert costs.switch_over(Users(QUERY, 100, PoissonNoise(300.0))) is None
    figures = costs.compared(1.0, 1e-5, env="riverswim", shape=(1, 1, 1), users=1000, noise="users")
    assert (figures["counters"], figures["cheaper"]) == (256, "sums")
    assert "any number" in costs.as_text(figures)
    figures = costs.compared(1.0, 1e-5, env=None, shape=(10, 100, 10), users=10**6, noise="users")
    assert f"from {figures['tags_cheaper_from_users']:,} users on" in costs.as_text(figures)


def test_what_all_would_refuse_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_MAX_NOISE", 1)
        with pytest.raises(InvalidInputError, match="noise tags; expected at most 1"):
            Coordinator(tmp_path, RUN)
    other = dataclasses.replace(RUN, seed=8)  # nothing was stored: the folder is free for another run
    Coordinator(tmp_path, other).close()


def test_auto_takes_what_is_cheaper_and_settings_are_checked(tmp_path: Path) -> None:
    runs = (dataclasses.replace(RUN, transport="auto"), dataclasses.replace(RUN, transport="tags"))
    for run, expected in zip(runs, (Transport.sums, Transport.tags), strict=True):
        coordinator = Coordinator(tmp_path / run.transport, run)
        pending = coordinator.pending
        assert pending is not None
        said = parse_announcement(pending[2].payload).announcement
        assert said.transport == expected
        assert (said.excludable > 0) == (expected == Transport.sums)
        coordinator.close()
    with pytest.raises(InvalidInputError, match="transport"):
        dataclasses.replace(RUN, transport="pigeons")  # type: ignore[arg-type]
    for share in (-0.1, 0.5, 1.0):
        with pytest.raises(InvalidInputError, match="excludable"):
            dataclasses.replace(RUN, honest_fraction=0.5, excludable=share)
