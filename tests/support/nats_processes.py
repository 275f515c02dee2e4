"""Front ends of one shuffler over a NATS cluster, with a balancer before them, as real processes for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from shufflerl.network.node.reporting import Invitation, check_signatures, seal_report
from shufflerl.network.protocol import wire
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.network.protocol.wire import Action, BatchStatus, OpenBatch, Outcomes, State, Upload
from tests.support.nats_cluster import Cluster
from tests.support.network_processes import Processes
from tests.support.network_world import World
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, telling, until
from tests.support.warm import WarmRole


class Balancer:
    """Passes each connection on to a front end that answers, chosen at random."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._pass_on, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in random.sample(self.ports, len(self.ports)):
            with contextlib.suppress(OSError):
                back, forth = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            writer.close()
            return
        await asyncio.gather(_pump(reader, forth), _pump(back, writer))

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class FrontEnds(Processes):
    """A coordinator, and one shuffler as many processes.

    Front ends "front-0", ... stand behind a balancer, which is "shuffler" to all others; workers "worker-0", ... are
    like them, but nobody sends them anything: they only mix.
    """

    def __init__(self, folder: Path, servers: str, *, fronts: int = 2, workers: int = 1, **options: Any) -> None:
        super().__init__(folder, **options)
        self.fronts = [f"front-{number}" for number in range(fronts)]
        self.all = [*self.fronts, *(f"worker-{number}" for number in range(workers))]
        self._servers = servers
        for name in self.all:
            self.ports[name] = free_port()
            (folder / name).mkdir()
            for secret in ("identity.pem", "enrolment.pem"):
                shutil.copy(folder / "shuffler" / secret, folder / name / secret)
        self._balancer = Balancer([self.ports[name] for name in self.fronts])
        self.ports["shuffler"] = self._balancer.port
        self.client.close()
        self.client = new_client()

    def start(self, name: str, crash_at: str = "") -> dict[str, Any]:
        return self.heard(name, crash_at) if self.begin(name, crash_at) else super().start(name, crash_at)

    def begin(self, name: str, crash_at: str = "") -> bool:
        """Start one of its processes without waiting for it; says if it is one of them."""
        if name not in self.all:
            return False
        place = self.folder / name
        common = ("--folder", str(place), "--listen", f"127.0.0.1:{self.ports[name]}", "--store", self._servers)
        key = ("--coordinator-key", str(self.keys["coordinator"]), "--min-batch-size", "1")
        self.roles[name] = WarmRole("shuffler", place, *common, *key, environment={"SHUFFLERL_CRASH_AT": crash_at})
        return True

    def start_all(self) -> None:
        for name in self.all:
            self.begin(name)
        for name in self.all:
            self.heard(name)

    def stop(self) -> None:
        super().stop()
        self._balancer.close()


@contextlib.contextmanager
def front_ends(folder: Path, cluster: Cluster, **options: Any) -> Iterator[FrontEnds]:
    system = FrontEnds(folder, cluster.url, **options)
    try:
        with telling(folder, cluster.folder):
            yield system
    finally:
        system.stop()


def new_client() -> httpx2.Client:
    """Every request is a connection of its own, and so may go to another front end."""
    return httpx2.Client(timeout=PATIENCE, trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0))


class Rounds:
    """Batches whose every message is known, sent through the front ends while something is done to the processes."""

    def __init__(self, system: FrontEnds) -> None:
        self.system = system
        self.world = World(noise_mean=1e-9)
        self.world.coordinator = SigningKey.load(system.folder / "coordinator" / "identity.pem")
        self.world.enrolment = system.enrolment
        self.world.store.close()
        self._numbers = itertools.count()

    def play(self, users: int, disturb: Callable[[], None]) -> None:
        """One batch with more users than it takes; `disturb` is called when it is half full.

        Those who were told that they are in are exactly those in the release, each once, and all front ends give the
        same release.
        """
        number, world = next(self._numbers), self.world
        world.users = users
        said = wire.encode(world.coordinator.sign(world.announcement(number)))
        until(lambda: self._answer("shuffler", "POST", "/v1/announcements", said))
        path = f"/v1/tasks/{world.task.hex()}"
        batch = wire.decode(OpenBatch, until(lambda: self._answer("shuffler", "GET", f"{path}/batch")))
        invitation = Invitation(world.task, "http://unused", world.coordinator.public, self.system.keys["shuffler"])
        checked = check_signatures(invitation, batch)
        reports = [
            seal_report(checked, [3 * mark, 3 * mark + 1, 3 * mark + 2], world.mint())
            for mark in range(users + users // 10)
        ]
        half = threading.Event()
        verdicts: dict[int, str] = {}

        def send(mark: int) -> None:
            upload = wire.encode(Upload(batch=number, attempt=0, reports=[reports[mark]]))
            answer = until(lambda: self._answer("shuffler", "POST", f"{path}/reports", upload))
            (outcome,) = wire.decode(Outcomes, answer).outcomes
            verdicts[mark] = "in" if outcome.problem is None else outcome.problem.type.rpartition(":")[2]
            if len(verdicts) > users // 2:
                half.set()

        with ThreadPoolExecutor(8) as senders:
            sending = [senders.submit(send, mark) for mark in range(len(reports))]
            half.wait(PATIENCE)
            disturb()
            for one in sending:
                one.result()
        # A verdict that was lost is asked for again, and is then one of these.
        members = {mark for mark, verdict in verdicts.items() if verdict in ("in", "duplicate", "replayed")}
        assert {verdicts[mark] for mark in verdicts.keys() - members} <= {"late"}
        releases = [self._release(name, number) for name in self.system.fronts]
        assert releases.count(releases[0]) == len(releases)
        tags = world.tags(releases[0], number)
        assert sorted(tags) == sorted(tag for mark in members for tag in range(3 * mark, 3 * mark + 3))
        assert len(members) == users
        until(lambda: self._answer("shuffler", "POST", "/v1/scrubs", wire.encode(world.command(Action.scrub, number))))

    def _release(self, name: str, number: int) -> bytes:
        def released() -> BatchStatus | None:
            answer = self._answer(name, "GET", f"/v1/tasks/{self.world.task.hex()}/status")
            status = None if answer is None else msgspec.json.decode(answer, type=BatchStatus)
            return status if status is not None and status.state == State.released else None

        chunks = until(released).chunks
        commands = [wire.encode(self.world.command(Action.collect, number, chunk=chunk)) for chunk in range(chunks)]
        return b"".join(until(partial(self._answer, name, "POST", "/v1/releases", one)) for one in commands)

    def _answer(self, name: str, method: str, path: str, content: bytes = b"") -> bytes | None:
        """What a front end answers; None if it cannot now. A new client each: many threads ask."""
        try:
            with new_client() as client:
                answer = client.request(method, f"{self.system.at(name)}{path}", content=content)
        except httpx2.HTTPError:
            return None
        assert answer.status_code in (200, 503, 507), answer.text
        return answer.content if answer.status_code == 200 else None
