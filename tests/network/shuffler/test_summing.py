"""Masked vectors at the shuffler: both transports count the same; a batch is summed once, over one set of reports."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shufflerl.network import faults
from shufflerl.network.node.reporting import Checked, seal_report
from shufflerl.network.protocol import crypto, masking, wire
from shufflerl.network.protocol.agreement import parse_announcement
from shufflerl.network.protocol.wire import Action, ProblemError, Reason, Report, State, Transport, Verdict
from shufflerl.network.shuffler import summing
from shufflerl.network.stores.store import BatchId, SQLiteStore
from tests.support.network_world import QUERY, World, crash_at, new_identity, pretend_to_seal


def summing_world(users: int = 3, excludable: int = 0, **options: Any) -> World:
    world = World(users=users, transport=Transport.sums, excludable=excludable, **options)
    world.announce()
    return world


def report_of(world: World, tags: list[int], *, readable: bool = True) -> Report:
    """A report whose seed is sealed to the coordinator, or to nobody."""
    checked = world.checked()
    if not readable:
        stranger = crypto.new_box_key().public_key().public_bytes_raw()
        said = msgspec.structs.replace(checked.agreement.announcement, tag_key=stranger)
        wrong = parse_announcement(wire.encode(said))
        object.__setattr__(wrong, "digest", checked.agreement.digest)
        checked = Checked(wrong, checked.envelope_key)
    return seal_report(checked, tags, world.mint())


def fill(world: World, bad: int = 0, *, number: int = 0, attempt: int = 0) -> list[int]:
    """A full batch in which user i raises counter i; the last `bad` have seeds that cannot be opened."""
    for user in range(world.users):
        report = report_of(world, [user], readable=user < world.users - bad)
        (outcome,) = world.upload(report, number=number, attempt=attempt)
        assert outcome.verdict == Verdict.accepted
    assert world.shuffler.advance()
    return [int(user < world.users - bad) for user in range(QUERY.size)]


def unreadable(world: World, attempt: int = 0) -> list[int]:
    return [place for place, sealed in enumerate(world.seeds(0, attempt)) if not world.opened([sealed], 0, attempt)]


def test_a_batch_from_announcement_to_scrub() -> None:
    world = summing_world()
    expected = fill(world)
    sealed = world.seeds()
    assert world.shuffler.status(world.task).state == State.sealed
    assert world.seeds() == sealed
    with pytest.raises(ProblemError, match="chunk 0 is not there"):
        world.shuffler.collect(world.command(Action.collect))
    assert world.exclude().state == State.sealed
    assert world.shuffler.advance()
    assert world.shuffler.status(world.task).state == State.released
    assert world.counts(world.opened(sealed)) == [1, 1, 1, *expected[3:]]
    assert world.exclude().state == State.released  # said again, after a crash: all is well
    with pytest.raises(ProblemError, match="not there"):
        world.seeds()
    assert world.scrub().state == State.scrubbed


def test_a_sum_counts_as_released_when_it_is() -> None:
    world = summing_world()
    fill(world)
    for _ in range(2):
        assert world.shuffler.advance()
        assert world.shuffler.release_seconds == []  # it waits for what cannot be opened
    world.exclude()
    world.now += 5.0
    assert world.shuffler.advance()
    assert world.shuffler.release_seconds == [5.0]  # since it was full


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data(), users=st.integers(1, 6))
def test_both_transports_count_the_same_of_the_same_tags(data: st.DataObject, users: int) -> None:
    tags = st.lists(st.integers(0, QUERY.size - 1), min_size=3, max_size=20)
    sent = data.draw(st.lists(tags, min_size=users, max_size=users))
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        pretend_to_seal(patch)
        for transport in Transport:
            world = World(users=users, transport=transport, noise_mean=40.0)
            world.announce()
            world.upload(*(seal_report(world.checked(), one, world.mint()) for one in sent))
            assert world.shuffler.advance()
            if transport == Transport.sums:
                seeds = world.opened(world.seeds())
                world.exclude()
                assert world.shuffler.advance()
                counted.append(world.counts(seeds))
            else:
                counted.append(np.bincount(world.tags(world.collect()), minlength=QUERY.size).tolist())
    assert counted[0] == counted[1] == np.bincount(np.concatenate(sent), minlength=QUERY.size).tolist()


def test_seeds_that_cannot_be_opened_are_excluded_before_summing() -> None:
    world = summing_world(users=8, excludable=3)
    expected = fill(world, bad=2)
    places = unreadable(world)
    assert len(places) == 2
    seeds = world.opened(world.seeds())
    world.exclude(*places)
    assert world.shuffler.advance()
    assert world.counts(seeds) == expected


def test_more_than_was_announced_are_never_summed() -> None:
    """The batch is released empty, and asked again of other users; the token of a user who was in it stays spent."""
    world = summing_world(users=4, excludable=1)
    token = world.mint()
    world.upload(seal_report(world.checked(), [1], token))
    world.upload(*(report_of(world, [2], readable=number > 1) for number in range(3)))
    assert world.shuffler.advance()
    world.exclude(*unreadable(world))
    for positions in ((), (0,)):
        with pytest.raises(ProblemError, match="the first stands"):
            world.exclude(*positions)
    assert world.shuffler.advance()
    status = world.shuffler.status(world.task)
    assert (status.state, status.chunks) == (State.released, 0)
    with pytest.raises(ProblemError, match="chunk 0 is not there"):
        world.shuffler.collect(world.command(Action.collect))
    id = BatchId(world.task, 0, 0)
    assert (list(world.store.reports(id)), world.store.key(id)) == ([], None)
    assert world.announce(0, 1).state == State.open
    (outcome,) = world.upload(seal_report(world.checked(), [1], token), attempt=1)
    assert world.reason(outcome) == Reason.replayed


def test_what_is_excluded_is_said_once() -> None:
    """Two sums of different reports would differ by single users' vectors."""
    world = summing_world(users=6, excludable=6 - 1)
    fill(world)
    world.exclude(1, 4)
    for other in ((), (1,), (1, 4, 5), (0, 4)):
        with pytest.raises(ProblemError, match="the first stands") as refused:
            world.exclude(*other)
        assert refused.value.reason == Reason.conflict
    world.restart()
    with pytest.raises(ProblemError, match="the first stands"):
        world.exclude()
    world.exclude(1, 4)
    seeds = world.seeds()
    assert world.shuffler.advance()
    counts = world.counts(world.opened([seed for place, seed in enumerate(seeds) if place not in (1, 4)]))
    assert sorted(counts) == [0] * 20 + [1] * 4
    released = world.collect()
    world.exclude(0)  # too late to change anything
    assert world.shuffler.advance()
    assert world.collect() == released


