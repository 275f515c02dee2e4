"""The shuffler on a NATS cluster beside what it must reach: durable reports, and batches among kill -9."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.support.nats_cluster import MISSING, Cluster, server_binary
from tests.support.nats_processes import Rounds, front_ends

from bench.measure import Figure, SkippedError, core_time
from bench.network import MODES, Passed, announced, ask, make_upload, send
from shufflerl.network.demo import Role
from shufflerl.network.node.reporting import Checked
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.agreement import NoiseBy, parse_announcement
from shufflerl.network.protocol.crypto import SigningKey, mint
from shufflerl.network.protocol.wire import OpenBatch, Opening
from shufflerl.network.stores.nats_store import NatsStore

REPORTS, CONNECTIONS, REQUIRED, CORES = 16_000, 256, 4_000, 2
ROUNDS, USERS = 20, 200


def run() -> list[Figure]:
    """Durable reports through two front ends and three servers, beside SQLite through one; rounds of kill -9."""
    if server_binary() is None:
        raise SkippedError(MISSING)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("nats", "servers", "users", "one", "rounds"):
            (folder / name).mkdir()
        by_users = _on_a_cluster(folder / "users", "users")
        ours = _on_a_cluster(folder / "servers", "servers")
        cluster = Cluster(folder / "nats")
        try:
            latencies = {noise: _latency(cluster, noise) for noise in MODES}
            passed = rounds(folder / "rounds", cluster)
        finally:
            cluster.stop()
        peer = Measured(folder / "one", 1, [], "servers")
    what = f"durable reports, noise by servers, two front ends, three servers, {CONNECTIONS} connections"
    parts = ", ".join(f"{name} {1e6 * cost:.0f}" for name, cost in ours.core.items())
    return [
        Figure.at_least(1, what, "per s", ours.rate, REQUIRED, "required"),
        Figure.at_least(
            1, f"what {CORES} cores take by their time (µs: {parts})", "per s", ours.possible, REQUIRED, "required"
        ),
        Figure.at_least(1, what, "per s", ours.rate, by_users.rate, "noise by users"),
        Figure.at_least(0.5, what, "per s", ours.rate, peer.rate, "one front end on SQLite"),
        Figure.at_most(
            *(1, "from a batch's last report to counts, noise by servers", "s", latencies["servers"]),
            *(latencies["users"], "noise by users"),
        ),
        Figure.at_least(1, "rounds of kill -9 with all acknowledged reports released once", "", passed, ROUNDS, "all"),
    ]


def _on_a_cluster(folder: Path, noise: NoiseBy) -> Measured:
    """Two front ends on three servers of their own."""
    cluster = Cluster(folder)
    try:
        servers = [process.pid for process in cluster.processes if process is not None]
        return Measured(folder, 2, servers, noise, "--store", cluster.url)
    finally:
        cluster.stop()


def _latency(cluster: Cluster, noise: NoiseBy) -> float:
    store = NatsStore(cluster.url, name=f"latency-{noise}")
    try:
        return Passed(store, noise).seconds
    finally:
        store.close()


class Measured:
    """Reports per second of one report each, and the core time that front ends, servers and senders take for one."""

    def __init__(self, folder: Path, fronts: int, servers: list[int], noise: NoiseBy, *store: str) -> None:
        coordinator = SigningKey.load(folder / "coordinator.pem")
        SigningKey.load(folder / "keys" / "identity.pem")
        enrolment = SigningKey.load(folder / "keys" / "enrolment.pem")
        started: list[Role] = []
        try:
            for number in range(fronts):
                place = folder / f"front-{number}"
                shutil.copytree(folder / "keys", place)
                keys = ("--coordinator-key", str(coordinator.public), "--min-batch-size", "1")
                options = ("--folder", str(place), "--listen", "127.0.0.1:0", *keys, *store)
                started.append(Role("shuffler", place, *options))
            self._ports = [role.heard()["port"] for role in started]
            self._processes = {
                "front ends": [role.process.pid for role in started],
                "servers": servers,
                "senders": [os.getpid()],
            }
            asyncio.run(self._load(coordinator, enrolment, noise))
        finally:
            for role in started:
                role.stop()

    @property
    def possible(self) -> float:
        """Reports per second if nothing else ran and nothing waited."""
        return CORES / sum(self.core.values())

    async def _load(self, coordinator: SigningKey, enrolment: SigningKey, noise: NoiseBy) -> None:
        _, _, said = announced(REPORTS + 1, noise)  # it does not fill: releasing it is not what is timed
        task = said.task.hex()
        await ask(self._ports[0], "POST", "/v1/announcements", wire.encode(coordinator.sign(said)))
        batch = wire.decode(OpenBatch, await ask(self._ports[-1], "GET", f"/v1/tasks/{task}/batch"))
        opening = wire.decode(Opening, batch.opening.payload)
        checked = Checked(parse_announcement(batch.announcement.payload), opening.envelope_key)
        bodies = iter([make_upload(checked, mint(enrolment)) for _ in range(REPORTS)])
        before = self._core_times()
        began = time.perf_counter()
        ports = [self._ports[number % len(self._ports)] for number in range(CONNECTIONS)]
        await asyncio.gather(*(send(port, task, bodies, []) for port in ports))
        self.rate = REPORTS / (time.perf_counter() - began)
        self.core = {name: (spent - before[name]) / REPORTS for name, spent in self._core_times().items()}

    def _core_times(self) -> dict[str, float]:
        return {name: sum(map(core_time, processes)) for name, processes in self._processes.items()}


def rounds(folder: Path, cluster: Cluster) -> int:
    """Batches in whose middle a server, a front end or a worker drawn at random is killed; how many came out right."""
    with front_ends(folder, cluster) as system:
        system.start_all()
        batches = Rounds(system)
        for number in range(ROUNDS):
            victims: list[int | str] = [0, 1, 2, *system.all]
            victim = random.choice(victims)

            def kill(victim: int | str = victim) -> None:
                time.sleep(0.1 * random.random())
                if isinstance(victim, int):
                    cluster.kill(victim)
                    cluster.start(victim)
                else:
                    system.kill(victim)
                    system.begin(victim)

            try:
                batches.play(USERS, kill)
            except AssertionError as wrong:
                print(f"round {number}, {victim} killed: {wrong}")
                return number
            cluster.wait()
            if isinstance(victim, str):
                system.heard(victim)
    return ROUNDS
