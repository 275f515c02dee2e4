"""The shuffler and the coordinator on HTTP: hostile requests, slow ones, many at once, and any that fuzzing finds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from starlette.applications import Starlette
from starlette.testclient import TestClient

from shufflerl.errors import InvalidInputError
from shufflerl.network.coordinator import app as coordinator_app_module
from shufflerl.network.coordinator.app import CoordinatorServer
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.node.reporting import seal_report
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.wire import (
    BatchStatus,
    OpenBatch,
    Outcomes,
    ProblemDetail,
    Signed,
    State,
    Upload,
    Verdict,
)
from shufflerl.network.shuffler import app as shuffler_app
from shufflerl.network.shuffler.app import ShufflerServer
from shufflerl.network.stores.store import SQLiteStore
from shufflerl.network.web import http, openapi
from tests.network.coordinator.test_coordinator import RUN
from tests.support.disk import Disk
from tests.support.network_world import World, pretend_to_seal
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, disk: Disk) -> World:
    world = World(noise_mean=40.0, store=SQLiteStore(tmp_path / "shuffler.db"))
    world.announce()
    return world


@pytest.fixture
def client(world: World) -> Iterator[TestClient]:
    with TestClient(ShufflerServer(world.shuffler, world.store, max_body=100_000).app) as client:
        yield client


def reports_path(world: World) -> str:
    return f"/v1/tasks/{world.task.hex()}/reports"


def problem_of(answer: httpx2.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    said = msgspec.json.decode(answer.content, type=ProblemDetail)
    assert said.status == answer.status_code
    assert said.title
    assert said.detail
    return said.status, said.type.rpartition(":")[2]


def upload_of(*reports: wire.Report) -> bytes:
    return wire.encode(Upload(batch=0, attempt=0, reports=list(reports)))


def test_bytes_that_wait_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one upload waits for the disk, another that would be too much with it is sent away, and is not lost."""
    first, second = world.marked_report(1), world.marked_report(2)
    room = len(upload_of(first)) + len(upload_of(second)) - 1
    monkeypatch.setattr(shuffler_app, "MAX_QUEUED_BYTES", room)
    entered, leave = threading.Event(), threading.Event()
    upload = world.shuffler.upload

    def slow(*arguments: Any) -> Any:
        entered.set()
        leave.wait(30)
        return upload(*arguments)

    monkeypatch.setattr(world.shuffler, "upload", slow)
    with TestClient(ShufflerServer(world.shuffler, world.store).app) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, reports_path(world), content=upload_of(first))
        assert entered.wait(30)
        assert problem_of(client.post(reports_path(world), content=upload_of(second))) == (503, "busy")
        leave.set()
        assert waiting.result().status_code == 200
        assert client.post(reports_path(world), content=upload_of(second)).status_code == 200
    assert world.shuffler.accepted == 2


def test_dummies_are_sealed_when_reports_leave_the_processor_idle(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[int, ...]] = []

    def pool(*given: int) -> ThreadPoolExecutor:
        pools.append(given)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(shuffler_app, "pool", pool)
    with TestClient(ShufflerServer(world.shuffler, world.store, workers=2).app):
        assert pools == [(2, shuffler_app.NICENESS)]
    assert shuffler_app.NICENESS > 0


def test_a_batch_over_http(world: World, client: TestClient) -> None:
    marks = [world.marked_report(mark) for mark in range(3)]
    path = f"/v1/tasks/{world.task.hex()}"
    batch = client.get(f"{path}/batch")
    assert wire.decode(OpenBatch, batch.content) == world.shuffler.current(world.task)
    answer = client.post(reports_path(world), content=upload_of(marks[0], marks[0], marks[1]))
    outcomes = wire.decode(Outcomes, answer.content).outcomes
    assert [outcome.verdict for outcome in outcomes] == [Verdict.accepted, Verdict.duplicate, Verdict.accepted]
    client.post(reports_path(world), content=upload_of(marks[2]))

    def state() -> State:
        return msgspec.json.decode(client.get(f"{path}/status").content, type=BatchStatus).state

    until(lambda: state() == State.released)
    command = wire.encode(world.command(wire.Action.collect))
    first, second = (client.post("/v1/releases", content=command).content for _ in range(2))
    assert first == second
    assert sorted(world.tags(first)) == list(range(9))
    scrubbed = client.post("/v1/scrubs", content=wire.encode(world.command(wire.Action.scrub)))
    assert msgspec.json.decode(scrubbed.content, type=BatchStatus).state == State.scrubbed
    assert problem_of(client.post("/v1/releases", content=command)) == (410, "gone")
    figures = client.get("/metrics").text
    assert "shufflerl_reports_accepted_total 3.0" in figures
    assert 'shufflerl_reports_refused_total{reason="duplicate"} 1.0' in figures


