"""The shuffler's store on NATS, on a real cluster of three servers: the contract of stores, and several at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import NameOID
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import TimeoutError as NatsTimeoutError

from shufflerl.errors import InvalidInputError, StorageError
from shufflerl.network import broker, mixing, summing, wire
from shufflerl.network.broker import Broker
from shufflerl.network.nats_log import Log
from shufflerl.network.nats_store import NatsStore
from shufflerl.network.shuffler import Shuffler
from shufflerl.network.store import BatchId, Store
from shufflerl.network.wire import Action, Exclusion, ProblemError, Reason, State, Transport
from tests.contracts.store import ID, KEY, REPORTS, ROW, StoreContract
from tests.nats_cluster import MISSING, Cluster, free_ports, server_binary
from tests.network_processes import until
from tests.network_world import QUERY, Crash, World, crash_at, pretend_to_seal
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
            until(lambda id=id: state_of(fronts[1], id) == State.released)  # type: ignore[misc]
        again = fronts[1].add(id, reports)
        assert again == [Reason.late if verdict == Reason.late else Reason.replayed for verdict in told]
    assert outcomes <= {State.sealed, State.aborted}


def _decided(store: Store, id: BatchId) -> bool:
    return state_of(store, id) != State.open


def state_of(store: Store, id: BatchId = ID) -> State:
    batch = store.get(id)
    assert batch is not None
    return batch.state


def test_a_front_end_that_was_paused_forgets_no_id(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read a part of the log, wakes up after the release, and would abort the batch by what it knows."""
    paused, other = front(), front()
    paused.create(ROW, KEY)
    paused.add(ID, REPORTS[:1])
    log = paused._logs[ID]
    log.stop()
    close = log.close

    def meanwhile() -> None:
        other.add(ID, REPORTS[1:])
        other.release(ID, [b"tags"])
        until(lambda: paused._rows.over(ID))

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


def test_a_stream_in_the_making_is_kept_whatever_the_clocks_say(front: Front) -> None:
    """A front end that starts with a clock far ahead, while another one is releasing."""
    slow = front()
    slow.create(ROW, KEY)
    slow.add(ID, REPORTS)

    def chunks() -> Iterator[bytes]:
        yield b"first"
        front().erase()
        yield b"second"

    slow.release(ID, chunks())
    assert [slow.chunk(ID, 0), slow.chunk(ID, 1)] == [b"first", b"second"]


