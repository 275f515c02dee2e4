"""The shuffler's state machine: what it takes, what it refuses and what it hands over."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network.node.reporting import seal_report
from shufflerl.network.protocol import crypto, wire
from shufflerl.network.protocol.wire import Action, ProblemError, Reason, Report, State, Transport, Verdict
from shufflerl.network.shuffler import mixing
from shufflerl.network.shuffler.mixing import permuted
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import BatchId, SQLiteStore
from tests.network.stores.test_store import left_of
from tests.support.disk import Disk
from tests.support.network_world import World, agreement_of, new_identity


@pytest.fixture
def world() -> World:
    world = World()
    world.announce()
    return world


def refusal(world: World, report: Report, number: int = 0, attempt: int = 0) -> str | None:
    (outcome,) = world.upload(report, number=number, attempt=attempt)
    assert outcome.verdict == Verdict.refused
    assert outcome.report_id == report.report_id
    return world.reason(outcome)


def test_a_batch_from_announcement_to_scrub(world: World) -> None:
    reports = [world.marked_report(mark) for mark in range(3)]
    for number, report in enumerate(reports):
        assert world.shuffler.status(world.task).state == State.open
        assert world.upload(report)[0].verdict == Verdict.accepted
        assert world.shuffler.status(world.task).accepted == number + 1
    assert world.shuffler.status(world.task).state == State.sealed
    assert world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.released
    released = world.collect()
    assert sorted(world.tags(released)) == list(range(9))
    assert world.collect() == released
    world.restart()
    world.shuffler.advance()
    assert world.collect() == released
    assert world.scrub().state == State.scrubbed
    assert world.scrub().state == State.scrubbed
    with pytest.raises(ProblemError, match="scrubbed") as gone:
        world.shuffler.collect(world.command(Action.collect))
    assert gone.value.reason == Reason.gone


def test_every_attempt_at_every_batch_has_a_key_of_its_own() -> None:
    """An envelope of one opens with no other's, so that a key that is lost today opens nothing of yesterday."""
    world, keys, reports = World(users=1), [], []

    def announce(number: int, attempt: int) -> None:
        world.announce(number, attempt)
        key = world.store.key(BatchId(world.task, number, attempt))
        assert key is not None
        checked = world.checked()
        assert crypto.box_key(key).public_key().public_bytes_raw() == checked.envelope_key
        keys.append(key)
        reports.append((checked.agreement, world.report()))

    for number in range(3):
        announce(number, 0)
        world.store.abort(BatchId(world.task, number, 0))
        announce(number, 1)
        world.upload(reports[-1][1], number=number, attempt=1)
        assert world.shuffler.advance()
    world.task = os.urandom(16)  # another run
    announce(0, 0)
    assert len(set(keys)) == len(keys) == 7
    for place, (agreed, report) in enumerate(reports):
        for other, key in enumerate(keys):
            with contextlib.nullcontext() if place == other else pytest.raises(ProblemError, match="cannot be opened"):
                mixing.opened(agreed, crypto.box_key(key), report.report_id, report.envelope)


def test_the_same_report_again_is_accepted_once(world: World) -> None:
    report = world.marked_report(1)
    verdicts = [world.upload(report)[0].verdict for _ in range(3)]
    assert verdicts == [Verdict.accepted, Verdict.duplicate, Verdict.duplicate]
    assert world.shuffler.status(world.task).accepted == 1
    assert [outcome.verdict for outcome in world.upload(*[world.marked_report(2)] * 2)] == ["accepted", "duplicate"]
    assert world.shuffler.refused[Reason.duplicate] == 3


def test_a_token_serves_once_in_a_run(world: World) -> None:
    token = world.mint()
    world.upload(world.marked_report(1, token))
    assert refusal(world, world.marked_report(2, token)) == Reason.replayed
    world.upload(world.marked_report(3), world.marked_report(4))
    world.shuffler.advance()
    world.announce(1)
    assert refusal(world, world.marked_report(5, token), number=1) == Reason.replayed


def test_a_token_serves_again_in_another_run(world: World) -> None:
    token = world.mint()
    first = world.marked_report(1, token)
    world.upload(first)
    world.task = os.urandom(16)
    world.announce()
    second = world.marked_report(2, token)
    assert world.upload(second)[0].verdict == Verdict.accepted
    assert first.report_id != second.report_id


