"""What a batch of a million users costs on N machines: formulas fitted here, checked here, and by simulation.

A real shuffler process takes and releases batches of three sizes by each transport. Two of them give the constants of
the formulas, the third is predicted. `docs/projection.md` tells what is assumed of machines.
"""

from __future__ import annotations

import heapq
import random
import secrets
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import msgspec
import numpy as np

from bench.measure import Figure, SkippedError, core_time, cpu_seconds
from bench.transports import BUDGET, MILLION, Bench, alike
from shufflerl.counts import CountQuery
from shufflerl.mdp import Problem
from shufflerl.network.coordinator.opening import count, open_seeds
from shufflerl.network.demo import Role
from shufflerl.network.protocol import costs, crypto, masking, wire
from shufflerl.network.protocol.agreement import NoiseBy, mechanism
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.sources import Source, source
from shufflerl.network.protocol.wire import (
    Action,
    BatchStatus,
    Command,
    Exclusion,
    OpenBatch,
    Opening,
    Report,
    State,
    Transport,
    Upload,
)
from shufflerl.network.stores.store import BatchId, BatchRow, SQLiteStore

#: What is projected: users of a batch, machines of the shuffler's, and what each has.
USERS, MACHINES = 1_000_000, (1, 4, 16)
CORES, NETWORK, DISK = 8, 1.25e9, 1e9
#: Who adds the noise.
NOISE: tuple[NoiseBy, NoiseBy] = ("servers", "users")
#: Copies of a report that a cluster keeps.
REPLICAS = 3
#: Reports that are stored in one go, and that make a unit of work in the simulation.
GROUP = 64

#: Problems whose batches are measured, with how many users: the second is predicted from the others.
SIZES = {
    Transport.tags: ((Problem(3, 3, 2, 1), 800), (Problem(6, 4, 2, 1), 600), (Problem(8, 6, 3, 1), 300)),
    Transport.sums: ((Problem(6, 4, 2, 1), 800), (Problem(6, 60, 3, 1), 400), (Problem(6, 100, 4, 1), 200)),
}
PROJECTED = {"256 counters": Problem(6, 4, 2, 1), "1,022,000 counters": MILLION}

#: Of an envelope with nothing but a token in it.
ENVELOPE_BYTES = wire.TOKEN_BYTES + crypto.SEAL_BYTES


@dataclass(frozen=True)
class Load:
    """A batch by its numbers: users, bytes of a report, tags of one (0 for vectors), bytes of a sum (0 for tags).

    And the dummies that its shuffler seals while it fills.
    """

    users: int
    report: float
    tags: float
    vector: float
    dummies: float = 0.0

    @classmethod
    def of(cls, source: Source, transport: Transport) -> Load:
        """By the formulas of `docs/transports.md`."""
        if transport == Transport.tags:
            tags = source.tags_per_report
            return cls(source.users, ENVELOPE_BYTES + 52 * tags, tags, 0.0, source.expected_dummies)
        vector = source.query.size * costs.word_bytes(source)
        return cls(source.users, ENVELOPE_BYTES + wire.SEALED_SEED_BYTES + vector, 0.0, vector)


@dataclass(frozen=True)
class Spent:
    """Seconds of a core: to take reports in, to release them, to open the release; and bytes on disk before it."""

    ingest: float
    release: float
    opened: float
    stored: float


@dataclass(frozen=True)
class Model:
    """Per report and per byte of it: what a shuffler spends; per message and per byte of a vector: a coordinator.

    A dummy is sealed while reports are taken in, is released as 52 bytes of a report are, and is opened like any tag.
    """

    ingest: tuple[float, float]
    release: tuple[float, float]
    message: float
    mask: float
    stored: tuple[float, float]
    seal: float = 0.0

    def spent(self, load: Load) -> Spent:
        """The formula."""
        messages, dummies = load.tags if load.tags else 1, load.dummies * wire.SEALED_TAG_BYTES
        return Spent(
            load.users * (self.ingest[0] + self.ingest[1] * load.report) + load.dummies * self.seal,
            load.users * (self.release[0] + self.release[1] * load.report) + self.release[1] * dummies,
            load.users * (messages * self.message + load.vector * self.mask) + load.dummies * self.message,
            load.users * (self.stored[0] + self.stored[1] * load.report) + self.stored[1] * dummies,
        )


def run() -> list[Figure]:
    """A million users per batch on N machines: formulas against measurement here, simulation against formulas."""
    rows = []
    for transport in Transport:
        model, checks = fitted(transport)
        rows += checks
        for name, problem in PROJECTED.items():
            query = CountQuery.everything(problem)
            for noise in NOISE:
                adding = source(query, USERS, mechanism(noise, BUDGET).noise(query))
                rows += projected(f"{transport}, {name}, noise by {noise}", model, Load.of(adding, transport))
    return rows


# Measuring.