def test_a_batch_that_is_finished_while_its_log_is_read(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not shown as sealed for ever."""
    one, other = front(), front()
    one.create(ROW, KEY)
    one.add(ID, REPORTS)
    begin = Log.begin

    async def slowly(log: Log) -> None:
        await begin(log)
        await asyncio.to_thread(one.release, ID, [b"tags"])
        while not other._rows.over(ID):
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Log, "begin", slowly)
    assert state_of(other) == State.released
    assert state_of(other) == State.released


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
        other.erase()
        assert len(front.streams()) == 2  # it may belong to somebody who is just about to name it
        other.release(ID, [b"other tags"])
        assert other.chunk(ID, 0) == b"other tags"
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


def test_ids_of_a_batch_that_is_still_open_are_not_stored_as_spent(front: Front) -> None:
    """A part of them in the place of all would let the others take part again."""
    store = front()
    store.create(ROW, KEY)
    store.add(ID, REPORTS[:1])
    with pytest.raises(StorageError, match="not decided yet"):
        store._broker.run(store._spend(ID, store._logs[ID]))
    assert store._broker.run(store._broker.get(store._spent, subject=f"{store._spent}.{TASK_NAME}")) is None


def test_what_is_deleted_is_in_no_file_of_any_server(front: Front) -> None:
    store = front()
    reports = [(os.urandom(16), os.urandom(size)) for size in [30, 300, 3_000] * 10]
    key, tags, part = os.urandom(32), os.urandom(5_000), os.urandom(5_000)
    store.create(replace(ROW, users=len(reports)), key)
    for start in range(0, len(reports), 7):
        store.add(ID, reports[start : start + 7])
    store.keep(ID, "part", part)
    secret = [key, part, *(envelope for _, envelope in reports)]
    assert set(secret) == _found(secret, front.cluster.folder).keys()  # the search could find them
    store.release(ID, [tags])
    _gone(secret, front.cluster.folder)
    assert _found([tags], front.cluster.folder)
    store.scrub(ID)
    _gone([tags], front.cluster.folder)
    spent = store._broker.run(store._broker.get(store._spent, subject=f"{store._spent}.{TASK_NAME}"))
    assert spent is not None
    assert spent.value == b"".join(sorted(report for report, _ in reports))


TASK_NAME = f"{ID.task.hex()}.0.0"


def _found(secrets: list[bytes], folder: Path) -> dict[bytes, Path]:
    """Which of them are in any file below a folder, and where."""
    found: dict[bytes, Path] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # servers are just deleting some
                text = Path(place, name).read_bytes()
                found |= {secret: Path(place, name) for secret in secrets if secret in text}
    return found


def _gone(secrets: list[bytes], folder: Path) -> None:
    """Each server deletes by itself: one that is behind, as it got no processor time, does when it has caught up."""
    deadline = time.monotonic() + 120.0
    while (left := _found(secrets, folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(left.values())


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
    said = store._broker.run(store._broker._jetstream.stream_info("shufflerl-rows"))
    assert said.cluster is not None
    return said.cluster.leader


def _tried(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StorageError:
        return None


def test_files_can_be_encrypted(tmp_path: Path) -> None:
    """As in examples/nats/server.conf: not even what is stored can be read from the disk."""
    cluster = Cluster(tmp_path, storage=', cipher: aes, key: "of the servers"')
    try:
        store = NatsStore(cluster.url)
        store.create(ROW, KEY)
        store.add(ID, REPORTS)
        assert sorted(store.reports(ID)) == sorted(REPORTS)
        assert not _found([KEY, *(envelope for _, envelope in REPORTS)], tmp_path)
        store.close()
    finally:
        cluster.stop()


def test_the_example_is_a_server(tmp_path: Path) -> None:
    certify(tmp_path)
    binary = server_binary()
    assert binary is not None
    names = ("SERVER_NAME", "STORE_PASSWORD", "CLUSTER_PASSWORD", "STORE_KEY")
    example = Path(__file__).parent.parent / "examples" / "nats" / "server.conf"
    checked = subprocess.run(
        [binary, "-t", "-c", str(example)],
        cwd=tmp_path,
        env={name: f"a-{name}" for name in names},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_servers_must_be_named_rightly(tmp_path: Path) -> None:
    for wrong in ("http://user:secret@somewhere:1", "nats://a:4222,b:4222", "nats://a:port", "nats://a", ""):
        with pytest.raises(InvalidInputError, match="nats:// or tls://") as refused:
            Broker(wrong)
        assert "secret" not in str(refused.value)
    with pytest.raises(InvalidInputError, match="not a file"):
        Broker("nats://127.0.0.1:4222", tmp_path / "nothing")
    other = tmp_path / "other"
    other.write_text("neither")
    with pytest.raises(InvalidInputError, match="not a certificate"):
        Broker("nats://127.0.0.1:4222", authority=other)
    with pytest.raises(InvalidInputError, match="no NATS USER JWT"):
        Broker("nats://127.0.0.1:4222", other)


def test_a_connection_that_was_closed_for_good_is_made_anew(front: Front) -> None:
    store = front()
    store.create(ROW, KEY)
    store._broker.run(store._broker._client.close())
    assert store.add(ID, REPORTS) == [None] * 3
    assert state_of(store) == State.sealed


class TestAccess:
    """One server with a user, a password and TLS."""

    @pytest.fixture
    def port(self, tmp_path: Path) -> Iterator[int]:
        certify(tmp_path)
        (port,) = free_ports(1)
        settings = tmp_path / "server.conf"
        settings.write_text(
            f"""
listen: "127.0.0.1:{port}"
authorization {{ user: shuffler, password: "open sesame" }}
tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key" }}
"""
        )
        binary = server_binary()
        assert binary is not None
        with subprocess.Popen([binary, "-c", str(settings)], stderr=subprocess.DEVNULL) as server:
            yield port
            server.kill()

    def test_a_user_is_known_and_the_server_too(self, tmp_path: Path, port: int) -> None:
        Broker(f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem").close()

    def test_others_are_refused_and_no_password_is_told(
        self, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(StorageError, match="refuses the user") as refused:
            Broker(f"tls://shuffler:wrong-secret@127.0.0.1:{port}", authority=tmp_path / "authority.pem")
        assert "wrong-secret" not in str(refused.value) + caplog.text

    def test_a_certificate_of_somebody_else_is_told(self, tmp_path: Path, port: int) -> None:
        other = tmp_path / "other"
        other.mkdir()
        certify(other)
        context = broker._options(f"tls://127.0.0.1:{port}", None, other / "authority.pem")["tls"]
        Broker(
            f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem"
        ).close()  # it is up
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.recv(4096)  # the server's greeting, after which TLS begins
            with pytest.raises(ssl.SSLCertVerificationError) as met:
                context.wrap_socket(plain, server_hostname="127.0.0.1")
        assert "not trusted" in (said := broker._said(met.value))
        assert "store_authority" in said

    def test_a_server_that_is_too_old_is_told(self, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(broker, "OLDEST", (99, 0))
        with pytest.raises(StorageError, match=r"99\.0 or later"):
            Broker(f"tls://shuffler:open%20sesame@127.0.0.1:{port}", authority=tmp_path / "authority.pem")


def certify(folder: Path) -> None:
    """A certificate authority and a certificate of 127.0.0.1 signed by it."""
    now = datetime.now(UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("authority", "server")}
    for name, key in keys.items():
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now - timedelta(hours=1),
            now + timedelta(hours=1),
        ).add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
        if name == "server":
            names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(keys["authority"], hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.key").write_bytes(text)


def test_slices_are_shared_and_a_dead_process_is_replaced(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes mix one batch; the first dies in the middle, the second goes on with what it left."""
    pretend_to_seal(monkeypatch)
    monkeypatch.setattr(mixing, "SLICE_BYTES", 1)
    monkeypatch.setattr(mixing, "BUCKET_TAGS", 8)
    world = World(users=6, noise_mean=1e-9, store=front())
    world.announce()
    world.upload(*(world.marked_report(mark) for mark in range(6)))
    keep, left = world.store.keep, 9

    def dying(id: BatchId, name: str, value: bytes) -> bytes:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash
        return keep(id, name, value)

    monkeypatch.setattr(world.store, "keep", dying)
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


def test_whoever_finishes_a_batch_deletes_it(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has done so when it returns: nobody else needs to hear of it."""
    store = front()
    monkeypatch.setattr(store._rows, "_finished", lambda *_: None)
    store.create(ROW, KEY)
    (reports,) = front.streams()
    store.add(ID, REPORTS)
    store.release(ID, [b"tags"])
    (release,) = front.streams()
    assert release != reports
    store.scrub(ID)
    assert not front.streams()
    store.create(replace(ROW, id=replace(ID, number=1)), KEY)
    store.abort(replace(ID, number=1))
    assert not front.streams()


def test_a_message_lost_on_the_way_is_asked_for_again(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that did not see a record would think that its ids are new, or that the batch is not full."""
    store, other = front(), front()
    store.create(ROW, KEY)
    assert state_of(other) == State.open
    next_message, lost = Subscription.next_msg, 1

    async def losing(self: Subscription, timeout: float | None = 1.0) -> Msg:
        nonlocal lost
        message = await next_message(self, timeout)
        if message.reply and lost and threading.current_thread() is other._broker._thread:
            lost -= 1
            return await losing(self, timeout)
        return message

    monkeypatch.setattr(Subscription, "next_msg", losing)
    for report in REPORTS:
        assert store.add(ID, [report]) == [None]
    until(lambda: state_of(other) == State.sealed)
    assert lost == 0
    assert list(store.reports(ID)) == list(other.reports(ID)) == REPORTS