def test_reports_are_bound_to_run_batch_and_attempt(world: World) -> None:
    stale = world.marked_report(1)
    world.upload(*(world.marked_report(mark) for mark in range(2, 5)))
    world.shuffler.advance()
    world.announce(1)
    assert refusal(world, stale, number=1) == Reason.undecryptable
    assert refusal(world, stale, number=0) == Reason.late
    other = World()
    other.enrolment = world.enrolment
    other.restart()
    other.announce()
    assert refusal(other, stale) == Reason.undecryptable


def test_an_envelope_cannot_be_passed_on_under_another_id(world: World) -> None:
    report = world.marked_report(1)
    copied = Report(report_id=os.urandom(16), envelope=report.envelope)
    assert refusal(world, copied) == Reason.undecryptable
    assert world.upload(report)[0].verdict == Verdict.accepted


@pytest.mark.parametrize("transport", Transport)
def test_strangers_are_refused(transport: Transport) -> None:
    """Whoever has no token, and whoever has one of another report; however reports travel."""
    world = World(transport=transport)
    world.announce()
    assert refusal(world, world.marked_report(1, os.urandom(wire.TOKEN_BYTES))) == Reason.unauthorized
    token = world.mint()
    other_id = crypto.report_id(world.task, world.mint())
    checked = world.checked()
    text = token + bytes(checked.agreement.envelope_bytes - crypto.SEAL_BYTES - wire.TOKEN_BYTES)
    envelope = crypto.seal(crypto.public_box_key(checked.envelope_key), checked.agreement.envelope_info(other_id), text)
    assert refusal(world, Report(report_id=other_id, envelope=envelope)) == Reason.unauthorized
    assert world.shuffler.refused[Reason.unauthorized] == 2


@pytest.mark.parametrize("more", [-(10**6), -52, -1, 1, 52])
def test_envelopes_longer_or_shorter_than_all_others_are_refused(world: World, more: int) -> None:
    """A report that may be shorter tells that it has little noise, and others could be dropped."""
    checked, token = world.checked(), world.mint()
    report_id = crypto.report_id(world.task, token)
    body = bytes(max(0, checked.agreement.max_messages * wire.SEALED_TAG_BYTES + more))
    envelope = crypto.seal(
        crypto.public_box_key(checked.envelope_key), checked.agreement.envelope_info(report_id), token + body
    )
    assert refusal(world, Report(report_id=report_id, envelope=envelope)) == Reason.malformed


def test_truncated_garbled_and_oversized_envelopes_are_refused(world: World) -> None:
    report = world.marked_report(1)
    for envelope in (b"", report.envelope[:-1], report.envelope[:31], report.envelope + b"x"):
        assert refusal(world, msgspec.structs.replace(report, envelope=envelope)) == Reason.malformed
    garbled = bytearray(report.envelope)
    garbled[60] ^= 1
    for wrong in (bytes(garbled), os.urandom(len(garbled)), bytes(len(garbled))):
        assert refusal(world, msgspec.structs.replace(report, envelope=wrong)) == Reason.undecryptable
    assert refusal(world, report, number=5) == Reason.unknown_batch
    assert world.shuffler.status(world.task).accepted == 0


def test_only_valid_reports_count(world: World) -> None:
    bad = [world.marked_report(mark, os.urandom(wire.TOKEN_BYTES)) for mark in range(5)]
    world.upload(*bad, world.marked_report(7), *bad, world.marked_report(8))
    world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.open
    world.upload(world.marked_report(9))
    world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(21, 30))


def test_late_reports_are_refused_and_never_counted(world: World) -> None:
    outcomes = world.upload(*(world.marked_report(mark) for mark in range(5)))
    assert [world.reason(outcome) for outcome in outcomes] == [None, None, None, "late", "late"]
    world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(9))


def test_batches_come_one_after_the_other(world: World) -> None:
    for number, attempt in ((1, 0), (0, 1), (5, 0)):
        with pytest.raises(ProblemError, match="after its release"):
            world.announce(number, attempt)
    with pytest.raises(ProblemError, match="other contents"):
        world.announce(0, users=9)
    assert world.announce().batch == 0
    world.upload(*(world.marked_report(mark) for mark in range(3)))
    world.shuffler.advance()
    with pytest.raises(ProblemError, match="comes next"):
        world.announce(2)
    assert world.announce(1).state == State.open
    with pytest.raises(ProblemError, match="comes next"):
        World().announce(1)


