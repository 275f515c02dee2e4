"""The networked system beside what it must reach: durable reports, opened tags, sealed reports, the demonstration.

Noise by servers is measured beside noise by users, in the same run.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bench.measure import Figure, core_time, medians, seconds
from shufflerl import Batch, CountQuery, Mixture, Problem, envs
from shufflerl.envs.gym import tabular_env
from shufflerl.network import demo
from shufflerl.network.coordinator.opening import Opener, count
from shufflerl.network.demo import Role
from shufflerl.network.node.reporting import Checked, make_report, play
from shufflerl.network.protocol import agreement, crypto, wire
from shufflerl.network.protocol.agreement import Agreement, NoiseBy, mechanism, parse_announcement
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import Action, Command, OpenBatch, Opening, Outcomes, Report, Upload, Verdict
from shufflerl.network.shuffler.shuffler import Limits, Shuffler
from shufflerl.network.stores.store import SQLiteStore, Store
from shufflerl.privacy.accounting import Budget

REPORTS, CONNECTIONS = 8_000, 64
USERS, BUDGET = 1_000, Budget(1.0, 1e-5)
MODES: tuple[NoiseBy, NoiseBy] = ("servers", "users")


def run() -> list[Figure]:
    """Durable reports per second, tags opened, dummies sealed, a batch's latency, a report's time, a demonstration."""
    return [*ingest(), *opening(), *batch(), *node(), *demonstration()]


def announced(users: int, noise: NoiseBy = "servers") -> tuple[Agreement, X25519PrivateKey, wire.Announcement]:
    """A batch of the paper's problem: RiverSwim with 4 states and 6 steps."""
    problem = envs.make("riverswim").problem(users)
    assert isinstance(problem, Problem)
    query = CountQuery.everything(problem)
    batch = Batch(0, users, Mixture.single(np.zeros((6, 4), dtype=int)), query)
    key = crypto.new_box_key()
    said = agreement.announce(
        batch,
        mechanism(noise, BUDGET).noise(query),
        task=bytes(range(16)),
        attempt=0,
        tag_key=key.public_key().public_bytes_raw(),
    )
    return parse_announcement(wire.encode(said)), key, said


# The shuffler.


def ingest() -> list[Figure]:
    """Reports from 64 connections, each acknowledged when it is on disk; every one is opened and checked."""
    rows, rates = [], {}
    for noise in MODES:
        rates[noise], delay, core, alone = _ingested(noise)
        what = f"durable reports, noise by {noise}, 64 connections"
        rows += [
            Figure.at_least(1, what, "per s", rates[noise], 2_000, "required"),
            Figure.at_least(1, f"{what}, by its own core", "per s", REPORTS / core, 2_000, "required"),
            Figure.at_least(1, what, "per s", rates[noise], alone, "one bare commit each"),
            Figure.under(250, f"99th percentile of their delay, noise by {noise}", "ms", delay),
        ]
    return rows