def fitted(transport: Transport) -> tuple[Model, list[Figure]]:
    """The model from two batches, and what it says of a third beside what that took."""
    (message, mask), seal = _coordinator(), _seal()
    loads, spent = zip(*(_measured(problem, users, transport) for problem, users in SIZES[transport]), strict=True)

    def line(values: list[float]) -> tuple[float, float]:
        each = [value / load.users for value, load in zip(values, loads, strict=True)]
        slope = max(0.0, (each[2] - each[0]) / (loads[2].report - loads[0].report))
        return max(0.0, each[0] - slope * loads[0].report), slope

    model = Model(
        line([one.ingest for one in spent]), line([one.release for one in spent]), message, mask,
        line([one.stored for one in spent]), seal,
    )  # fmt: skip
    said, took, load = model.spent(loads[1]), spent[1], loads[1]
    what = f"{transport}, {load.users:,} reports of {load.report / 1e3:,.1f} kB"
    return model, [
        alike(f"core time to take in {what}", "s", took.ingest, said.ingest),
        alike(f"core time to release {what}", "s", took.release, said.release),
        alike(f"core time to open {what}", "s", took.opened, said.opened),
        alike(f"bytes stored of {what}", "MB", took.stored / 1e6, said.stored / 1e6),
    ]


def _seal() -> float:
    """Seconds of a core per dummy sealed."""
    key = crypto.new_box_key().public_key()
    return cpu_seconds(lambda: [crypto.seal(key, bytes(80), bytes(4)) for _ in range(2000)]) / 2000


def _coordinator() -> tuple[float, float]:
    """Seconds of a core per message opened, and per byte of a mask made and added."""
    key, size = crypto.new_box_key(), 200_000
    tags = b"".join(crypto.seal(key.public_key(), b"", bytes(4)) for _ in range(2000))
    opened = cpu_seconds(lambda: count(key.private_bytes_raw(), b"", range(10), tags)) / 2000
    seeds = [secrets.token_bytes(wire.SEED_BYTES) for _ in range(100)]
    return opened, cpu_seconds(lambda: masking.sum_of_masks(seeds, size, 2)) / (100 * 2 * size)


def _measured(problem: Problem, users: int, transport: Transport) -> tuple[Load, Spent]:
    """A batch through a shuffler of its own, and what that spent."""
    bench = Bench(problem, users, transport)
    agreed, said = bench.agreed, bench.agreed.announcement
    load = Load.of(agreed.source, transport)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        identity = SigningKey.load(folder / "coordinator.pem")
        role = Role(
            *("shuffler", folder, "--folder", str(folder / "shuffler"), "--listen", "127.0.0.1:0"),
            *("--min-batch-size", "1", "--coordinator-key", str(identity.public)),
        )
        try:
            at, process = f"http://127.0.0.1:{role.heard()['port']}", role.process.pid
            with httpx2.Client(base_url=at, timeout=60, trust_env=False) as client:
                client.post("/v1/announcements", content=wire.encode(identity.sign(said))).raise_for_status()
                batch = wire.decode(OpenBatch, client.get(f"/v1/tasks/{said.task.hex()}/batch").content)
                key = wire.decode(Opening, batch.opening.payload).envelope_key
                enrolment = SigningKey.load(folder / "shuffler" / "enrolment.pem")
                bodies = [_upload(bench, key, crypto.mint(enrolment)) for _ in range(users)]
                before = core_time(process)
                for body in bodies[:-1]:
                    client.post(f"/v1/tasks/{said.task.hex()}/reports", content=body).raise_for_status()
                ingest = (core_time(process) - before) * users / (users - 1)
                before = core_time(process)
                client.post(f"/v1/tasks/{said.task.hex()}/reports", content=bodies[-1]).raise_for_status()
                opened = _release(client, identity, bench)
                release = core_time(process) - before
        finally:
            role.stop()
        stored = _stored(folder / "alone.db", bodies)
    return load, Spent(ingest, release, opened, stored)


def _stored(path: Path, bodies: list[bytes]) -> float:
    """Bytes of the file that these reports take when it is at rest."""
    store, id = SQLiteStore(path), BatchId(bytes(16), 0, 0)
    store.create(BatchRow(id, len(bodies) + 1, b"", b"", 0.0), bytes(32))
    reports = [wire.decode(Upload, body).reports[0] for body in bodies]
    store.add(id, [(report.report_id, report.envelope) for report in reports])
    store.close()
    return float(path.stat().st_size)


def _upload(bench: Bench, key: bytes, token: bytes) -> bytes:
    """A report as long as all are. Tags are random bytes, which the shuffler cannot tell; seeds are real."""
    agreed = bench.agreed
    size = agreed.envelope_bytes - ENVELOPE_BYTES
    if agreed.transport == Transport.sums:
        seed = crypto.seal(bench.tag_key.public_key(), agreed.seed_info, secrets.token_bytes(wire.SEED_BYTES))
        text = token + seed + secrets.token_bytes(size - len(seed))
    else:
        text = token + secrets.token_bytes(size)
    report_id = crypto.report_id(agreed.announcement.task, token)
    envelope = crypto.seal(crypto.public_box_key(key), agreed.envelope_info(report_id), text)
    return wire.encode(Upload(batch=0, attempt=0, reports=[Report(report_id=report_id, envelope=envelope)]))