def test_a_run_is_over_when_its_coordinator_says_so(world: World) -> None:
    """Said once or again, before a crash or after it; nothing is announced any more, and late users are told."""
    with pytest.raises(ProblemError, match="only a released batch"):
        world.shuffler.scrub(world.command(Action.finish))
    late = world.marked_report(9)
    world.upload(*(world.marked_report(mark) for mark in range(3)))
    world.shuffler.advance()
    for _ in range(2):
        assert world.shuffler.scrub(world.command(Action.finish)).state == State.finished
        world.restart()
        assert world.shuffler.status(world.task).state == State.finished
        assert world.scrub().state == State.finished  # said late, of the batch before it was known to be the last
    assert world.reason(world.upload(late)[0]) == Reason.late
    with pytest.raises(ProblemError, match="scrubbed"):
        world.shuffler.collect(world.command(Action.collect))
    for number, attempt in ((1, 0), (0, 1)):
        with pytest.raises(ProblemError, match="The run is over") as over:
            world.announce(number, attempt)
        assert over.value.reason == Reason.conflict


def test_a_batch_that_others_followed_was_not_the_last(world: World) -> None:
    world.upload(*(world.marked_report(mark) for mark in range(3)))
    world.shuffler.advance()
    world.announce(1)
    with pytest.raises(ProblemError, match="not the last"):
        world.shuffler.scrub(world.command(Action.finish))
    assert world.shuffler.status(world.task).state == State.open


def test_trouble_that_nobody_expected_is_told_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "unfinished", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.shuffler.advance()
    assert "ZeroDivisionError" in (world.shuffler.trouble or "")
    assert world.shuffler.advance()
    assert world.shuffler.trouble is None


def test_only_the_pinned_coordinator_is_obeyed(world: World) -> None:
    stranger = new_identity()
    for signed, ask in (
        (stranger.sign(world.announcement()), world.shuffler.announce),
        (
            stranger.sign(world.coordinator.public.verify(wire.Command, world.command(Action.collect))),
            world.shuffler.collect,
        ),
        (
            stranger.sign(world.coordinator.public.verify(wire.Command, world.command(Action.scrub))),
            world.shuffler.scrub,
        ),
    ):
        with pytest.raises(ProblemError, match="not signed"):
            ask(signed)
    with pytest.raises(ProblemError, match="the address"):
        world.shuffler.scrub(world.command(Action.collect))
    for ask in (world.shuffler.collect, world.shuffler.scrub):
        action = Action.collect if ask == world.shuffler.collect else Action.scrub
        with pytest.raises(ProblemError, match="open"):
            ask(world.command(action))


def test_small_batches_and_huge_reports_are_not_mixed() -> None:
    world = World(users=99, limits=Limits(min_batch_size=100))
    with pytest.raises(ProblemError, match="at least 100") as refused:
        world.announce()
    assert refused.value.reason == Reason.below_minimum
    world = World(limits=Limits(min_batch_size=1, max_messages=50))
    with pytest.raises(ProblemError, match="max_messages"):
        world.announce(noise_mean=1e6)
    with pytest.raises(InvalidInputError, match="when_late"):
        Limits(when_late="release")  # type: ignore[arg-type]


def test_an_overdue_batch_is_extended_never_released_short(world: World) -> None:
    world.upload(world.marked_report(1))
    for extensions in range(3):
        status = world.shuffler.status(world.task)
        assert (status.state, status.extensions) == (State.open, extensions)
        world.now += 100.0
        world.shuffler.advance()
    world.upload(world.marked_report(2), world.marked_report(3))
    world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == list(range(3, 12))


def test_an_overdue_batch_that_nobody_answered_is_aborted_too() -> None:
    world = World(limits=Limits(min_batch_size=1, timeout=100.0, when_late="abort"))
    world.announce()
    world.now += 100.0
    world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.aborted