def _ingested(noise: NoiseBy) -> tuple[float, float, float, float]:
    """Reports per second, their delay, core time of the shuffler without its sealers, and bare commits per second."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        coordinator = SigningKey.load(folder / "coordinator.pem")
        shuffler = Role(
            "shuffler",
            folder,
            *("--folder", str(folder / "shuffler"), "--listen", "127.0.0.1:0", "--min-batch-size", "1"),
            *("--coordinator-key", str(coordinator.public)),
        )
        try:
            port, before = shuffler.heard()["port"], core_time(shuffler.process.pid)
            rate, delay = asyncio.run(_load(port, coordinator, folder, noise))
            core = core_time(shuffler.process.pid) - before
        finally:
            shuffler.stop()
        return rate, delay, core, _one_commit_each(folder, noise)


async def _load(port: int, coordinator: SigningKey, folder: Path, noise: NoiseBy) -> tuple[float, float]:
    _, _, said = announced(REPORTS, noise)
    task = said.task.hex()
    await ask(port, "POST", "/v1/announcements", wire.encode(coordinator.sign(said)))
    batch = wire.decode(OpenBatch, await ask(port, "GET", f"/v1/tasks/{task}/batch"))
    opening = wire.decode(Opening, batch.opening.payload)
    checked = Checked(parse_announcement(batch.announcement.payload), opening.envelope_key)
    enrolment = SigningKey.load(folder / "shuffler" / "enrolment.pem")
    bodies = iter([make_upload(checked, crypto.mint(enrolment)) for _ in range(REPORTS)])
    delays: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(*(send(port, task, bodies, delays) for _ in range(CONNECTIONS)))
    return REPORTS / (time.perf_counter() - began), 1e3 * float(np.quantile(delays, 0.99))


async def send(port: int, task: str, bodies: Iterator[bytes], delays: list[float]) -> None:
    """Send uploads over one connection, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in bodies:
        sent = time.perf_counter()
        writer.write(_request("POST", f"/v1/tasks/{task}/reports", body))
        (outcome,) = wire.decode(Outcomes, await _answer(reader)).outcomes
        delays.append(time.perf_counter() - sent)
        assert outcome.verdict == Verdict.accepted
    writer.close()


def make_upload(checked: Checked, token: bytes) -> bytes:
    """A report. Its tags are random bytes: the shuffler cannot tell, and sealing them is not what is timed."""
    report_id = crypto.report_id(checked.agreement.announcement.task, token)
    tags = secrets.token_bytes(checked.agreement.max_messages * wire.SEALED_TAG_BYTES)
    key = crypto.public_box_key(checked.envelope_key)
    envelope = crypto.seal(key, checked.agreement.envelope_info(report_id), token + tags)
    return wire.encode(Upload(batch=0, attempt=0, reports=[Report(report_id=report_id, envelope=envelope)]))


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0], head
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def ask(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(method, path, body))
    answer = await _answer(reader)
    writer.close()
    return answer


def _one_commit_each(folder: Path, noise: NoiseBy) -> float:
    """Commits per second of a bare database that stores the same reports one by one."""
    db = sqlite3.connect(folder / "bare.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE reports (report BLOB)")
    body = secrets.token_bytes(announced(REPORTS, noise)[0].envelope_bytes)
    each = seconds(lambda: db.execute("INSERT INTO reports VALUES (?)", (body,)), 300)
    db.close()
    return 1 / each


# The coordinator.


def opening() -> list[Figure]:
    """Tags opened and counted by one core, beside what is required and the bare key exchange that each needs."""
    agreed, key, said = announced(USERS)
    public, size, tags = crypto.public_box_key(said.tag_key), agreed.query.size, 10_000
    chunk = b"".join(crypto.seal(public, agreed.tag_info, (tag % size).to_bytes(4)) for tag in range(tags))
    others = [crypto.new_box_key().public_key() for _ in range(tags)]
    raw = key.private_bytes_raw()
    ours, bare = medians(
        5,
        lambda _: tags / _core_seconds(lambda: count(raw, agreed.tag_info, range(size), chunk)),
        lambda _: tags / _core_seconds(lambda: [key.exchange(other) for other in others]),
    )
    return [
        Figure.at_least(1, "tags opened and counted, one core", "per s", ours, 15_000, "required"),
        Figure.at_least(0.4, "tags opened and counted, one core", "per s", ours, bare, "bare X25519 exchanges"),
    ]


def _core_seconds(action: Callable[[], object]) -> float:
    """Seconds of one core, whatever else the machine is doing."""
    began = time.process_time()
    action()
    return time.process_time() - began


# A batch.


def batch() -> list[Figure]:
    """Dummies sealed by one core, and core seconds from a batch's last report to its counts, beside noise by users."""
    ours, users = (Passed(SQLiteStore(None), noise) for noise in MODES)
    sealed, bare = ours.dummies / ours.sealing, 1 / _bare_seal()
    what = f"from the last of {USERS:,} reports to counts, noise by servers"
    return [
        Figure.at_least(1, "dummies drawn and sealed, one core", "per s", sealed, 10_000, "required"),
        Figure.at_least(0.9, "dummies drawn and sealed, one core", "per s", sealed, bare, "bare seals"),
        Figure.at_most(1, what, "core s", ours.core, users.core, "noise by users"),
    ]