def _release(client: httpx2.Client, identity: SigningKey, bench: Bench) -> float:
    """Play the coordinator until the batch is released; seconds of a core that it spent on it."""
    agreed, said = bench.agreed, bench.agreed.announcement
    raw, size = bench.tag_key.private_bytes_raw(), agreed.query.size

    def ask(path: str, message: wire.Message) -> httpx2.Response:
        return client.post(path, content=wire.encode(identity.sign(message)))

    def command(action: Action, chunk: int = 0) -> Command:
        return Command(task=said.task, batch=0, attempt=0, action=action, chunk=chunk)

    spent, deadline = 0.0, time.monotonic() + 60
    while time.monotonic() < deadline:
        status = msgspec.json.decode(client.get(f"/v1/tasks/{said.task.hex()}/status").content, type=BatchStatus)
        if status.state == State.released:
            chunks = [ask("/v1/releases", command(Action.collect, chunk)).content for chunk in range(status.chunks)]
            if agreed.transport == Transport.tags:
                spent = sum(
                    cpu_seconds(partial(count, raw, agreed.tag_info, range(size), bytes(tags)))
                    for chunk in chunks
                    for _, tags in wire.sections(chunk)
                )
            return spent
        if agreed.transport == Transport.sums and spent == 0.0:
            answer = ask("/v1/seeds", command(Action.seeds))
            if answer.status_code == 200:
                spent = cpu_seconds(partial(open_seeds, raw, agreed.seed_info, answer.content))
                seeds = [secrets.token_bytes(wire.SEED_BYTES) for _ in range(agreed.batch.users)]
                spent += cpu_seconds(partial(masking.sum_of_masks, seeds, size, agreed.word_bytes))
                ask("/v1/exclusions", Exclusion(task=said.task, batch=0, attempt=0, positions=[]))
        time.sleep(0.05)
    raise SkippedError("The batch was not released in a minute; this machine has too much else to do.")


# Projecting.


def projected(what: str, model: Model, load: Load) -> list[Figure]:
    """The whole batch on each number of machines: by formula, and by a simulation of queues."""
    rows = []
    for machines in MACHINES:
        formula, simulated = by_formula(model, load, machines), by_simulation(model, load, machines)
        rows.append(alike(f"{what}: a million users on {machines} machines", "s", simulated, formula))
    spent, sent = model.spent(load), load.users * load.report
    print(
        f"{what}, per million users: {(spent.ingest + spent.release) / 3600:,.2f} core hours at the shuffler, "
        f"{spent.opened / 3600:,.2f} at the coordinator, {sent / 1e9:,.1f} GB in, "
        f"{load.users * _out(load) / 1e9:,.1f} GB out, {REPLICAS * spent.stored / 1e9:,.1f} GB stored"
    )
    return rows


def _out(load: Load) -> float:
    """Bytes that the shuffler hands over, per user."""
    if load.tags:
        return (load.tags + load.dummies / load.users) * wire.SEALED_TAG_BYTES
    return wire.SEALED_SEED_BYTES + load.vector / load.users


def by_formula(model: Model, load: Load, machines: int) -> float:
    """Seconds from the first report to the last tag opened; in each phase what is scarcest decides.

    The coordinator has as many machines as the shuffler. Reports are written to as many disks as there are copies.
    """
    spent, copies = model.spent(load), min(REPLICAS, machines)
    sent = load.users * load.report
    ingest = max(spent.ingest / (machines * CORES), copies * sent / (machines * min(NETWORK, DISK)))
    release = max(spent.release / (machines * CORES), sent / (machines * DISK))
    opened = max(spent.opened / (machines * CORES), load.users * _out(load) / (machines * NETWORK))
    return ingest + release + opened


def by_simulation(model: Model, load: Load, machines: int) -> float:
    """The same with queues: groups of reports go to a machine at random and wait there for its line, disk and cores.

    The cores of a machine serve in turn whoever waits; times vary by a quarter. A phase ends with its last group.
    """
    chance, spent, copies = random.Random(machines), model.spent(load), min(REPLICAS, machines)
    groups = -(-load.users // GROUP)
    size = load.users * load.report / groups
    phases = (
        (spent.ingest / groups, size * copies / min(NETWORK, DISK)),
        (spent.release / groups, size / DISK),
        (spent.opened / groups, load.users * _out(load) / groups / NETWORK),
    )
    clock = 0.0
    for core, line in phases:
        lines = [clock] * machines
        cores = [[clock] * CORES for _ in range(machines)]
        varied = np.random.default_rng(machines).gamma(16, 1 / 16, groups)
        for factor in varied.tolist():
            machine = chance.randrange(machines)
            lines[machine] += line
            free = max(heapq.heappop(cores[machine]), lines[machine])
            heapq.heappush(cores[machine], free + core * factor)
        clock = max(*lines, *(max(some) for some in cores))
    return clock