def test_an_overdue_batch_can_be_aborted_and_announced_again() -> None:
    world = World(limits=Limits(min_batch_size=1, timeout=100.0, when_late="abort"))
    world.announce()
    token = world.mint()
    unread = world.marked_report(1, token)
    world.upload(unread)
    world.now += 99.0
    world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.open
    world.now += 1.0
    world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.aborted
    with pytest.raises(ProblemError, match="aborted"):
        world.shuffler.collect(world.command(Action.collect))
    with pytest.raises(ProblemError, match="comes next"):
        world.announce(1)
    world.announce(0, 1)
    assert refusal(world, unread) == Reason.replayed
    assert refusal(world, world.marked_report(1, token), attempt=1) == Reason.replayed
    world.upload(*(world.marked_report(mark) for mark in (5, 6, 7)), attempt=1)
    world.shuffler.advance()
    assert sorted(world.tags(world.collect(0, 1), 0, 1)) == list(range(15, 24))


def test_the_order_of_a_release_is_a_uniform_permutation() -> None:
    """Of nine messages in three reports each lands on each place equally often; level 1e-7."""
    runs, size = 4000, 9
    tags = np.repeat(np.arange(size, dtype=np.uint8), wire.SEALED_TAG_BYTES).reshape(size, -1)
    places = np.zeros((size, size))
    for _ in range(runs):
        places[permuted(tags)[:, 0], np.arange(size)] += 1
    statistic = (size - 1) * ((places - runs / size) ** 2).sum() / runs
    assert stats.chi2.sf(statistic, (size - 1) ** 2) > 1e-7


@pytest.mark.slow
def test_what_the_coordinator_sees_is_a_uniform_permutation() -> None:
    """The whole way, with real seals: places of three users' messages in the transcript are independent of who."""
    runs = 250
    world = World(users=3, noise_mean=1e-9)
    places = np.zeros((9, 9))
    for number in range(runs):
        world.announce(number)
        world.upload(*(world.marked_report(mark) for mark in range(3)), number=number)
        assert world.shuffler.advance()
        for place, tag in enumerate(world.tags(world.collect(number), number)):
            places[tag, place] += 1
        world.scrub(number)
    statistic = 8 * ((places - runs / 9) ** 2).sum() / runs
    assert stats.chi2.sf(statistic, 64) > 1e-7


