"""The audit of the networked system: what is planted into a role is caught, and the roles as they are pass.

Nothing here can be seeded. The sound system is tested at level 1e-5; every fault is far beyond the level at which it is
looked for, so that few transcripts show it. Seals are pretended but where they are what is tested.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from typer.testing import CliRunner

from shufflerl import cli, network
from shufflerl.arrays import IntArray
from shufflerl.counts import CountQuery, Trajectories
from shufflerl.errors import MissingExtraError
from shufflerl.network.audit import Network
from shufflerl.network.node import composing, node, reporting
from shufflerl.network.node.reporting import Checked
from shufflerl.network.protocol import crypto, sources, wire
from shufflerl.network.protocol.agreement import Agreement
from shufflerl.network.protocol.sources import Users
from shufflerl.network.protocol.wire import Report
from shufflerl.network.shuffler import mixing, shuffler, summing
from shufflerl.noise import PoissonNoise
from shufflerl.privacy import protocol, randomness
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.audit import MIN_SAMPLES, ServersInMemory, System, UsersSession, audit, auditing
from shufflerl.privacy.mechanism import ShuffledPoisson
from shufflerl.privacy.protocol import Protocol
from tests.support.examples import mostly_slow
from tests.support.network_world import pretend_to_seal

Path = Literal["tags", "sums"]
Plant = Callable[[pytest.MonkeyPatch], None]
PATHS: tuple[Path, Path] = ("tags", "sums")
CHEAP, FEW = Budget(4.0, 1e-5), 25


@pytest.fixture(autouse=True)
def pretended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        pretend_to_seal(monkeypatch)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few transcripts for laws that are limits, enough for faults that are gross; and no crowd."""
    monkeypatch.setattr(auditing, "MIN_SAMPLES", FEW)
    monkeypatch.setattr(auditing, "CROWD", 8)
    monkeypatch.setattr("shufflerl.privacy.audit.ServersInMemory", partial(ServersInMemory, samples=FEW))

    def networks(path: cli.AuditPath) -> list[System]:
        systems = all_networks(path)
        for system in systems:
            system.samples = FEW
        return systems

    all_networks = cli.network_systems
    monkeypatch.setattr(cli, "network_systems", networks)


def within(patch: pytest.MonkeyPatch, role: ModuleType, module: ModuleType, **changes: Any) -> None:
    """Change what one role finds in a module, and nobody else."""
    name = module.__name__.rpartition(".")[2]
    patch.setattr(role, name, SimpleNamespace(**(vars(module) | changes)))


def less(agreed: Protocol) -> Protocol:
    return dataclasses.replace(agreed, noise=PoissonNoise(agreed.noise.mean / 2))


def halved(real: Callable[..., Any]) -> Callable[..., Any]:
    """The same, given an agreement or a protocol with half the noise."""

    def with_half(given: Any, *others: Any) -> Any:
        if isinstance(given, Checked):
            given = dataclasses.replace(given, agreement=half_agreed(given.agreement))
        elif isinstance(given, Agreement):
            given = half_agreed(given)
        else:
            given = less(given)
        return real(given, *others)

    return with_half


def half_agreed(agreed: Agreement) -> Agreement:
    if not isinstance(agreed.source, Users):
        return agreed  # users add none
    law = PoissonNoise(agreed.source.law.mean / 2)
    return dataclasses.replace(agreed, source=dataclasses.replace(agreed.source, law=law))


def halved_in_every_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reporting, "randomize_episode", halved(reporting.randomize_episode))


def halved_in_the_node(patch: pytest.MonkeyPatch) -> None:
    real = reporting.randomize_episode

    def make_report(checked: Checked, episode: Trajectories, token: bytes) -> Report:
        return reporting.seal_report(checked, halved(real)(checked.agreement, episode), token)

    patch.setattr(node, "make_report", make_report)


def halved_in_the_fleet(patch: pytest.MonkeyPatch) -> None:
    real = reporting.randomize_episode

    def make_report(checked: Checked, episode: Trajectories, token: bytes) -> Report:
        return reporting.seal_report(checked, halved(real)(checked.agreement, episode), token)

    patch.setattr(composing, "make_report", make_report)


def halved_by_the_transport(patch: pytest.MonkeyPatch) -> None:
    """Where the tags are drawn that a transport sends."""
    patch.setattr(sources, "draw", halved(protocol.draw))


def halved_rate(patch: pytest.MonkeyPatch, least: int = 1) -> None:
    """Users and the coordinator agree on it, so that estimates stay unbiased."""
    real = Protocol.__dict__["rate"].func

    def rate(agreed: Protocol) -> Fraction:
        whole: Fraction = real(agreed)
        return whole / 2 if agreed.users >= least else whole

    patch.setattr(Protocol, "rate", property(rate))