def _bare_seal() -> float:
    key = crypto.new_box_key().public_key()
    return _core_seconds(lambda: [crypto.seal(key, bytes(80), bytes(4)) for _ in range(5_000)]) / 5_000


class Passed:
    """One batch through a shuffler and an opener in this process; dummies are sealed before its last report comes."""

    def __init__(self, store: Store, noise: NoiseBy) -> None:
        agreed, key, said = announced(USERS, noise)
        coordinator, identity, enrolment = (SigningKey(Ed25519PrivateKey.generate()) for _ in range(3))
        limits = Limits(min_batch_size=1)
        shuffler = Shuffler(store, identity, coordinator.public, enrolment.public, limits)
        shuffler.announce(coordinator.sign(said))
        opening = wire.decode(Opening, shuffler.current(said.task).opening.payload)
        checked = Checked(agreed, opening.envelope_key)
        reports = [wire.decode(Upload, make_upload(checked, crypto.mint(enrolment))).reports[0] for _ in range(USERS)]
        shuffler.upload(said.task, [(0, 0, report) for report in reports[:-1]])
        self.sealing = _core_seconds(shuffler.seal_dummies)

        def finish() -> None:
            shuffler.upload(said.task, [(0, 0, reports[-1])])
            shuffler.advance()
            tags: list[list[bytes]] = [[] for _ in agreed.source.groups]
            for chunk in range(shuffler.status(said.task).chunks):
                command = Command(task=said.task, batch=0, attempt=0, action=Action.collect, chunk=chunk)
                for group, some in wire.sections(shuffler.collect(coordinator.sign(command))):
                    tags[group].append(bytes(some))
            Opener().count_all(key.private_bytes_raw(), agreed.tag_info, agreed.source.groups, tags)
            released = sum(len(some) for group in tags for some in group) // wire.SEALED_TAG_BYTES
            self.dummies = released - USERS * agreed.max_messages

        began = time.perf_counter()
        self.core = _core_seconds(finish)
        self.seconds = time.perf_counter() - began


# The node.


def node() -> list[Figure]:
    """One report of the paper's problem among 1,000 users at epsilon 1: played, randomized and sealed."""
    return [_report("servers", 3), _report("users", 50)]


def _report(noise: NoiseBy, limit: float) -> Figure:
    agreed, _, _ = announced(USERS, noise)
    checked = Checked(agreed, crypto.new_box_key().public_key().public_bytes_raw())
    env, token = tabular_env("riverswim"), secrets.token_bytes(wire.TOKEN_BYTES)
    key = crypto.public_box_key(checked.envelope_key)
    messages = agreed.max_messages
    made, bare = medians(
        15,
        lambda _: 1e3 * _core_seconds(lambda: make_report(checked, play(env, agreed), token)),
        lambda _: 1e3 * _core_seconds(lambda: [crypto.seal(key, b"", bytes(4)) for _ in range(messages)]),
    )
    what = f"one report, RiverSwim, n=1,000, epsilon=1, noise by {noise}, {messages} messages"
    return Figure.under(limit, what, "ms", made, bare, "its bare seals")


# All of it.


def demonstration() -> list[Figure]:
    """5,000 users from nothing to a learned policy, with every role's memory."""
    figures = demo.run(demo.Demo(users=5_000, env="spectrum", learner="sdp-pe", epsilon=3.0, seed=0), quiet=True)
    rows = [Figure.under(180, "demonstration, 5,000 users, spectrum", "s", figures["seconds"])]
    for name, megabytes in figures["peak_mb"].items():
        if megabytes is not None:
            rows.append(Figure.under(300, f"peak memory of the {name}", "MB", megabytes))
    return rows
