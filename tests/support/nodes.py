"""Nodes with a shuffler on loopback, for tests: what they are given, keep and send."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shufflerl.envs.gym import TabularEnv
from shufflerl.envs.riverswim import riverswim
from shufflerl.network.node.node import Node
from shufflerl.network.node.outbox import Outbox, Parcel
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import Terms
from shufflerl.network.shuffler.app import ShufflerServer
from shufflerl.network.stores.store import SQLiteStore
from shufflerl.privacy.accounting import Budget
from tests.network.web.test_http import serving
from tests.support.network_world import World, agreement_of

TERMS = Terms(Budget(8.0, 1e-5), min_batch_size=2)
ENV = TabularEnv(riverswim(np.random.default_rng(0), n_states=2, horizon=2))


class Sent(NamedTuple):
    """All that a request tells beside the bytes of its body."""

    line: str
    headers: tuple[tuple[str, str], ...]
    body: int


class Overheard:
    """An application whose requests are written down before they are answered."""

    def __init__(self, app: ASGIApp, sent: list[Sent]) -> None:
        self.app, self.sent = app, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = 0

        async def overhear() -> Message:
            nonlocal body
            message = await receive()
            body += len(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = b"?".join(part for part in (scope["raw_path"], scope["query_string"]) if part)
                headers = tuple((name.decode(), value.decode()) for name, value in scope["headers"])
                self.sent.append(Sent(f"{scope['method']} {path.decode()}", headers, body))
            await send(message)

        await self.app(scope, overhear, answer)


class Place:
    """A shuffler on loopback with one open batch of two users, and nodes with folders of their own."""

    def __init__(self, folder: Path, port: int, world: World, server: ShufflerServer, sent: list[Sent]) -> None:
        self.folder, self.world, self._server, self.sent = folder, world, server, sent
        self.invitation = replace(world.invitation, shuffler=f"http://127.0.0.1:{port}")
        self.tokens: dict[str, bytes] = {}

    def node(self, name: str, **options: Any) -> Node:
        token = self.tokens.setdefault(name, self.world.mint())
        arguments: dict[str, Any] = {"invitation": self.invitation, "terms": TERMS, "env": ENV} | options
        return Node(token=token, folder=self.folder / name, **arguments)

    def parcel(self, name: str) -> Parcel:
        """What a closed node has in its outbox."""
        outbox = Outbox(self.folder / name / "outbox.db")
        parcel = outbox.get("node", self.world.task)
        outbox.close()
        assert parcel is not None
        return parcel

    @property
    def accepted(self) -> int:
        return self.world.shuffler.accepted

    def announce(self, *arguments: Any, **changes: Any) -> None:
        """As the coordinator does; in the server's own thread, as a shuffler is not for two at once."""
        self._server.owner.submit(self.world.announce, *arguments, **changes).result()

    def fill(self, number: int) -> None:
        """Others fill the open batch, and its release is scrubbed."""
        submit = self._server.owner.submit
        reports = [self.world.report() for _ in range(self.world.users)]
        submit(partial(self.world.upload, *reports, number=number)).result()
        submit(self.world.shuffler.advance).result()
        submit(self.world.scrub, number).result()

    def extend(self, times: int = 1) -> None:
        """The open batch is given more time; 60 times, and everybody is drawn."""
        store = self.world.store

        def extend() -> None:
            for _ in range(times):
                (batch,) = store.unfinished()
                store.extend(batch.id, batch.deadline + 1, before=batch.deadline)

        self._server.owner.submit(extend).result()

    def abort(self) -> None:
        """The open batch comes to nothing."""
        (batch,) = self.world.store.unfinished()
        self._server.owner.submit(self.world.store.abort, batch.id).result()


def releases(ledger: Path) -> list[str]:
    """What anybody finds in a ledger's file."""
    with contextlib.closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as db:
        return [name for (name,) in db.execute("SELECT name FROM releases")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nodes go to their shuffler past what others have set
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    world = World(users=2, store=SQLiteStore(tmp_path / "shuffler.db"), noise_mean=40.0)
    world.announce()
    server = ShufflerServer(world.shuffler, world.store)
    app, sent = server.app, list[Sent]()
    app.add_middleware(Overheard, sent=sent)
    with serving(app) as port:
        yield Place(tmp_path, port, world, server, sent)


class Short(gymnasium.Env[int, int]):
    """Ends after one step and pays a half."""

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.5, True, False, {}


HEADERS = ["accept", "accept-encoding", "connection", "host", "user-agent"]


def check_sent(place: Place) -> None:
    """Three requests, whoever sends them: what they tell beside the sealed body is the same for all, and no more."""
    path = f"/v1/tasks/{place.world.task.hex()}"
    report = wire.Report(report_id=bytes(16), envelope=bytes(agreement_of(place.world).envelope_bytes))
    upload = wire.encode(wire.Upload(batch=0, attempt=0, reports=[report]))
    expected = [
        (f"GET {path}/batch", HEADERS, 0),
        (f"GET {path}/status", HEADERS, 0),
        (f"POST {path}/reports", sorted([*HEADERS, "content-length", "content-type"]), len(upload)),
    ]
    found = [(sent.line, sorted(name for name, _ in sent.headers), sent.body) for sent in sorted(set(place.sent))]
    assert found == expected
    host = place.invitation.shuffler.removeprefix("http://")
    for sent in place.sent:
        assert dict(sent.headers)["host"] == host