def halved_where_asked_in_part(patch: pytest.MonkeyPatch) -> None:
    """In every device, where some steps alone are asked for."""
    real = protocol.noise_tags

    def noise(agreed: Protocol) -> IntArray:
        return real(agreed if agreed.query == agreed.query.widest else less(agreed))

    patch.setattr(protocol, "noise_tags", noise)


def halved_in_the_announcement(patch: pytest.MonkeyPatch) -> None:
    real = ShuffledPoisson._noise
    patch.setattr(ShuffledPoisson, "_noise", lambda *given: PoissonNoise(real(*given).mean / 2))


def reused_seeds(patch: pytest.MonkeyPatch) -> None:
    """Different for the users of a batch, the same in every batch."""
    calls = itertools.count()

    def noise(agreed: Protocol) -> IntArray:
        rng = np.random.default_rng(next(calls) % 4)
        size = int(agreed.query.size)
        return rng.integers(size, size=rng.poisson(size * float(agreed.rate)))

    patch.setattr(protocol, "noise_tags", noise)


def one_mask(patch: pytest.MonkeyPatch) -> None:
    within(patch, reporting, secrets, token_bytes=bytes)


def one_mask_per_batch(patch: pytest.MonkeyPatch) -> None:
    """Different for the users of a batch, the same in every batch."""
    calls = itertools.count()
    within(patch, reporting, secrets, token_bytes=lambda size: bytes([next(calls) % 4] * size))


def one_envelope_key(patch: pytest.MonkeyPatch) -> None:
    key = crypto.new_box_key()
    within(patch, shuffler, crypto, new_box_key=lambda: key)


def not_mixed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(randomness, "permutation", np.arange)


def reports_mixed_but_not_tags(patch: pytest.MonkeyPatch) -> None:
    def permuted(tags: mixing.Rows) -> mixing.Rows:
        return np.random.default_rng().permutation(tags.reshape(4, -1)).reshape(tags.shape)

    patch.setattr(mixing, "permuted", permuted)


def user_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """In place of another, so that as many messages are released and as many vectors are summed."""
    opened, last = mixing.opened, list[Any]()

    def again(agreed: Agreement, key: Any, report: bytes, envelope: bytes) -> Any:
        last.append(opened(agreed, key, report, envelope))
        return last[-2] if len(last) % 8 == 7 else last[-1]

    patch.setattr(mixing, "opened", again)


def vector_added_twice(patch: pytest.MonkeyPatch) -> None:
    real, calls = summing.add, itertools.count()

    def add(*given: Any) -> None:
        for _ in range(2 if next(calls) % 4 == 0 else 1):
            real(*given)

    patch.setattr(summing, "add", add)


def no_padding(patch: pytest.MonkeyPatch) -> None:
    def tags(agreed: Agreement, sent: Iterable[int]) -> list[bytes]:
        key = crypto.public_box_key(agreed.announcement.tag_key)
        return [crypto.seal(key, agreed.tag_info, int(tag).to_bytes(wire.TAG_BYTES)) for tag in sent]

    patch.setattr(reporting, "sealed_tags", tags)


def padding_that_tells(patch: pytest.MonkeyPatch) -> None:
    """Another number names no counter either."""
    within(patch, reporting, wire, PADDING=wire.PADDING - 1)


def true_tags_kept_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reporting, "randomize_episode", lambda agreed, episode: agreed.source.tags(episode))


def shrunk(patch: pytest.MonkeyPatch) -> None:
    """The learner is given counts that are noise to a lesser part than is said."""
    patch.setattr(sources, "unbiased", lambda *given: protocol.unbiased(*given) / 2)