def test_exclusions_that_make_no_sense_are_refused() -> None:
    world = summing_world(excludable=2)
    with pytest.raises(ProblemError, match="not been handed over") as early:
        world.exclude()
    assert early.value.reason == Reason.not_released
    fill(world)
    for positions in ((3,), (1, 1), (2, 1)):
        with pytest.raises(ProblemError, match="increasing numbers below 3"):
            world.exclude(*positions)
    said = wire.Exclusion(task=world.task, batch=0, attempt=0, positions=[])
    with pytest.raises(ProblemError, match="not signed"):
        world.shuffler.exclude(new_identity().sign(said))
    with pytest.raises(ProblemError, match="the address"):
        world.shuffler.seeds(world.command(Action.collect))
    with pytest.raises(ProblemError, match="no batch 7"):
        world.exclude(number=7)
    plain = World()
    plain.announce()
    with pytest.raises(ProblemError, match="of tags"):
        plain.exclude()
    plain.upload(*(plain.report() for _ in range(3)))
    plain.shuffler.advance()
    with pytest.raises(ProblemError, match="not there"):
        plain.seeds()
    with pytest.raises(ProblemError, match="comes next"):
        plain.announce(0, 1)  # a release of tags cannot be spoilt


def test_a_spoilt_batch_is_asked_again_and_its_sum_deleted() -> None:
    world = summing_world()
    fill(world)
    world.exclude()
    world.shuffler.advance()
    with pytest.raises(ProblemError, match="comes next"):
        world.announce(0, 2)
    world.announce(0, 1)
    with pytest.raises(ProblemError, match="scrubbed"):
        world.shuffler.collect(world.command(Action.collect))
    fill(world, attempt=1)
    world.exclude(attempt=1)
    world.shuffler.advance()
    assert world.announce(1).batch == 1


@pytest.mark.parametrize("label", [*faults.SUMMING_LABELS, "release", "released"])
def test_a_crash_at_any_point_changes_no_order_and_adds_nothing_twice(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summing, "SLICE", 2)
    monkeypatch.setattr(wire, "CHUNK_SEEDS", 3)
    world = summing_world(users=8, excludable=1)
    reports = [report_of(world, [user], readable=user < 7) for user in range(8)]
    world.upload(*reports)
    seen: list[list[bytes]] = []

    def step() -> None:
        assert world.shuffler.advance()
        if world.shuffler.status(world.task).state == State.sealed:
            seen.append(world.seeds())
            world.exclude(*unreadable(world))
            assert world.shuffler.advance()

    for _ in range(3 if label in ("seeds", "slice") else 1):
        with crash_at(label, monkeypatch):
            step()
        world.restart()
    step()
    assert all(one == seen[0] for one in seen)
    assert world.counts(world.opened(seen[0])) == [1] * 7 + [0] * (QUERY.size - 7)


