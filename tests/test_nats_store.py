"""The shuffler's store on NATS, on a real cluster of three servers: the contract of stores, and several at once."""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network import broker, nats_store, summing, wire
from shufflerl.network.broker import Broker
from shufflerl.network.nats_store import NatsStore
from shufflerl.network.shuffler import Shuffler
from shufflerl.network.store import BatchId, Store
from shufflerl.network.wire import Action, Exclusion, ProblemError, Reason, State, Transport
from tests.contracts.store import ID, KEY, REPORTS, ROW, StoreContract
from tests.nats_cluster import MISSING, Cluster, server_binary
from tests.network_processes import until
from tests.network_world import QUERY, Crash, World, crash_at
from tests.test_summing import report_of

pytestmark = pytest.mark.skipif(server_binary() is None, reason=MISSING)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("nats"))
    yield cluster
    cluster.stop()


class Front:
    """Makes front ends of one shuffler."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.name = cluster, f"test-{secrets.token_hex(4)}"
        self.stores: list[NatsStore] = []

    def __call__(self) -> NatsStore:
        self.stores.append(NatsStore(self.cluster.url, name=self.name))
        return self.stores[-1]

    def streams(self) -> set[str]:
        """Streams of batches and releases that are there."""
        store = self.stores[-1]
        return set(store._broker.run(store._broker.streams(f"{self.name}-batch-")))


@pytest.fixture
def front(cluster: Cluster) -> Iterator[Front]:
    front = Front(cluster)
    yield front
    for store in front.stores:
        store.close()


class TestNats(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, front: Front) -> None:
        self.front = front

    def make(self) -> Store:
        return self.front()

    def reopen(self, store: Store) -> Store:
        """The old one is left as it is, as if its machine had been cut off."""
        return self.front()


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


def test_an_acknowledgement_that_was_lost(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored although it seemed not to be is sent again and counts once."""
    store = front()
    store.create(ROW, KEY)
    publish, lost = store._broker._jetstream.publish, 2

    async def losing(*args: Any, **options: Any) -> Any:
        nonlocal lost
        ack = await publish(*args, **options)
        if lost:
            lost -= 1
            raise NatsTimeoutError
        return ack

    monkeypatch.setattr(store._broker._jetstream, "publish", losing)
    assert store.add(ID, REPORTS[:2]) == [None, None]
    lost = 1
    store.extend(ID, 99.0)
    assert store.add(ID, REPORTS) == [Reason.duplicate, Reason.duplicate, None]
    lost = 1
    assert store.keep(ID, "order", b"first") == b"first"
    lost = 1
    store.release(ID, [b"tags"])
    batch = store.get(ID)
    assert batch is not None
    assert (batch.state, batch.accepted, batch.extensions, store.chunk(ID, 0)) == (State.released, 3, 1, b"tags")


def test_the_first_announcement_and_the_first_release_stand(front: Front) -> None:
    fronts = [front(), front()]
    keys = [os.urandom(32), os.urandom(32)]
    rows = [replace(ROW, opening=key) for key in keys]
    created = both(*(lambda one=one: fronts[one].create(rows[one], keys[one]) for one in range(2)))
    assert created[0] == created[1]
    assert fronts[0].key(ID) == fronts[1].key(ID) == created[0].opening
    until(lambda: len(front.streams()) == 1)
    fronts[0].add(ID, REPORTS)
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
    common = (world.identity, world.coordinator.public, world.enrolment, world.limits, lambda: world.now)
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
        again = fronts[1].add(id, reports)
        assert again == [Reason.late if verdict == Reason.late else Reason.replayed for verdict in told]
    assert outcomes <= {State.sealed, State.aborted}


def _decided(store: Store, id: BatchId) -> bool:
    return state_of(store, id) != State.open


def state_of(store: Store, id: BatchId = ID) -> State:
    batch = store.get(id)
    assert batch is not None
    return batch.state