EVERYWHERE: list[tuple[Plant, set[str]]] = [
    (halved_where_asked_in_part, {"partial queries"}),
    (halved_in_every_device, {"noise law", "message counts"}),
    (halved_in_the_node, {"noise law", "message counts"}),
    (halved_in_the_fleet, {"noise law", "message counts"}),
    (halved_by_the_transport, {"noise law", "message counts"}),
    (halved_rate, {"noise law", "message counts"}),
    (halved_in_the_announcement, {"calibration", "schema"}),
    (reused_seeds, {"freshness", "noise law"}),
    (one_envelope_key, {"freshness"}),
    (user_counted_twice, {"schema"}),
    (shrunk, {"noise law"}),
]
FAULTS: list[tuple[Path, Plant, set[str]]] = [
    *((path, plant, catchers) for plant, catchers in EVERYWHERE for path in PATHS),
    ("tags", not_mixed, {"permutation"}),
    ("tags", reports_mixed_but_not_tags, {"permutation"}),
    ("tags", no_padding, {"schema"}),
    ("tags", padding_that_tells, {"schema"}),
    ("tags", true_tags_kept_apart, {"schema"}),
    ("sums", vector_added_twice, {"schema"}),
    ("sums", one_mask, {"schema"}),
    ("sums", one_mask_per_batch, {"freshness"}),
]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("path", "plant", "catchers"), mostly_slow(FAULTS, 2), ids=lambda value: getattr(value, "__name__", None)
)
def test_a_fault_planted_into_a_role_is_caught(
    path: Path, plant: Plant, catchers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    report = audit(CHEAP, samples=FEW, level=1e-4, system=Network(path))
    assert catchers <= set(report.failures), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_half_the_noise_of_many_users_alone_is_caught(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed with probability below 1e-9; the other tests raise a false alarm with 1e-6 at most."""
    halved_rate(monkeypatch, least=1000)
    monkeypatch.setattr(auditing, "MIN_SAMPLES", FEW)
    report = audit(CHEAP, samples=FEW, level=1e-6, system=Network(path))
    assert "crowd" in report.failures
    assert not {"noise law", "message counts"} & set(report.failures), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_roles_as_they_are_pass(path: Path) -> None:
    report = audit(CHEAP, level=1e-5, samples=MIN_SAMPLES, system=Network(path))
    assert report.passed, str(report)
    assert len(report.tests) == 13
    assert (report.path, report.users) == (path, 4)
    for role in ("node", "fleet", "shuffler", "coordinator"):
        assert role in str(report).splitlines()[1]


@pytest.mark.parametrize("path", PATHS)
def test_what_an_auditor_reads_under_real_seals_is_what_was_done(path: Path) -> None:
    episodes = [Trajectories([[0, 1]], [[0, 0]], [[1, bit]]) for bit in (0, 1, 1, 1, 0)]
    with Network(path).begin(CHEAP, 5, CountQuery.everything(Network.problem)) as session:
        assert isinstance(session, UsersSession)
        agreed = session.protocol
        for _ in range(2):
            batch = session.play(episodes)
            for episode, tags in zip(episodes, batch.reports, strict=True):
                assert set(agreed.query.tags(episode)[0]) <= set(tags)
            counts = np.bincount(np.concatenate(batch.reports), minlength=agreed.query.size)
            assert batch.estimates.tolist() == (counts - 5 * float(agreed.rate)).tolist()
            assert len(set(batch.sizes)) == 1
            assert len(set(batch.once)) == len(batch.once)
            assert sorted(batch.order) == list(range(len(batch.order)))
            messages = 5 if path == "sums" else sum(map(len, batch.reports))
            assert (len(batch.order) > messages) if path == "tags" else (len(batch.order) == messages)  # padding


def run_audit(patch: pytest.MonkeyPatch, *options: str) -> Any:
    patch.setattr(auditing, "PARTIAL_QUERIES", auditing.PARTIAL_QUERIES[:1])
    result = CliRunner().invoke(cli.app, ["audit", "--samples", str(FEW), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit | MissingExtraError)
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_command_says_which_paths_it_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether so few transcripts pass is another matter."""
    told = json.loads(run_audit(monkeypatch, "--json").stdout)
    paths = ["protocol", "servers", "tags", "sums", "servers-tags", "servers-sums"]
    assert [one["path"] for one in told["audits"]] == paths
    assert [one["claimed_epsilon"] for one in told["audits"]] == [1.0, 1.0, 4.0, 1.0, 4.0, 1.0]
    assert told["passed"] == all(one["passed"] for one in told["audits"])
    assert told | {"passed": told["audits"][0]["passed"]} == told["audits"][0] | {
        "audits": told["audits"],
        "not_attacked": None,
    }
    assert told["not_attacked"] is None
    text = run_audit(monkeypatch, "--path", "sums", "--epsilon", "3", "--users", "5").stdout
    assert "Attacked: path sums" in text
    assert "Claimed: epsilon 3" in text
    assert "neighbouring batches of 5 users" in text
    assert "path tags" not in text

    def missing() -> None:
        raise MissingExtraError("Install it.")

    monkeypatch.setattr(network, "check_installed", missing)
    told = json.loads(run_audit(monkeypatch, "--json").stdout)
    assert [one["path"] for one in told["audits"]] == ["protocol", "servers"]
    assert told["not_attacked"] == "Not attacked: tags, sums, servers-tags, servers-sums. Install it."
    assert "Not attacked: tags, sums, servers-tags, servers-sums. Install it." in run_audit(monkeypatch).stdout
    assert isinstance(run_audit(monkeypatch, "--path", "tags").exception, MissingExtraError)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_command_fails_if_one_path_does(monkeypatch: pytest.MonkeyPatch) -> None:
    halved_in_the_node(monkeypatch)
    result = run_audit(monkeypatch, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert {one["path"] for one in told["audits"] if not one["passed"]} >= {"tags", "sums"}
    assert told["passed"] is False
