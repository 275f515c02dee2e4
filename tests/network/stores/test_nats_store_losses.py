"""Messages, connections and servers that are lost: a store on NATS tries again, and says when it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import TimeoutError as NatsTimeoutError

from shufflerl.errors import StorageError
from shufflerl.network.protocol.wire import Reason, State
from shufflerl.network.stores import broker
from shufflerl.network.stores.nats_store import NatsStore
from tests.contracts.store import ID, KEY, REPORTS, ROW
from tests.support.nats_cluster import MISSING, Cluster, server_binary
from tests.support.nats_fronts import Front, state_of
from tests.support.waiting import until

pytestmark = [pytest.mark.slow(8), pytest.mark.skipif(server_binary() is None, reason=MISSING)]


def test_an_acknowledgement_that_was_lost(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored although it seemed not to be is sent again and counts once."""
    store = front()
    store.create(ROW, KEY)
    publish, lost = store.broker.jetstream.publish, 2

    async def losing(*args: Any, **options: Any) -> Any:
        nonlocal lost
        ack = await publish(*args, **options)
        if lost:
            lost -= 1
            raise NatsTimeoutError
        return ack

    monkeypatch.setattr(store.broker.jetstream, "publish", losing)
    assert store.add(ID, REPORTS[:2]) == [None, None]
    lost = 1
    store.extend(ID, 99.0, before=ROW.deadline)
    assert store.add(ID, REPORTS) == [Reason.duplicate, Reason.duplicate, None]
    lost = 1
    assert store.keep(ID, "order", b"first") == b"first"
    lost = 1
    store.release(ID, [b"tags"])
    batch = store.get(ID)
    assert batch is not None
    assert (batch.state, batch.accepted, batch.extensions, store.chunk(ID, 0)) == (State.released, 3, 1, b"tags")


def test_a_message_lost_on_the_way_is_asked_for_again(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that did not see a record would think that its ids are new, or that the batch is not full."""
    store, other = front(), front()
    store.create(ROW, KEY)
    assert state_of(other) == State.open
    next_message, lost = Subscription.next_msg, 1

    async def losing(self: Subscription, timeout: float | None = 1.0) -> Msg:
        nonlocal lost
        message = await next_message(self, timeout)
        if message.reply and lost and threading.current_thread() is other.broker.thread:
            lost -= 1
            return await losing(self, timeout)
        return message

    monkeypatch.setattr(Subscription, "next_msg", losing)
    for report in REPORTS:
        assert store.add(ID, [report]) == [None]
    until(lambda: state_of(other) == State.sealed)
    assert lost == 0
    assert list(store.reports(ID)) == list(other.reports(ID)) == REPORTS


def test_a_connection_that_was_closed_for_good_is_made_anew(front: Front) -> None:
    store = front()
    store.create(ROW, KEY)
    store.broker.run(store.broker.client.close())
    assert store.add(ID, REPORTS) == [None] * 3
    assert state_of(store) == State.sealed


def test_without_most_servers_nothing_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path)
    store = None
    try:
        store = NatsStore(cluster.url)
        store.create(ROW, KEY)
        assert store.add(ID, REPORTS[:1]) == [None]
        with monkeypatch.context() as patch:
            patch.setattr(broker, "PATIENCE", 1.0)
            dead = [number for number in range(3) if f"server-{number}" != _leader(store)]
            for number in dead:
                cluster.kill(number)
            with pytest.raises(StorageError, match="are two of its three servers up"):
                store.add(ID, REPORTS[1:2])
            # What /readyz asks. The server that led stays sure of itself for some seconds, and answers ever after.
            until(lambda: _tried(store.unfinished) is None)
        for number in dead:
            cluster.start(number)
        cluster.wait()
        (verdict,) = until(lambda: _tried(lambda: store.add(ID, REPORTS[1:2])))  # the same bytes again
        assert verdict in (None, Reason.duplicate)
        assert store.add(ID, REPORTS[2:]) == [None]
        assert sorted(store.reports(ID)) == sorted(REPORTS)
    finally:
        if store is not None:
            store.close()
        cluster.stop()


def _leader(store: NatsStore) -> str | None:
    said = store.broker.run(store.broker.jetstream.stream_info("shufflerl-rows"))
    assert said.cluster is not None
    return said.cluster.leader


def _tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StorageError:
        return None