def test_an_abort_that_was_not_finished_is_finished_by_another(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = front(), front()
    dying.create(ROW, KEY)
    dying.add(ID, REPORTS[:1])

    async def dies(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(dying, "_spend", dies)
    with pytest.raises(Crash):
        dying.abort(ID)
    until(lambda: other.add(ID, REPORTS[1:2]) == [Reason.late])
    other.extend(ID, 99.0)
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
        other.release(ID, [b"other tags"])
        assert other.chunk(ID, 0) == b"other tags"
        other.erase()
        assert len(front.streams()) == 2  # the other one may belong to somebody who is just about to name it
        monkeypatch.setattr(nats_store, "ABANDONED", -60.0)
        other.erase()
        assert len(front.streams()) == 1
        other.scrub(ID)
    elif label == "released":
        until(lambda: len(front.streams()) == 1)
        front().scrub(ID)
    until(lambda: not front.streams())
    assert other.add(ID, REPORTS[:1]) == [Reason.replayed]


def test_values_larger_than_a_message(front: Front) -> None:
    size = 3 * 2**20
    store = front()
    store.create(replace(ROW, users=2, announcement=os.urandom(size)), KEY)
    reports = [(os.urandom(16), os.urandom(size)), (os.urandom(16), os.urandom(100))]
    assert store.add(ID, reports) == [None, None]
    other = front()
    assert other.get(ID) == store.get(ID)
    assert list(other.reports(ID)) == reports
    part, chunk = os.urandom(size), os.urandom(size)
    assert store.keep(ID, "part", part) == part
    assert other.keep(ID, "part", b"another") == other.kept(ID, "part") == part
    other.release(ID, [chunk])
    assert store.chunk(ID, 0) == other.chunk(ID, 0) == chunk


def test_what_is_deleted_is_in_no_file_of_any_server(front: Front) -> None:
    store = front()
    reports = [(os.urandom(16), os.urandom(size)) for size in [30, 300, 3_000] * 10]
    tags, part = os.urandom(5_000), os.urandom(5_000)
    store.create(replace(ROW, users=len(reports)), KEY)
    for start in range(0, len(reports), 7):
        store.add(ID, reports[start : start + 7])
    store.keep(ID, "part", part)
    secret = [KEY, part, *(envelope for _, envelope in reports)]
    assert set(secret) <= _found(secret, front.cluster.folder)  # the search could find them
    store.release(ID, [tags])
    until(lambda: not _found(secret, front.cluster.folder))
    assert _found([tags], front.cluster.folder)
    store.scrub(ID)
    until(lambda: not _found([tags], front.cluster.folder))
    spent = store._broker.run(store._broker.get(store._spent, subject=f"{store._spent}.{TASK_NAME}"))
    assert spent is not None
    assert spent.value == b"".join(sorted(report for report, _ in reports))


TASK_NAME = f"{ID.task.hex()}.0.0"


def _found(secrets: list[bytes], folder: Path) -> set[bytes]:
    """Which of them are in any file below a folder, in the clear or as JSON has bytes."""
    files = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {secret for secret in secrets if secret in files}


def test_without_most_servers_nothing_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path)
    store = None
    try:
        store = NatsStore(cluster.url)
        store.create(ROW, KEY)
        assert store.add(ID, REPORTS[:1]) == [None]
        with monkeypatch.context() as patch:
            patch.setattr(broker, "PATIENCE", 1.0)
            cluster.kill(0)
            cluster.kill(1)
            with pytest.raises(StorageError, match="are two of its three servers up"):
                store.add(ID, REPORTS[1:2])
            # What /readyz asks. A server that led stays sure of itself for some seconds, and answers what it knows.
            until(lambda: _tried(store.unfinished) is None)
        cluster.start(0)
        cluster.start(1)
        cluster.wait()
        (verdict,) = until(lambda: _tried(lambda: store.add(ID, REPORTS[1:2])))  # the same bytes again
        assert verdict in (None, Reason.duplicate)
        assert store.add(ID, REPORTS[2:]) == [None]
        assert sorted(store.reports(ID)) == sorted(REPORTS)
    finally:
        if store is not None:
            store.close()
        cluster.stop()


def _tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StorageError:
        return None


def test_servers_must_be_named_rightly(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nats:// or tls://"):
        Broker("http://user:password@somewhere")
    with pytest.raises(InvalidInputError, match="not a file"):
        Broker("nats://127.0.0.1:4222", tmp_path / "nothing")