def test_slices_are_found_again_whatever_the_order_and_whoever_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process keeps a slice of other reports while this one adds: this one starts anew from what stands."""
    monkeypatch.setattr(summing, "SLICE", 2)
    world = summing_world(users=7)
    expected = fill(world)
    seeds = world.opened(world.seeds())
    world.exclude()
    straight, keep = world.store.reports, world.store.keep
    reads: list[int] = []
    overtaken: list[str] = []

    def disordered(id: BatchId) -> Iterator[tuple[bytes, bytes]]:
        reads.append(1)
        rows = list(straight(id))
        yield from rows if len(reads) % 2 else rows[::-1]

    def overtake(id: BatchId, name: str, value: bytes) -> bytes:
        if name == "sum 1" and not overtaken:
            overtaken.append(name)
            rows, some, key = list(straight(id))[-2:], masking.zeros(QUERY.size, 2), world.shuffler._key_of(id)
            assert key is not None
            for report, envelope in rows:
                summing.add(some, world.checked().agreement, key, report, envelope)
            keep(id, name, b"".join([*(report for report, _ in rows), some.tobytes()]))
        return keep(id, name, value)

    monkeypatch.setattr(world.store, "reports", disordered)
    monkeypatch.setattr(world.store, "keep", overtake)
    assert world.shuffler.advance()
    assert overtaken == ["sum 1"]
    assert len(reads) == 2
    assert world.counts(seeds) == expected


def test_a_batch_with_reports_missing_is_never_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = summing_world()
    fill(world)
    world.exclude()
    straight = world.store.reports
    monkeypatch.setattr(world.store, "reports", lambda id: itertools.islice(straight(id), 2))
    assert not world.shuffler.advance()
    assert "never released short" in (world.shuffler.trouble or "")
    world = summing_world()
    world.upload(*(report_of(world, [1]) for _ in range(3)))
    straight = world.store.reports
    monkeypatch.setattr(world.store, "reports", lambda id: itertools.islice(straight(id), 2))
    assert not world.shuffler.advance()
    assert "never released short" in (world.shuffler.trouble or "")


def test_vectors_of_another_length_are_refused() -> None:
    world = summing_world()
    checked, token = world.checked(), world.mint()
    report_id = crypto.report_id(world.task, token)
    right = wire.SEALED_SEED_BYTES + 2 * QUERY.size
    assert checked.agreement.envelope_bytes == wire.TOKEN_BYTES + right + 48

    def answer(size: int) -> str | None:
        key, info = crypto.public_box_key(checked.envelope_key), checked.agreement.envelope_info(report_id)
        (outcome,) = world.upload(Report(report_id=report_id, envelope=crypto.seal(key, info, token + bytes(size))))
        return world.reason(outcome)

    assert [answer(size) for size in (0, 80, 104, right - 2, right - 1, right + 1)] == ["malformed"] * 6
    assert answer(right) is None


def test_vectors_are_added_one_at_a_time() -> None:
    """Of 40 vectors no more than a few are in memory at once, whether seeds are offered or the sum is made."""
    states, users = 300, 40
    world = World(users=users, transport=Transport.sums, store=SQLiteStore(None))
    world.announce(states=states, policies=np.zeros((1, 2, states), dtype="<u2").tobytes())
    checked = world.checked()
    counters = checked.agreement.query.size
    for user in range(users):
        world.upload(seal_report(checked, [user], world.mint()))
    tracemalloc.start()
    try:
        assert world.shuffler.advance()
        world.exclude()
        assert world.shuffler.advance()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert world.shuffler.status(world.task).state == State.released
    assert peak < users / 3 * counters * 2


def test_another_process_may_release_the_batch_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this one then tries to keep is refused by the store; it goes on without trouble."""
    monkeypatch.setattr(summing, "SLICE", 1)
    world = summing_world()
    expected = fill(world)
    seeds = world.opened(world.seeds())
    world.exclude()
    keep, slow, reports = world.store.keep, world.shuffler, world.store.reports
    # One connection serves both here; a read that is not over would keep it from erasing.
    monkeypatch.setattr(world.store, "reports", lambda id: iter(list(reports(id))))

    def overtaken(id: BatchId, name: str, value: bytes) -> bytes:
        monkeypatch.setattr(world.store, "keep", keep)
        world.restart()
        assert world.shuffler.advance()
        return keep(id, name, value)

    monkeypatch.setattr(world.store, "keep", overtaken)
    assert slow.advance()
    assert world.counts(seeds) == expected
    world = summing_world()
    fill(world)
    keep = world.store.keep

    def released(id: BatchId, name: str, value: bytes) -> bytes:
        world.store.release(id, [b"sum"])
        return keep(id, name, value)

    monkeypatch.setattr(world.store, "keep", released)
    with pytest.raises(ProblemError, match="only an unfinished") as refused:
        world.exclude()
    assert refused.value.reason == Reason.conflict
