"""Several front ends work on one batch at the same time: all see the same batch and give the same answers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import Action, Exclusion, ProblemError, Reason, State, Transport
from shufflerl.network.shuffler import summing
from shufflerl.network.shuffler.shuffler import Shuffler
from shufflerl.network.stores.broker import Stored
from shufflerl.network.stores.nats_log import Log
from shufflerl.network.stores.store import BatchId, Store
from tests.contracts.store import ID, KEY, REPORTS, ROW
from tests.network.shuffler.test_summing import report_of
from tests.support.nats_cluster import MISSING, server_binary
from tests.support.nats_fronts import Front, state_of
from tests.support.network_world import QUERY, World
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


def both(*actions: Callable[[], Any]) -> list[Any]:
    """Do several things at the same time."""
    barrier = threading.Barrier(len(actions))

    def act(action: Callable[[], Any]) -> Any:
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(act, actions))


def test_front_ends_that_fill_a_batch_together_agree(front: Front) -> None:
    """Overlapping reports from three front ends, more than fit: exactly n ids are in, each accepted by one."""
    fronts = [front() for _ in range(3)]
    for number in range(4):
        id = replace(ID, number=number)
        fronts[0].create(replace(ROW, id=id, users=50), KEY)
        reports = [(os.urandom(16), os.urandom(30)) for _ in range(80)]
        orders = [reports[15 * one :] + reports[: 15 * one] for one in range(3)]

        def send(one: int, id: Any = id, orders: Any = orders) -> list[tuple[bytes, Reason | None]]:
            told = []
            for start in range(0, 80, 7):
                sent = orders[one][start : start + 7]
                told += list(zip([report for report, _ in sent], fronts[one].add(id, sent), strict=True))
            return told

        told = [pair for answers in both(*(lambda one=one: send(one) for one in range(3))) for pair in answers]
        accepted = Counter(report for report, verdict in told if verdict is None)
        assert len(accepted) == 50
        assert set(accepted.values()) == {1}
        assert {verdict for _, verdict in told} == {None, Reason.duplicate, Reason.late}
        assert not accepted.keys() & {report for report, verdict in told if verdict == Reason.late} - accepted.keys()
        members = [list(one.reports(id)) for one in fronts]
        assert members[0] == members[1] == members[2]
        assert {report for report, _ in members[0]} == set(accepted)
        fronts[number % 3].release(id, [b"tags"])


def test_a_release_is_known_everywhere_at_once(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that heard of it from one front end may ask any other for it, however late that one hears."""
    one, other = front(), front()
    one.create(ROW, KEY)
    one.add(ID, REPORTS)
    until(lambda: state_of(other) == State.sealed)
    learn = other.rows.follower.apply

    async def late(message: Stored, subject: str) -> None:
        await asyncio.sleep(0.2)
        await learn(message, subject)

    monkeypatch.setattr(other.rows.follower, "apply", late)
    one.release(ID, [b"tags"])
    assert other.chunk(ID, 0) == b"tags"
    one.scrub(ID)
    other.scrub(ID, last=True)
    assert state_of(other) == State.finished


def test_the_first_announcement_and_the_first_release_stand(front: Front) -> None:
    fronts = [front(), front()]
    keys = [os.urandom(32), os.urandom(32)]
    rows = [replace(ROW, opening=key) for key in keys]
    created = both(*(lambda one=one: fronts[one].create(rows[one], keys[one]) for one in range(2)))
    assert created[0] == created[1]
    assert fronts[0].key(ID) == fronts[1].key(ID) == created[0].opening
    until(lambda: len(front.streams()) == 1)
    fronts[0].add(ID, REPORTS)
    until(lambda: state_of(fronts[1]) == State.sealed)
    both(*(lambda one=one: fronts[one].release(ID, [b"tags of %d" % one]) for one in range(2)))
    assert fronts[0].chunk(ID, 0) == fronts[1].chunk(ID, 0)
    assert fronts[0].chunk(ID, 0) in (b"tags of 0", b"tags of 1")
    until(lambda: len(front.streams()) == 1)
    fronts[1].scrub(ID)
    until(lambda: not front.streams())


