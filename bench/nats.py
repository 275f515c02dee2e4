"""The shuffler on a NATS cluster beside what it must reach: durable reports through two front ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path

from tests.nats_cluster import MISSING, Cluster, server_binary

from bench.measure import Figure, SkippedError
from bench.network import announced, ask, core_time, make_upload, send
from shufflerl.network import wire
from shufflerl.network.agreement import understand
from shufflerl.network.crypto import Enrolment, SigningKey
from shufflerl.network.demo import Role
from shufflerl.network.reporting import Checked
from shufflerl.network.wire import OpenBatch, Opening

REPORTS, CONNECTIONS = 16_000, 64


def run() -> list[Figure]:
    """Durable reports per second through two front ends and three servers, beside SQLite through one."""
    if server_binary() is None:
        raise SkippedError(MISSING)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "nats").mkdir()
        cluster = Cluster(folder / "nats")
        try:
            servers = [process.pid for process in cluster.processes if process is not None]
            ours = Measured(folder / "two", 2, servers, "--store", cluster.url)
        finally:
            cluster.stop()
        peer = Measured(folder / "one", 1, [])
    print(vars(ours), vars(peer), os.getloadavg())
    return []


class Measured:
    """Reports per second, and seconds of core time per report of front ends, servers and whoever sends."""

    def __init__(self, folder: Path, fronts: int, servers: list[int], *store: str) -> None:
        folder.mkdir()
        coordinator = SigningKey.load(folder / "coordinator.pem")
        identity = folder / "keys"
        SigningKey.load(identity / "identity.pem")
        enrolment = Enrolment.load(identity / "enrolment.key")
        started: list[Role] = []
        try:
            for number in range(fronts):
                place = folder / f"front-{number}"
                shutil.copytree(identity, place)
                keys = ("--coordinator-key", str(coordinator.public), "--min-batch-size", "1")
                options = ("--folder", str(place), "--listen", "127.0.0.1:0", *keys, *store)
                started.append(Role("shuffler", place, *options))
            ports = [role.heard()["port"] for role in started]
            processes = {"fronts": [role.process.pid for role in started], "servers": servers, "senders": [os.getpid()]}
            asyncio.run(self._load(ports, coordinator, enrolment, processes))
        finally:
            for role in started:
                role.stop()

    async def _load(
        self, ports: list[int], coordinator: SigningKey, enrolment: Enrolment, processes: dict[str, list[int]]
    ) -> None:
        _, _, said = announced(REPORTS + 1)
        task = said.task.hex()
        await ask(ports[0], "POST", "/v1/announcements", wire.encode(coordinator.sign(said)))
        batch = wire.decode(OpenBatch, await ask(ports[-1], "GET", f"/v1/tasks/{task}/batch"))
        opening = wire.decode(Opening, batch.opening.payload)
        checked = Checked(understand(batch.announcement.payload), opening.envelope_key)
        bodies = iter([make_upload(checked, enrolment.mint()) for _ in range(REPORTS)])
        before = {name: sum(map(core_time, pids)) for name, pids in processes.items()}
        began = time.perf_counter()
        await asyncio.gather(*(send(ports[number % len(ports)], task, bodies, []) for number in range(CONNECTIONS)))
        self.rate = REPORTS / (time.perf_counter() - began)
        self.core = {
            name: 1e6 * (sum(map(core_time, pids)) - before[name]) / REPORTS for name, pids in processes.items()
        }