def test_unreadable_requests_are_refused_and_counted(world: World, client: TestClient) -> None:
    path, good = reports_path(world), upload_of(world.marked_report(1))
    future = msgspec.msgpack.encode({"version": 3, "reports": []})
    cases = {
        b"": "malformed",
        b"\xc1": "malformed",
        good[:-1]: "malformed",
        good + b"x": "malformed",
        b"\x91" * 5000: "malformed",
        b"\x81\xa1\x80\x01": "malformed",
        os.urandom(300): "malformed",
        future: "unsupported-version",
        msgspec.msgpack.encode({"version": 2, "batch": 0, "attempt": 0, "reports": []}): "malformed",
        msgspec.msgpack.encode({"version": 2, "batch": -1, "attempt": 0, "reports": [{}]}): "malformed",
    }
    for body, reason in cases.items():
        assert problem_of(client.post(path, content=body)) == (400, reason)
    assert problem_of(client.post(path, content=bytes(100_001))) == (413, "oversized")

    def drip() -> Iterator[bytes]:
        for _ in range(30):
            yield bytes(5000)

    assert problem_of(client.post(path, content=drip())) == (413, "oversized")
    assert problem_of(client.post("/v1/tasks/nonsense/reports", content=good)) == (400, "malformed")
    assert problem_of(client.get(f"/v1/tasks/{world.task.hex().upper()}/batch")) == (400, "malformed")
    assert problem_of(client.get(f"/v1/tasks/{bytes(16).hex()}/batch")) == (404, "unknown-batch")
    assert problem_of(client.get("/nowhere")) == (404, "not-found")
    wrong = client.get(path)
    assert problem_of(wrong) == (405, "not-allowed")
    assert wrong.headers["allow"] == "POST"
    for path in ("/v1/announcements", "/v1/releases", "/v1/scrubs"):
        assert problem_of(client.post(path, content=b"?")) == (400, "malformed")
        forged = wire.encode(Signed(payload=b"", signature=bytes(64)))
        assert problem_of(client.post(path, content=forged)) == (403, "unauthorized")
    assert world.shuffler.refused["malformed"] == 10  # type: ignore[index]
    assert world.shuffler.refused["oversized"] == 2  # type: ignore[index]
    assert world.shuffler.status(world.task).accepted == 0


def test_a_full_disk_is_told_and_nothing_is_acknowledged(disk: Disk, world: World, client: TestClient) -> None:
    disk.fill()
    answer = client.post(reports_path(world), content=upload_of(*(world.report() for _ in range(2))))
    assert problem_of(answer) == (507, "storage")
    assert world.shuffler.accepted == 0


