"""The audit of noise by the servers: it passes what is right, and finds every planted fault, where it harms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest

from shufflerl.arrays import IntArray
from shufflerl.network.audit import Network
from shufflerl.network.coordinator import coordinator, opening
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.node import reporting
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.agreement import Agreement, Terms
from shufflerl.network.shuffler import dummies, mixing, shuffler
from shufflerl.noise import TruncatedLaplace
from shufflerl.privacy import accounting
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import AuditReport, audit, auditing
from shufflerl.privacy.audit.auditing import PARTIAL_QUERIES
from shufflerl.privacy.ledger import Ledger
from shufflerl.privacy.protocol import noise_counts
from tests.support.network_world import pretend_to_seal

Transport = Literal["tags", "sums"]
Plant = Callable[[pytest.MonkeyPatch], None]
BUDGET, FEW = Budget(4.0, 1e-5), 12


@pytest.fixture(autouse=True)
def _pretend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        pretend_to_seal(monkeypatch)
    monkeypatch.setattr(auditing, "MIN_SAMPLES", FEW)
    monkeypatch.setattr(auditing, "PARTIAL_QUERIES", PARTIAL_QUERIES[2:3])
    monkeypatch.setattr(auditing, "CROWD", 8)


def attack(transport: Transport, samples: int = FEW) -> AuditReport:
    return audit(BUDGET, samples=samples, level=1e-6, system=Network(transport, "servers"))


@pytest.mark.slow(2)
@pytest.mark.parametrize("transport", ["tags", "sums"])
def test_what_is_right_passes(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "sums":  # where nothing is sealed, and more costs little
        monkeypatch.setattr(auditing, "PARTIAL_QUERIES", PARTIAL_QUERIES)
    report = attack(transport, 20)
    assert report.passed, report
    assert report.epsilon_lower_bound < 4
    assert report.path == f"servers-{transport}"
    names = {finding.name for finding in report.tests}
    assert {f"noise law, {observer}" for observer in ("coordinator", "shuffler")} <= names


@pytest.mark.slow(2)
def test_real_seals_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "MIN_SAMPLES", 5)
    assert attack("tags", 5).passed


# Faults of either server's draw.


def draw_from_a_known_seed(patch: pytest.MonkeyPatch, server: ModuleType) -> None:
    def drawn(law: Any, size: int) -> IntArray:
        return np.asarray(np.rint(law.sample(np.random.default_rng(0), size) + law.mean), dtype=np.int64)

    patch.setattr(server, "noise_counts", drawn)


def draw_half(patch: pytest.MonkeyPatch, server: ModuleType) -> None:
    patch.setattr(server, "noise_counts", lambda law, size: noise_counts(law, size) // 2)


# Faults of the shuffler, which the coordinator could make use of.


def no_dummies_on_one_counter(patch: pytest.MonkeyPatch) -> None:
    real = noise_counts

    def drawn(law: Any, size: int) -> IntArray:
        counts = real(law, size)
        counts[0] = 0
        return counts

    patch.setattr(dummies, "noise_counts", drawn)


def dummies_from_a_known_seed(patch: pytest.MonkeyPatch) -> None:
    draw_from_a_known_seed(patch, dummies)


def half_the_dummies(patch: pytest.MonkeyPatch) -> None:
    draw_half(patch, dummies)


def the_same_dummies_on_all_counters(patch: pytest.MonkeyPatch) -> None:
    real = noise_counts
    patch.setattr(dummies, "noise_counts", lambda law, size: np.repeat(real(law, 1), size))
    patch.setattr(dummies, "SLICE", 10**9)


def dummies_drawn_again_for_the_release(patch: pytest.MonkeyPatch) -> None:
    def again(store: Any, id: Any, agreement: Agreement, pieces: range) -> mixing.Tags:
        sealed = [dummies.sealed(wire.encode(agreement.announcement), piece) for piece in pieces]
        groups = [dummies.slices(agreement)[piece][0] for piece in pieces]
        rows = [np.frombuffer(some, dtype=np.uint8).reshape(-1, 52) for some in sealed]
        return mixing.Tags(np.repeat(groups, [len(some) for some in rows]), np.concatenate(rows))

    patch.setattr(mixing, "_dummies", again)

    def added(store: Any, id: Any, agreement: Agreement) -> Any:
        store.keep(id, "noise", dummies.drawn_dummies(agreement.source).astype("<u2").tobytes())
        return dummies.drawn_dummies(agreement.source).astype("<u2")

    patch.setattr(dummies, "added", added)


def dummies_after_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixing, "permuted", lambda rows: rows)


# Faults of the coordinator, which the shuffler could make use of.


def no_noise_of_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_own_noise", lambda self, number, agreed: np.zeros(agreed.query.size, np.int64))


def its_noise_drawn_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Coordinator,
        "_own_noise",
        lambda self, number, agreed: noise_counts(agreed.source.own, agreed.query.size),
    )


def its_noise_from_a_known_seed(patch: pytest.MonkeyPatch) -> None:
    draw_from_a_known_seed(patch, coordinator)


def half_of_its_noise(patch: pytest.MonkeyPatch) -> None:
    draw_half(patch, coordinator)


# Faults of calibration and of the shape of reports.


def a_cut_that_the_accountant_ignores(patch: pytest.MonkeyPatch) -> None:
    """And that nodes do not look at: they would refuse it, and nothing would be played."""
    real = accounting.calibrate_dummies

    def cut(*given: Any) -> TruncatedLaplace:
        law = real(*given)
        assert isinstance(law, TruncatedLaplace)
        return TruncatedLaplace(law.scale, 5)

    patch.setattr(accounting, "calibrate_dummies", cut)
    patch.setattr(Terms, "check", lambda *_: None)
    patch.setattr(Ledger, "record", lambda *_, **__: None)


def two_tags_in_a_group_accepted(patch: pytest.MonkeyPatch) -> None:
    def lenient(self: Any, id: Any, report: Any) -> None:
        return None

    patch.setattr(shuffler.Shuffler, "_check_report", lenient)


def a_tag_of_another_group_counted(patch: pytest.MonkeyPatch) -> None:
    def count_all(self: Any, key: bytes, info: bytes, groups: Any, tags: Any) -> opening.Counted:
        self.key = key
        everything = range(groups[-1].stop)
        return opening.count(key, info, everything, b"".join(b"".join(some) for some in tags))

    patch.setattr("shufflerl.network.audit._Opener.count_all", count_all)


TAGS_AND_SUMS: dict[Plant, str] = {
    no_dummies_on_one_counter: "noise law, coordinator",
    dummies_from_a_known_seed: "freshness, coordinator",
    half_the_dummies: "noise law, coordinator",
    the_same_dummies_on_all_counters: "independence, coordinator",
    dummies_drawn_again_for_the_release: "schema",
    no_noise_of_its_own: "schema",
    its_noise_drawn_twice: "schema",
    its_noise_from_a_known_seed: "freshness, shuffler",
    half_of_its_noise: "noise law, shuffler",
    a_cut_that_the_accountant_ignores: "calibration, coordinator",
}
TAGS_ALONE: dict[Plant, str] = {
    dummies_after_the_others: "permutation",
    two_tags_in_a_group_accepted: "lies",
    a_tag_of_another_group_counted: "lies",
}


def needed(plant: Plant) -> int:
    """How often to play, so that no fault is missed by chance: one draw for all counters varies from batch to batch."""
    return 40 if plant is the_same_dummies_on_all_counters else FEW


@pytest.mark.slow(1)
@pytest.mark.parametrize("plant", [*TAGS_AND_SUMS, *TAGS_ALONE], ids=lambda plant: plant.__name__)
def test_planted_faults_are_found_in_tags(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert (TAGS_AND_SUMS | TAGS_ALONE)[plant] in attack("tags", needed(plant)).failures


@pytest.mark.slow(1)
@pytest.mark.parametrize("plant", TAGS_AND_SUMS, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found_in_sums(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert TAGS_AND_SUMS[plant] in attack("sums", needed(plant)).failures


def test_reports_of_different_lengths_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = crypto.seal
    monkeypatch.setattr(shuffler.Shuffler, "_check_report", lambda self, id, report: None)
    real, calls = reporting.sealed_tags, itertools.count()

    def longer(agreement: Agreement, tags: Any) -> list[bytes]:
        """By none, one or two in turn: drawn at random, all four of a batch might be as long."""
        sealed = real(agreement, tags)
        key = crypto.public_box_key(agreement.announcement.tag_key)
        return [*sealed, *(seal(key, agreement.tag_info, bytes(4)) for _ in range(next(calls) % 3))]

    monkeypatch.setattr(reporting, "sealed_tags", longer)
    report = attack("tags")
    (schema,) = (finding for finding in report.tests if finding.name == "schema")
    assert not schema.passed
    assert "bytes: their length may tell" in schema.explanation