def test_front_ends_that_sum_together_give_one_sum(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three offer seeds, are told to exclude different ones and sum, all at once: one exclusion stands, one sum."""
    monkeypatch.setattr(summing, "SLICE", 2)
    monkeypatch.setattr(wire, "CHUNK_SEEDS", 5)
    world = World(users=12, transport=Transport.sums, excludable=4, store=front())
    common = (world.identity, world.coordinator.public, world.enrolment.public, world.limits, lambda: world.now)
    shufflers = [world.shuffler, *(Shuffler(front(), *common) for _ in range(2))]
    choices: tuple[list[int], ...] = ([0, 7], [11], [])

    def exclude(shuffler: Shuffler, number: int, positions: list[int]) -> Reason | None:
        said = Exclusion(task=world.task, batch=number, attempt=0, positions=positions)
        try:
            shuffler.exclude(world.coordinator.sign(said))
        except ProblemError as problem:
            return problem.reason
        return None

    for number in range(3):
        world.announce(number)
        world.upload(*(report_of(world, [user]) for user in range(12)), number=number)
        assert all(both(*(shuffler.advance for shuffler in shufflers)))
        sealed = world.seeds(number)
        told = both(*(partial(exclude, *these) for these in zip(shufflers, [number] * 3, choices, strict=True)))
        (stands,) = (choice for choice, refused in zip(choices, told, strict=True) if refused is None)
        assert told.count(Reason.conflict) == 2
        assert all(both(*(shuffler.advance for shuffler in shufflers)))
        left = [seed for place, seed in enumerate(sealed) if place not in stands]
        counts = world.counts(world.opened(left, number), number)
        assert sorted(counts, reverse=True) == [1] * len(left) + [0] * (QUERY.size - len(left))
        command = world.command(Action.collect, number)
        assert len({shuffler.collect(command) for shuffler in shufflers}) == 1
        world.scrub(number)


def test_a_batch_that_is_aborted_while_it_fills(front: Front) -> None:
    """Either it is sealed in time, or it is aborted and every id it had taken is spent."""
    fronts = [front(), front()]
    outcomes = set()
    for number in range(8):
        id = replace(ID, number=number)
        fronts[0].create(replace(ROW, id=id), KEY)
        reports = [(os.urandom(16), os.urandom(30)) for _ in range(3)]
        fronts[0].add(id, reports[:1])
        more, _ = both(partial(fronts[0].add, id, reports[1:]), partial(fronts[1].abort, id))
        told = [None, *more]
        for one in fronts:
            until(partial(_decided, one, id))
        state = state_of(fronts[0], id)
        outcomes.add(state)
        if state == State.sealed:
            assert told == [None] * 3
            fronts[0].release(id, [b"tags"])
            until(lambda id=id: state_of(fronts[1], id) == State.released)  # type: ignore[misc]
        again = fronts[1].add(id, reports)
        assert again == [Reason.late if verdict == Reason.late else Reason.replayed for verdict in told]
    assert outcomes <= {State.sealed, State.aborted}


def _decided(store: Store, id: BatchId) -> bool:
    return state_of(store, id) != State.open


def test_a_batch_that_is_finished_while_its_log_is_read(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not shown as sealed for ever."""
    one, other = front(), front()
    one.create(ROW, KEY)
    one.add(ID, REPORTS)
    begin = Log.begin

    async def slowly(log: Log) -> None:
        await begin(log)
        await asyncio.to_thread(one.release, ID, [b"tags"])
        while not other.rows.over(ID):
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Log, "begin", slowly)
    assert state_of(other) == State.released
    assert state_of(other) == State.released


def test_closing_ends_what_ending_work_begins(front: Front) -> None:
    broker, tasks = front().broker, list[asyncio.Task[None]]()

    async def work(then: bool) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            if then:
                tasks.append(broker.spawn(work(False)))

    async def begin() -> None:
        tasks.append(broker.spawn(work(True)))
        await asyncio.sleep(0)

    broker.run(begin())
    front.stores.pop().close()
    assert len(tasks) == 2
    assert all(task.cancelled() for task in tasks)