def test_no_answer_and_no_log_tells_an_origin(
    world: World, client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    report = world.report()
    client.post(reports_path(world), content=upload_of(report), headers={"x-forwarded-for": "192.0.2.7"})
    client.post(reports_path(world), content=b"bad", headers={"x-forwarded-for": "192.0.2.7"})
    everything = caplog.text + client.get("/metrics").text + client.get(f"/v1/tasks/{world.task.hex()}/status").text
    assert "192.0.2.7" not in everything
    assert "testclient" not in everything
    assert report.report_id.hex() not in everything


@contextmanager
def serving(app: Starlette) -> Iterator[int]:
    ports: list[int] = []
    server = http.server(app, ports.append)
    with http.listening("127.0.0.1", 0) as sockets:
        thread = threading.Thread(target=server.run, args=[sockets])
        thread.start()
        try:
            yield until(lambda: ports)[0]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_slow_clients_are_cut_off_and_hold_nobody_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEADER_SECONDS", 1.5)
    monkeypatch.setattr(http, "BODY_SECONDS", 1.5)
    head = f"POST {reports_path(world)} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n".encode()
    with serving(ShufflerServer(world.shuffler, world.store).app) as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        try:
            for number, connection in enumerate(slow):
                connection.sendall((b"GET /healthz HTTP/1.1\r\nx-slow: ", head + b"only part", b"")[number % 3])
                connection.settimeout(PATIENCE)
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client:
                began = time.monotonic()
                assert client.get("/healthz").status_code == 200
                answer = client.post(reports_path(world), content=upload_of(world.report()))
                assert wire.decode(Outcomes, answer.content).outcomes[0].verdict == Verdict.accepted
                assert time.monotonic() - began < 60  # one after the other the slow ones would take 90 s
            for number, connection in enumerate(slow):
                said = _read(connection)
                assert (b" 408 " in said) == (number % 3 == 1)
        finally:
            for connection in slow:
                connection.close()


def _read(connection: socket.socket) -> bytes:
    """All that the server says until it ends the connection."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        parts.append(part)
        if not part or b"408" in part:
            break
    return b"".join(parts)


@pytest.mark.slow
def test_ten_thousand_reports_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_seal(monkeypatch)  # what is stored and mixed is tested, not how it is sealed
    users = 10_000
    world = World(users=users, store=SQLiteStore(tmp_path / "shuffler.db"), noise_mean=1e-9)
    world.announce()
    checked, mint = world.checked(), world.mint
    bodies = [
        upload_of(
            *(seal_report(checked, [3 * mark, 3 * mark + 1, 3 * mark + 2], mint()) for mark in range(start, start + 20))
        )
        for start in range(0, users, 20)
    ]
    with serving(ShufflerServer(world.shuffler, world.store).app) as port:
        path = reports_path(world)

        def send(some: list[bytes]) -> int:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client:
                answers = [client.post(path, content=body) for body in some]
            outcomes = [one for answer in answers for one in wire.decode(Outcomes, answer.content).outcomes]
            return sum(outcome.verdict == Verdict.accepted for outcome in outcomes)

        with ThreadPoolExecutor(25) as threads:
            assert sum(threads.map(send, (bodies[start::25] for start in range(25)))) == users
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            status = f"/v1/tasks/{world.task.hex()}/status"
            until(lambda: client.get(status).json()["state"] == "released")
            chunks = client.get(status).json()["chunks"]
            released = [
                client.post(
                    "/v1/releases", content=wire.encode(world.command(wire.Action.collect, chunk=chunk))
                ).content
                for chunk in range(chunks)
            ]
    assert sorted(world.tags(b"".join(released))) == list(range(3 * users))


# Fuzzing from the OpenAPI descriptions.


def coordinator_app(folder: Path) -> Starlette:
    return CoordinatorServer(lambda: Coordinator(folder, RUN), "http://127.0.0.1:9", poll=5.0).app


def test_the_coordinator_tells_how_it_is_doing(tmp_path: Path) -> None:
    with TestClient(coordinator_app(tmp_path)) as client:
        until(lambda: client.get("/v1/status").json()["trouble"])
        status = client.get("/v1/status").json()
        assert "tried again" in status["why"]
        assert status["episodes_played"] == 0
        assert problem_of(client.get("/readyz")) == (503, "unreachable")
        assert "The shuffler at http://127.0.0.1:9 cannot be reached" in client.get("/readyz").json()["detail"]
        assert client.get("/healthz").json() == {"status": "alive"}
        assert problem_of(client.get("/v1/policy")) == (404, "not-found")
        assert client.get("/v1/certificate").json()["epsilon"] <= 8.0
        assert client.get("/v1/batches").json() == {"batches": []}
        assert "shufflerl_episodes_played 0.0" in client.get("/metrics").text


class Fault(Exception):
    """Something that nobody expected."""


FULL = sqlite3.OperationalError("database or disk is full")
FULL.sqlite_errorcode = sqlite3.SQLITE_FULL


@pytest.mark.parametrize(
    ("reason", "answer", "text"),
    [
        (FULL, (507, "storage"), "coordinator.db is full"),
        (httpx2.ReadTimeout(""), (503, "unreachable"), "(ReadTimeout)"),
        (wire.ProblemError(wire.Reason.below_minimum, "The shuffler refuses."), (403, "below-minimum"), "refuses"),
        (Fault("odd"), (503, "failed"), "Fault: odd"),
    ],
)
def test_what_holds_a_coordinator_up_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception, answer: tuple[int, str], text: str
) -> None:
    """Never as too many requests; and whatever it is, the coordinator goes on once it has passed."""
    failing = [True]

    async def step(*_: Any) -> float:
        if failing:
            raise reason
        return 5.0

    monkeypatch.setattr(CoordinatorServer, "step", step)
    monkeypatch.setattr(coordinator_app_module, "LAST_RETRY", 0.1)
    with TestClient(coordinator_app(tmp_path)) as client:
        until(lambda: client.get("/readyz").status_code != 200)
        assert problem_of(client.get("/readyz")) == answer
        assert text in client.get("/readyz").json()["detail"]
        assert text in client.get("/v1/status").json()["why"]
        failing.clear()
        until(lambda: client.get("/readyz").status_code == 200)
        assert client.get("/v1/status").json()["trouble"] is None


@pytest.mark.parametrize("status", [200, 404, 503])
def test_another_server_in_the_shufflers_place_is_not_taken_for_it(tmp_path: Path, status: int) -> None:
    server = CoordinatorServer(lambda: Coordinator(tmp_path, RUN), "http://shuffler")
    page = httpx2.MockTransport(lambda _: httpx2.Response(status, content=b"<html>"))

    async def step() -> None:
        async with httpx2.AsyncClient(base_url="http://shuffler", transport=page) as client:
            await server.step(client)

    with pytest.raises(
        wire.ProblemError, match=rf"What answers at http://shuffler is no shuffler.*status {status}"
    ) as no:
        asyncio.run(step())
    assert no.value.reason == wire.Reason.unreachable
    server.owner.submit(server.coordinator.close).result()


def test_a_shuffler_that_fails_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was: a loop that had ended in silence would leave batches sealed for ever."""
    seen: list[bool] = []

    def unfinished() -> Any:
        seen.append(True)
        raise Fault("odd")

    monkeypatch.setattr(shuffler_app, "TICK", 0.01)
    with TestClient(ShufflerServer(world.shuffler, world.store).app) as client:
        with monkeypatch.context() as patch:
            patch.setattr(world.store, "unfinished", unfinished)
            until(lambda: len(seen) > 2)
            assert "Fault: odd" in client.get("/readyz").json()["detail"]
        until(lambda: client.get("/readyz").status_code == 200)


def test_a_port_is_taken_once() -> None:
    with http.listening("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        with pytest.raises(
            InvalidInputError, match=rf"Nothing can listen at 127\.0\.0\.1:{port} \(Address already in use"
        ):
            http.listening("127.0.0.1", port).__enter__()
    with http.listening("localhost", port) as sockets:  # it is free again
        assert sockets
    for host in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(InvalidInputError, match="set `listen` to an address of this machine"):
            http.listening(host, 0).__enter__()


KINDS = {kind.__name__: kind for kind in (Upload, Signed)}


@schemathesis.serializer(wire.MEDIA_TYPE)
def as_message_pack(ctx: Any, value: Any) -> bytes:
    """Well-formed messages where the value is one, so that fuzzing gets past the door; else whatever it is."""
    for kind in KINDS.values():
        with contextlib.suppress(msgspec.ValidationError):
            return wire.encode(msgspec.convert(value, kind))
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, ValueError):
        return repr(value).encode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["shuffler", "coordinator"])