def test_a_release_holds_tags_only_all_equally_long(world: World) -> None:
    reports = [world.report() for _ in range(3)]
    world.upload(*reports)
    world.shuffler.advance()
    (section,) = wire.sections(world.collect())
    released, size = bytes(section[1]), wire.SEALED_TAG_BYTES
    tags = {released[start : start + size] for start in range(0, len(released), size)}
    sealed = sum((len(report.envelope) - 32 - 48) // size for report in reports)
    assert len(tags) == len(released) // size == sealed  # each seal differs, whatever is in it
    for report in reports:
        assert report.report_id not in released
        assert report.envelope[:32] not in released


def test_large_releases_come_in_chunks(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(wire, "CHUNK_TAGS", 50)
    world.upload(*(world.marked_report(mark) for mark in range(3)))
    world.shuffler.advance()
    assert world.shuffler.status(world.task).chunks == -(-3 * agreement_of(world).max_messages // 50) > 1
    assert sorted(world.tags(world.collect())) == list(range(9))


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, Disk]]:
    """All reports are in, and nothing more can be stored."""
    disk = Disk(monkeypatch)
    store = SQLiteStore(tmp_path / "shuffler.db")
    world = World(store=store, users=40)
    world.announce()
    world.upload(*(world.report() for _ in range(40)))
    disk.fill()
    yield world, disk
    store.close()


def test_a_full_disk_is_trouble_that_passes(full: tuple[World, Disk]) -> None:
    world, disk = full
    assert not world.shuffler.advance()
    assert "full" in (world.shuffler.trouble or "")
    assert world.shuffler.status(world.task).state == State.sealed
    disk.free()
    assert world.shuffler.advance()
    assert world.shuffler.trouble is None
    assert world.shuffler.status(world.task).state == State.released


def test_a_disk_too_full_for_reports_is_trouble_until_one_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though looking at the clock goes well meanwhile: an open batch needs no room, its reports do."""
    disk = Disk(monkeypatch)
    store = SQLiteStore(tmp_path / "shuffler.db")
    world = World(store=store, users=200)
    world.announce()
    disk.fill()
    with pytest.raises(StorageError):
        world.upload(*(world.report() for _ in range(100)))
    assert world.shuffler.advance()
    assert "full" in (world.shuffler.trouble or "")
    disk.free()
    world.upload(world.report())
    assert world.shuffler.trouble is None
    store.close()


def test_a_disk_too_full_for_an_announcement_is_trouble_until_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffler that cannot begin is not ready, though nobody has sent it a report."""
    disk = Disk(monkeypatch)
    store = SQLiteStore(tmp_path / "shuffler.db")
    world = World(store=store, users=200)
    disk.fill()
    with pytest.raises(StorageError):
        world.announce(policies=np.zeros((1000, 2, 2), dtype="<u2").tobytes(), weights=[0.001] * 1000)
    assert world.shuffler.advance()
    assert "full" in (world.shuffler.trouble or "")
    disk.free()
    world.announce()
    assert world.shuffler.trouble is None
    store.close()


def test_the_time_from_seal_to_release_is_told(full: tuple[World, Disk]) -> None:
    """With all that went wrong in between."""
    world, disk = full
    world.shuffler.advance()
    assert world.shuffler.release_seconds == []
    disk.free()
    world.now += 7.0
    world.shuffler.advance()
    assert world.shuffler.release_seconds == [7.0]
    world.shuffler.advance()
    assert world.shuffler.release_seconds == [7.0]


def test_neither_database_holds_what_its_role_must_not_know(tmp_path: Path) -> None:
    """The shuffler's file has no tag in clear at any time: every tag is a number that occurs nowhere else."""
    world = World(store=SQLiteStore(tmp_path / "shuffler.db"), users=2)
    world.announce()
    marks = [os.urandom(4) for _ in range(6)]
    for part in (marks[:3], marks[3:]):
        world.upload(seal_report(world.checked(), [int.from_bytes(mark) for mark in part], world.mint()))
        content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert Counter(mark in content for mark in marks)[True] <= 1  # four random bytes may occur by chance, rarely
    world.shuffler.advance()
    assert sorted(world.tags(world.collect())) == sorted(int.from_bytes(mark) for mark in marks)
    world.store.close()


@pytest.mark.parametrize("how", ["released", "aborted", "scrubbed", "announced again"])
def test_what_was_deleted_is_erased_even_if_the_disk_failed_just_then(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, again = SQLiteStore(tmp_path / "shuffler.db"), how == "announced again"
    limits = Limits(min_batch_size=1, timeout=100.0, when_late="abort")
    world = World(store=store, limits=limits, transport=Transport.sums if again else Transport.tags)
    world.announce()
    world.shuffler.advance()
    key = store.key(BatchId(world.task, 0, 0))
    assert key is not None
    reports = [world.report() for _ in range(2 if how == "aborted" else 3)]
    world.upload(*reports)
    secret = [key, *(report.envelope for report in reports)]
    if how in ("scrubbed", "announced again"):
        world.shuffler.advance()
        if again:
            world.exclude()
            world.shuffler.advance()
        secret = [world.collect()]
    elif how == "aborted":
        world.now += 101.0

    def fails() -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "erase", fails)
        if how in ("scrubbed", "announced again"):
            with pytest.raises(StorageError):
                world.scrub() if how == "scrubbed" else world.announce(0, 1)
        else:
            assert not world.shuffler.advance()
    assert world.shuffler.status(world.task).state == (State.scrubbed if again else how)
    assert left_of(secret, tmp_path) != []
    assert world.shuffler.advance()  # nobody asks again: the shuffler itself sees to it
    assert left_of(secret, tmp_path) == []
    store.close()


@pytest.mark.parametrize("how", ["released", "aborted"])
def test_no_process_keeps_the_key_of_a_batch_that_it_or_another_has_closed(how: str) -> None:
    world = World(limits=Limits(min_batch_size=1, timeout=100.0, when_late="abort"))
    other = Shuffler(
        world.store, world.identity, world.coordinator.public, world.enrolment.public, world.limits, lambda: world.now
    )
    world.announce()
    for shuffler in (other, world.shuffler):
        shuffler.advance()
        shuffler.upload(world.task, [(0, 0, world.report())])  # for which it needs the key
    if how == "released":
        world.upload(world.report())
    else:
        world.now += 101.0
    for shuffler in (other, world.shuffler):
        assert shuffler.advance()
        assert shuffler.status(world.task).state == how
        assert shuffler.key_of(BatchId(world.task, 0, 0)) is None
