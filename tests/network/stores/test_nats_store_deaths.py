"""Front ends that are paused or die in the middle of a batch: another goes on, and nothing is forgotten."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shufflerl.network.protocol.wire import Reason, State
from shufflerl.network.shuffler import mixing
from shufflerl.network.stores.nats_store import NatsStore
from shufflerl.network.stores.store import BatchId, Store
from tests.contracts.store import ID, KEY, REPORTS, ROW
from tests.support.nats_cluster import MISSING, server_binary
from tests.support.nats_fronts import Front, state_of
from tests.support.network_world import Crash, World, crash_at, dying, pretend_to_seal
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


def test_a_front_end_that_was_paused_forgets_no_id(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read a part of the log, wakes up after the release, and would abort the batch by what it knows."""
    paused, other = front(), front()
    paused.create(ROW, KEY)
    paused.add(ID, REPORTS[:1])
    log = paused.logs[ID]
    log.stop()
    close = log.close

    def meanwhile() -> None:
        other.add(ID, REPORTS[1:])
        other.release(ID, [b"tags"])
        until(lambda: paused.rows.over(ID))

    async def wakes() -> None:
        await asyncio.to_thread(meanwhile)
        await close()

    monkeypatch.setattr(log, "close", wakes)
    paused.abort(ID)
    assert state_of(paused) == State.released
    following = replace(ID, number=1)
    other.create(replace(ROW, id=following), KEY)
    assert front().add(following, REPORTS) == [Reason.replayed] * 3


def test_a_front_end_that_was_paused_cannot_release(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up with a release half stored, or all but named: the one that stands is never touched."""
    for number, scrubs in enumerate((False, True)):
        id = replace(ID, number=number)
        paused, other = front(), front()
        paused.create(replace(ROW, id=id), KEY)
        paused.add(id, [(os.urandom(16), os.urandom(30)) for _ in range(3)])

        def chunks(id: BatchId = id, other: NatsStore = other, scrubs: bool = scrubs) -> Iterator[bytes]:
            yield b"mine 0"
            until(lambda: state_of(other, id) == State.sealed)
            other.release(id, [b"theirs"])
            if scrubs:
                other.scrub(id)
            yield b"mine 1"

        paused.release(id, chunks())
        until(partial(_is, paused, id, State.scrubbed if scrubs else State.released))
        for one in (paused, other):
            assert [one.chunk(id, 0), one.chunk(id, 1)] == [None if scrubs else b"theirs", None]
        until(lambda: len(front.streams()) == 1)  # the first batch's release


def _is(store: Store, id: BatchId, state: State) -> bool:
    return state_of(store, id) == state


def test_an_abort_that_was_not_finished_is_finished_by_another(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = front(), front()
    dying.create(ROW, KEY)
    dying.add(ID, REPORTS[:1])

    async def dies(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(dying, "spend", dies)
    with pytest.raises(Crash):
        dying.abort(ID)
    until(lambda: other.add(ID, REPORTS[1:2]) == [Reason.late])
    other.extend(ID, 99.0, before=ROW.deadline)
    assert state_of(other) == State.aborted
    assert other.add(ID, REPORTS[:2]) == [Reason.replayed, Reason.late]
    until(lambda: not front.streams())


@pytest.mark.parametrize("label", ["release", "released", "scrubbed"])
def test_what_a_dead_front_end_left_is_deleted(front: Front, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    dying, other = front(), front()
    dying.create(ROW, KEY)
    dying.add(ID, REPORTS)
    until(lambda: state_of(other) == State.sealed)
    with crash_at(label, monkeypatch):
        dying.release(ID, [b"tags"])
        dying.scrub(ID)
    dying.close()
    front.stores.remove(dying)
    if label == "release":  # a release that no row names: another does it again
        other.erase()
        assert len(front.streams()) == 2  # it may belong to somebody who is just about to name it
        other.release(ID, [b"other tags"])
        assert other.chunk(ID, 0) == b"other tags"
        until(lambda: len(front.streams()) == 1)  # two tasks delete it: one may be told it is gone too early
        other.scrub(ID)
    elif label == "released":
        until(lambda: len(front.streams()) == 1)
        front().scrub(ID)
    until(lambda: not front.streams())
    assert other.add(ID, REPORTS[:1]) == [Reason.replayed]


def test_slices_are_shared_and_a_dead_process_is_replaced(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes mix one batch; the first dies in the middle, the second goes on with what it left."""
    pretend_to_seal(monkeypatch)
    monkeypatch.setattr(mixing, "SLICE_BYTES", 1)
    monkeypatch.setattr(mixing, "BUCKET_TAGS", 8)
    world = World(users=6, noise_mean=1e-9, store=front())
    world.announce()
    world.upload(*(world.marked_report(mark) for mark in range(6)))
    keep = world.store.keep

    monkeypatch.setattr(world.store, "keep", dying(keep, 9))
    with pytest.raises(Crash):
        world.shuffler.advance()
    opened = Counter[bytes]()
    monkeypatch.setattr(mixing, "opened", counting(mixing.opened, opened))
    world.store = front()
    world.restart()
    assert world.shuffler.advance()
    assert 0 < opened.total() < 6
    assert sorted(world.tags(world.collect())) == list(range(18))


def counting(action: Callable[..., Any], calls: Counter[bytes]) -> Callable[..., Any]:
    def counted(agreement: Any, key: Any, report: bytes, envelope: bytes) -> Any:
        calls[report] += 1
        return action(agreement, key, report, envelope)

    return counted