def test_fuzzing_finds_no_server_error(role: str, tmp_path: Path) -> None:
    """Requests made from the description, good and bad; whatever comes back is no 5xx of ours."""
    if role == "shuffler":
        world = World(store=SQLiteStore(tmp_path / "shuffler.db"))
        world.announce()
        app, description = ShufflerServer(world.shuffler, world.store).app, openapi.SHUFFLER
    else:
        app, description = coordinator_app(tmp_path), openapi.COORDINATOR
    schema = schemathesis.openapi.from_dict(description)
    with TestClient(app, raise_server_exceptions=False) as client:
        for found in schema.get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr]
            if operation.path == "/readyz" and role == "coordinator":
                continue  # says 503 for a reason: there is no shuffler
            if operation.path == "/v1/events":
                continue  # goes on until it is left
            _fuzz(operation, client)


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    known = ("method", "url", "params", "headers", "json", "data")
    kept = {key: value for key, value in arguments.items() if key in known and value is not None}
    if isinstance(kept.get("data"), bytes | str):
        kept["content"] = kept.pop("data")
    return kept


def _fuzz(operation: Any, client: TestClient) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def attack(case: Any) -> None:
        answer = client.request(**_plain(case.as_transport_kwargs(base_url="http://testserver")))
        assert answer.status_code < 500, (operation.label, answer.text)

    attack()


@pytest.mark.parametrize("state", [State.open, State.sealed])
def test_a_shuffler_whose_disk_is_in_the_way_is_told(tmp_path: Path, state: State) -> None:
    """Why a batch is not advancing: not "waits for users" or "being mixed" while its shuffler cannot."""
    said = BatchStatus(batch=0, attempt=0, state=state, users=3, accepted=2, chunks=0, extensions=0, seconds_left=1.0)
    full = wire.ProblemError(wire.Reason.storage, "The disk is full.").problem

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/readyz":
            return httpx2.Response(507, content=msgspec.json.encode(full))
        return httpx2.Response(200, content=msgspec.json.encode(said))

    server = CoordinatorServer(lambda: Coordinator(tmp_path, RUN), "http://shuffler")

    async def step() -> None:
        async with httpx2.AsyncClient(base_url="http://shuffler", transport=httpx2.MockTransport(answer)) as client:
            await server.step(client)

    with pytest.raises(wire.ProblemError, match="disk is full"):
        asyncio.run(step())
    server.owner.submit(server.coordinator.close).result()
