"""The coordinator without sockets: it learns from each release once, whatever happens, as the simulation would."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from shufflerl.arrays import IntArray
from shufflerl.counts import Trajectories
from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import BudgetExceededError, ContractError, PrivacyWarning, StateMismatchError, StorageError
from shufflerl.learners.base import Learner
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.opening import Opener, count
from shufflerl.network.coordinator.run import Run
from shufflerl.network.node.reporting import Checked, play, randomize_episode, seal_report
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement, parse_announcement
from shufflerl.network.protocol.wire import Action, ProblemError, Reason
from shufflerl.network.shuffler.mixing import packed, permuted
from shufflerl.noise import PoissonNoise
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.loss import privacy_loss
from tests.support.network_world import crash_at, pretend_to_seal, protocol_of

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

MDP = riverswim(np.random.default_rng(0), n_states=2, horizon=2)
RUN = Run(MDP.problem(60), "sdp-pe", Budget(8.0, 1e-5), 7, {"first": 2}, noise="users")
#: Batches that leave counters out, each with less noise.
ASKING_LESS = Run(MDP.problem(1500), "optimistic", Budget(1.0, 1e-5), 7, {}, noise="users")
ENV = TabularEnv(MDP)


def answer(coordinator: Coordinator) -> tuple[list[bytes], IntArray]:
    """The release of the pending batch as the shuffler would make it, and the tags in it, counted."""
    agreed = asked(coordinator)
    reports = [randomize_episode(agreed, play(ENV, agreed)) for _ in range(agreed.batch.users)]
    return mixed(agreed, reports), np.bincount(np.concatenate(reports), minlength=agreed.query.size)


def seeded_answer(coordinator: Coordinator, users: CountPopulation) -> list[bytes]:
    """A release of the same law that is the same every time."""
    agreed = asked(coordinator)
    counts = users.play(agreed.batch).values
    counts = counts + users.rng.poisson(agreed.source.noise(agreed.batch.users).mean, counts.shape)
    tags, most = np.repeat(np.arange(len(counts)), counts), agreed.max_messages
    assert len(tags) <= agreed.batch.users * most
    return mixed(agreed, [tags[user * most : (user + 1) * most] for user in range(agreed.batch.users)])


def asked(coordinator: Coordinator) -> Agreement:
    assert coordinator.pending is not None
    return parse_announcement(coordinator.pending[2].payload)


def key_of(coordinator: Coordinator) -> bytes:
    """That of the first batch."""
    secret = coordinator.store.secrets(0)
    assert secret is not None
    return secret.key


def mixed(agreed: Agreement, reports: list[IntArray]) -> list[bytes]:
    key = crypto.new_box_key()
    checked = Checked(agreed, key.public_key().public_bytes_raw())
    sealed = [seal_report(checked, tags, bytes(wire.TOKEN_BYTES)) for tags in reports]
    opened = [crypto.unseal(key, agreed.envelope_info(report.report_id), report.envelope) for report in sealed]
    return handed_over(b"".join(envelope[wire.TOKEN_BYTES :] for envelope in opened))


def handed_over(tags: bytes) -> list[bytes]:
    """A release of sealed tags of one group."""
    return list(packed([(0, permuted(np.frombuffer(tags, dtype=np.uint8).reshape(-1, wire.SEALED_TAG_BYTES)))]))


def expected(coordinator: Coordinator, sent: IntArray) -> list[float]:
    agreed = asked(coordinator)
    values: list[float] = (sent - agreed.batch.users * float(protocol_of(agreed).rate)).tolist()
    return values


@pytest.mark.slow
def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    """The learner is handed exactly what was sent, less the expected noise; the ledger has every batch, in order."""
    coordinator = Coordinator(tmp_path, RUN)
    values = []
    while coordinator.pending is not None:
        chunks, sent = answer(coordinator)
        values.append(expected(coordinator, sent))
        coordinator.absorb(chunks)
    assert [record.values.tolist() for record in coordinator.records] == values
    assert sum(record.batch.users for record in coordinator.records) == 60
    assert coordinator.ledger.releases == [f"batch {number}" for number in range(len(values))]
    last = len(values) - 1
    assert [action for _, _, action in coordinator.store.unacknowledged()] == [Action.scrub] * last + [Action.finish]
    for number in range(last):
        coordinator.store.acknowledged(number)
    assert coordinator.store.unacknowledged() == [(last, 0, Action.finish)]
    coordinator.store.acknowledged(last)
    assert coordinator.store.unacknowledged() == []
    assert 0 < coordinator.ledger.spent <= 8.0
    assert coordinator.certificate().epsilon <= 8.0
    assert coordinator.policy is not None
    with pytest.raises(ContractError, match="learned from once"):
        coordinator.absorb([])
    coordinator.close()


@pytest.mark.parametrize("honest", [1.0, 0.8, 0.5])
def test_the_ledger_has_what_the_noise_of_the_honest_costs(tmp_path: Path, honest: float) -> None:
    """What the others add is not counted on, though it is announced, and though it is there."""
    coordinator = Coordinator(tmp_path, dataclasses.replace(RUN, honest_fraction=honest))
    said, query = asked(coordinator).announcement, asked(coordinator).batch.query
    coordinator.absorb(answer(coordinator)[0])
    assert isinstance(said.noise, wire.NoiseByUsers)
    each = said.noise.mean / said.users
    cost = privacy_loss(PoissonNoise(honest * said.users * each), query.changed_counters)
    rare = (1 + math.exp(8.0)) * math.exp(-35)  # that some of it does not fit into a report
    assert coordinator.ledger.spent == pytest.approx(cost.epsilon(1e-5 - rare), rel=1e-9)
    assert cost.epsilon(1e-5) < coordinator.ledger.spent <= 8.0
    coordinator.close()


@pytest.mark.parametrize("transport", ["tags", "sums", "auto"])
@pytest.mark.parametrize("honest", [1.0, 0.6])
def test_the_certificate_says_what_its_own_noise_is_worth(
    tmp_path: Path, honest: float, transport: Literal["tags", "sums", "auto"]
) -> None:
    """Noise, honest users and exclusions in it give its epsilon, for a user who takes part as often as it says: once.

    And the noise is what users are told to add.
    """
    run = Run(MDP.problem(100), "ucbvi", Budget(2.0, 1e-5), 7, {"batch": 100}, honest, transport, 0.1, "users")
    coordinator = Coordinator(tmp_path, run)
    certificate, said = coordinator.certificate(), asked(coordinator).announcement
    left = honest - (0.0 if transport == "tags" else 0.1)
    loss = privacy_loss(PoissonNoise(certificate.noise_sd**2 * left), 6, certificate.participations)
    assert loss.epsilon(certificate.delta) == pytest.approx(certificate.epsilon, rel=1e-6)
    assert certificate.epsilon == pytest.approx(2.0, rel=1e-6)
    assert (certificate.delta, certificate.budget_epsilon, certificate.honest_fraction) == (1e-5, 2.0, honest)
    assert (certificate.changed_counters, certificate.participations) == (6, 1)
    if transport != "auto":  # which states what is needed where sums are sent, and may send tags
        assert isinstance(said.noise, wire.NoiseByUsers)
        assert said.noise.mean == pytest.approx(certificate.noise_sd**2, rel=1e-9)
    assert "1 time" in str(certificate)
    coordinator.close()


@pytest.mark.slow
def test_every_batch_has_a_key_of_its_own(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    keys = []
    while coordinator.pending is not None:
        keys.append(asked(coordinator).announcement.tag_key)
        coordinator.reopen()
        keys.append(asked(coordinator).announcement.tag_key)
        coordinator.absorb(answer(coordinator)[0])
    assert len(set(keys)) == len(keys) > 2
    coordinator.close()


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUN, ASKING_LESS], ids=["sdp-pe", "optimistic"])
def test_the_simulated_learner_takes_the_same_decisions_on_the_same_releases(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_seal(monkeypatch)  # what is sealed how is not what is tested
    users = CountPopulation(MDP, 3)
    coordinator = Coordinator(tmp_path, run)
    while coordinator.pending is not None:
        coordinator.absorb(seeded_answer(coordinator, users))
        coordinator.close()
        coordinator = Coordinator(tmp_path, run)  # a restart after every batch changes nothing
    simulated = run.make_learner()
    for record in coordinator.records:
        assert simulated.next_batch() == record.batch
        simulated.observe(record.release)
    assert simulated.next_batch() is None
    assert simulated.save() == coordinator.learner.save()
    touched = [record.batch.query.touched_counters for record in coordinator.records]
    assert (min(touched) < 3) == (run is ASKING_LESS)
    assert coordinator.ledger.spent <= coordinator.certificate().epsilon == run.budget.epsilon
    coordinator.close()


@pytest.mark.parametrize("label", ["ledger", "charged", "open", "learner save", "saved"])
def test_a_crash_at_any_point_loses_nothing_and_counts_nothing_twice(
    tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    coordinator.absorb(answer(coordinator)[0])
    chunks, sent = answer(coordinator)
    values = expected(coordinator, sent)
    with crash_at(label, monkeypatch):
        coordinator.absorb(chunks)
    coordinator.close()
    coordinator = Coordinator(tmp_path, RUN)
    assert coordinator.pending is not None
    if label != "saved":
        assert coordinator.pending[0] == 1
        assert len(coordinator.records) == 1
        coordinator.absorb(chunks)
    assert coordinator.pending[0] == 2
    assert coordinator.records[1].values.tolist() == values
    assert coordinator.ledger.releases == ["batch 0", "batch 1"]
    assert coordinator.store.unacknowledged() == [(0, 0, Action.scrub), (1, 0, Action.scrub)]
    coordinator.close()


def test_nothing_is_opened_that_the_ledger_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    chunks, _ = answer(coordinator)

    def refuse(*_: object) -> None:
        raise BudgetExceededError("overspent")

    monkeypatch.setattr(coordinator.ledger, "record", refuse)
    monkeypatch.setattr(Opener, "count_all", lambda *_: pytest.fail("opened before it was charged"))
    with pytest.raises(BudgetExceededError):
        coordinator.absorb(chunks)
    assert coordinator.records == []
    coordinator.close()


def test_a_learner_that_fails_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    chunks, _ = answer(coordinator)
    before = coordinator.learner.save()
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coordinator.absorb(chunks)
    assert coordinator.learner.save() == before
    coordinator.absorb(chunks)
    assert len(coordinator.records) == 1
    coordinator.close()


def test_an_aborted_batch_is_asked_again_with_a_new_key(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    stale, _ = answer(coordinator)
    before = coordinator.pending
    coordinator.reopen()
    after = coordinator.pending
    assert before is not None
    assert after is not None
    assert (after[0], after[1]) == (0, 1)
    old, new = (parse_announcement(one[2].payload) for one in (before, after))
    assert old.batch == new.batch
    assert old.announcement.tag_key != new.announcement.tag_key
    coordinator.absorb(stale)
    (record,) = coordinator.records
    assert record.invalid == record.messages > 0  # nothing of the first attempt can be read any more
    coordinator.close()


def test_keys_of_answered_batches_are_gone(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    key = key_of(coordinator)
    assert key in (tmp_path / "coordinator.db").read_bytes() + (tmp_path / "coordinator.db-wal").read_bytes()
    coordinator.absorb(answer(coordinator)[0])
    assert all(key not in path.read_bytes() for path in tmp_path.iterdir())
    coordinator.close()


def test_tags_that_are_no_tags_are_left_out_and_told(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    chunks, sent = answer(coordinator)
    agreed, values = asked(coordinator), expected(coordinator, sent)
    key = crypto.public_box_key(agreed.announcement.tag_key)
    outside = crypto.seal(key, agreed.tag_info, agreed.query.size.to_bytes(4))
    wrong_batch = crypto.seal(key, agreed.tag_info + b"x", (0).to_bytes(4))
    whole = b"".join(tags for chunk in chunks for _, tags in wire.sections(chunk))
    tags = [whole[start : start + 52] for start in range(0, len(whole), 52)]
    private = key_of(coordinator)
    padding = [tag for tag in tags if count(private, agreed.tag_info, range(1), tag).padding][:4]
    others = [tag for tag in tags if tag not in padding]
    wrong = [outside, wrong_batch, bytes(52), others[0]]  # the last of them once more
    for chunk in (b"".join([*tags, *wrong]), whole[52:]):
        with pytest.raises(ContractError, match="Is this its shuffler"):
            coordinator.absorb(handed_over(chunk))
    for chunk in (chunks[0] + b"short", chunks[0] + wire.SECTION.pack(0, 2) + bytes(52), wire.SECTION.pack(1, 0)):
        with pytest.raises(ContractError, match="Is this its shuffler"):
            coordinator.absorb([chunk])
    coordinator.absorb(handed_over(b"".join([*others, *wrong])))
    (record,) = coordinator.records
    assert (record.invalid, record.messages) == (4, sent.sum() + 4)
    assert record.values.tolist() == values
    coordinator.close()


def test_a_run_is_continued_with_its_own_settings_only(tmp_path: Path) -> None:
    Coordinator(tmp_path, RUN).close()
    for other, text in (
        (dataclasses.replace(RUN, seed=8), "seed was 7 and is 8 now"),
        (dataclasses.replace(RUN, budget=Budget(4.0, 1e-5)), "epsilon was 8.0 and is 4.0 now"),
        (dataclasses.replace(RUN, learner_parameters={}), "learner_parameters.first was 2 and is null now"),
        (
            dataclasses.replace(RUN, problem=MDP.problem(61), transport="sums"),
            'episodes was 60 and is 61 now, transport was "tags" and is "sums" now',
        ),
    ):
        with pytest.raises(StateMismatchError, match=f"begun with other settings: {text}\\. Start it with its own"):
            Coordinator(tmp_path, other)
    Coordinator(tmp_path, RUN).close()


def test_equal_runs_have_equal_identities() -> None:
    """In whatever order its settings were written: it must go on."""
    one, other = ({"first": 2, "pool": True}, {"pool": True, "first": 2})
    runs = [dataclasses.replace(RUN, learner_parameters=parameters) for parameters in (one, other)]
    assert runs[0] == runs[1]
    assert runs[0].identity == runs[1].identity


def test_a_run_in_a_folder_without_its_identity_is_not_given_another(tmp_path: Path) -> None:
    """A new one would be nobody that shuffler and nodes know, and the run could not go on."""
    Coordinator(tmp_path, RUN).close()
    (tmp_path / "identity.pem").rename(tmp_path / "aside")
    with pytest.raises(StorageError, match=r"has coordinator\.db but no identity\.pem"):
        Coordinator(tmp_path, RUN)
    assert not (tmp_path / "identity.pem").exists()
    (tmp_path / "aside").rename(tmp_path / "identity.pem")
    Coordinator(tmp_path, RUN).close()


def test_a_run_without_its_ledger_is_not_given_another(tmp_path: Path) -> None:
    """A new one would say that nothing was spent. Where nothing was learned, nothing was."""
    Coordinator(tmp_path, RUN).close()
    (tmp_path / "ledger.db").unlink()
    coordinator = Coordinator(tmp_path, RUN)
    coordinator.absorb(answer(coordinator)[0])
    coordinator.close()
    (tmp_path / "ledger.db").rename(tmp_path / "aside")
    with pytest.raises(StorageError, match=r"has batches that were learned from but no ledger\.db"):
        Coordinator(tmp_path, RUN)
    assert not (tmp_path / "ledger.db").exists()


def test_what_went_wrong_is_told_as_what_it_is(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    for reason, code, text in (
        (full, Reason.storage, "coordinator.db is full"),
        (OSError(5, "Input/output error"), Reason.storage, "Input/output error"),
        (StorageError("The ledger cannot be written."), Reason.storage, "ledger"),
        (ProblemError(Reason.below_minimum, "Too few."), Reason.below_minimum, "Too few"),
        (BudgetExceededError("Spent."), Reason.failed, "BudgetExceededError: Spent"),
        (RuntimeError("worker"), Reason.failed, "RuntimeError: worker"),
    ):
        told = coordinator.problem(reason)
        assert told.reason == code
        assert text in told.detail
    coordinator.close()


def test_weak_budgets_are_told() -> None:
    with pytest.warns(PrivacyWarning):
        dataclasses.replace(RUN, budget=Budget(20.0, 1e-5))


@pytest.mark.slow
def test_workers_count_as_one_process_does() -> None:
    key = crypto.new_box_key()
    tags = np.random.default_rng(0).integers(50, size=5000).tolist()
    chunk = b"".join(crypto.seal(key.public_key(), b"info", tag.to_bytes(4)) for tag in tags)
    alone = count(key.private_bytes_raw(), b"info", range(50), chunk)
    opener = Opener(2)
    together = opener.count_all(
        key.private_bytes_raw(), b"info", [range(50)], [[chunk[: 52 * 3000], chunk[52 * 3000 :]]]
    )
    opener.close()
    assert alone.counts.tolist() == together.counts.tolist() == np.bincount(tags, minlength=50).tolist()
    assert alone.invalid == together.invalid == 0


def test_an_episode_follows_a_policy_of_the_mixture(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, RUN)
    pending = coordinator.pending
    assert pending is not None
    agreed = parse_announcement(pending[2].payload)
    episode: Trajectories = play(ENV, agreed)
    policies = agreed.batch.mixture.policies
    fits = [(policies[m, [0, 1], episode.states[0]] == episode.actions[0]).all() for m in range(len(policies))]
    assert any(fits)
    assert wire.encode(agreed.announcement) == pending[2].payload
    coordinator.close()
